"""What was asked for, as far as a kernel behind the engine's launches depends on it: the compile key."""
from __future__ import annotations

from dataclasses import dataclass

from tkq.linear_attention.spec import DTYPES, WIDE

VECTOR = 8  # elements of 16 bits: 16 bytes
MOST_AT_ONCE = 8  # heads whose loads are under way


@dataclass(frozen=True)
class HeadSumsSpec:
    """Sums over heads that share one (`heads.HeadSums`). dtype: of the sum. columns: of a head. of: dtype of what is
    summed. at_once: how many heads a thread loads ahead; it divides their number."""

    dtype: str
    columns: int
    of: str
    at_once: int = 1

    def __post_init__(self):
        for name, got, allowed in (("dtype", self.dtype, DTYPES), ("of", self.of, (self.dtype, "fp32"))):
            if got not in allowed:
                raise ValueError(f"HeadSumsSpec: {name} is {got!r}, allowed are {', '.join(map(str, allowed))}")
        if self.columns < VECTOR or self.columns % VECTOR:
            raise ValueError(f"HeadSumsSpec: columns is {self.columns}, allowed are multiples of {VECTOR}")
        if not 1 <= self.at_once <= MOST_AT_ONCE:
            raise ValueError(f"HeadSumsSpec: at_once is {self.at_once}, allowed are 1 to {MOST_AT_ONCE}")


@dataclass(frozen=True)
class RowDotsSpec:
    """Dot products of rows (`rows.RowDots`). dtype: of both tensors. columns: of a row. out: dtype of the products.
    lanes: neighbouring threads of a row, a power of 2."""

    dtype: str
    columns: int
    out: str
    lanes: int

    def __post_init__(self):
        for name, got, allowed in (("dtype", self.dtype, DTYPES), ("out", self.out, WIDE),
                                   ("lanes", self.lanes, (1, 2, 4, 8, 16, 32))):
            if got not in allowed:
                raise ValueError(f"RowDotsSpec: {name} is {got!r}, allowed are {', '.join(map(str, allowed))}")
        if self.columns < VECTOR or self.columns % VECTOR:
            raise ValueError(f"RowDotsSpec: columns is {self.columns}, allowed are multiples of {VECTOR}")


def at_once(heads: int) -> int:
    """The largest power of 2 that divides the heads, as far as a thread has room for their loads."""
    return min(heads & -heads, MOST_AT_ONCE)


def lanes(columns: int) -> int:
    """Of a row, as many as it has vectors, rounded up to a power of 2; a warp at most."""
    return min(1 << (columns // VECTOR - 1).bit_length(), 32)
