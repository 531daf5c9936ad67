"""What the kernels of transforms of many points were asked for: the compile keys.

A sequence of N = R N2 tokens is a matrix of R rows and N2 columns, n = N2 n1 + n2. R is 64 times the radix, N2 64 times
the rows of a transform within a tile of 64 x 64 numbers (`tkq.convolution.fft.spec`).
"""
from __future__ import annotations

from dataclasses import dataclass

from tkq.convolution.fft.spec import COLS, COLUMN_SCALE, ROWS, TRANSFORM_ROWS, row_scale

DTYPES = "bf16", "fp16", "fp32"
RADICES = 1, 2, 4, 8, 16
PART = 32  # columns that a lane of four stores together
SEGMENT = 16384  # tokens whose largest number is noted


def _refuse(cls, **fields):
    for name, (got, allowed) in fields.items():
        if got not in allowed:
            raise ValueError(f"{cls}: {name} is {got!r}, allowed are {', '.join(map(str, allowed))}")


@dataclass(frozen=True)
class ColumnSpec:
    """Of transforms of columns, forth and back. dtype: of the sequences. radix: transforms of 64 points that make one.
    gate: the sequences are multiplied by another tensor. split: operands of products, and what lies between passes, are
    the sum of two fp16 numbers. noted: back, results in fp32 are those of sequences, whose largest numbers are noted,
    as 16-bit ones always are; otherwise they are a filter's gradient."""

    dtype: str
    radix: int = 1
    gate: bool = False
    split: bool = False
    noted: bool = False
    vector = 8  # neighbours of a thread: lengths are multiples of it

    def __post_init__(self):
        _refuse("ColumnSpec", dtype=(self.dtype, DTYPES), radix=(self.radix, RADICES))
        if self.noted and self.dtype != "fp32":
            raise ValueError(f"ColumnSpec: noted is True, allowed is False but for fp32, dtype is {self.dtype!r}")

    @property
    def rows(self) -> int:
        """Points of a column's transform."""
        return ROWS * self.radix

    @property
    def cols(self) -> int:
        """Of a tile: what accumulators have room for."""
        return COLS if self.radix == 1 else PART if self.radix <= 8 else PART // 2

    @property
    def radix_first(self) -> bool:
        """Sums of as many numbers as the radix has come first, products after, one of which at a time is in
        accumulators. Row 64 q + c of the result has frequency q + radix c."""
        return self.split or self.radix > 4

    @property
    def each(self) -> int:
        """Neighbours that a thread has of a row, where the radix comes first: as many numbers of each are in
        registers as the radix has."""
        return 8 // max(1, self.radix // 4)

    @property
    def planes(self) -> int:
        """Of 16 bits, of which a complex number is made: its parts, of split ones those of the low part behind."""
        return planes_of(self.split)

    @property
    def tile_bytes(self) -> int:
        """Of a warpgroup's tiles, where the radix comes first."""
        return 2 * self.planes * self.radix * ROWS * self.cols

    @property
    def most(self) -> int:
        """Points of the longest sequence."""
        return ROWS * max(4, self.radix) * ROWS * COLS

    @property
    def scale(self) -> float:
        """Beside that of a transform of 64 points."""
        return row_scale(self.rows) / row_scale(ROWS)


@dataclass(frozen=True)
class LargestSpec:
    """Of sequences' largest numbers. dtype, gate: as of `ColumnSpec`."""

    dtype: str
    gate: bool = False
    vector = 8

    def __post_init__(self):
        _refuse("LargestSpec", dtype=(self.dtype, DTYPES))


@dataclass(frozen=True)
class RowSpec:
    """Of what is done with rows. rows: of a transform, which has 64 times as many points. split: as of `ColumnSpec`."""

    rows: int
    split: bool = False

    def __post_init__(self):
        _refuse("RowSpec", rows=(self.rows, TRANSFORM_ROWS))


@dataclass(frozen=True)
class Size:
    """Of transforms of N points: the radix of columns, the rows of a tile's transforms; split: as of `ColumnSpec`."""

    radix: int
    rows: int
    split: bool = False

    @property
    def points(self) -> int:
        return ROWS * self.radix * self.row

    @property
    def row(self) -> int:
        """Points of a row, N2."""
        return COLS * self.rows

    @property
    def planes(self) -> int:
        """As of `ColumnSpec`."""
        return planes_of(self.split)

    @property
    def bytes(self) -> int:
        """Of a sequence between passes."""
        return 2 * self.planes * self.points

    @property
    def tiles(self) -> int:
        """Of 4096 points."""
        return self.points // (ROWS * COLS)

    @property
    def scale(self) -> float:
        """Of a transform, which is that much smaller than the sum that defines it."""
        return row_scale(ROWS * self.radix) * row_scale(self.rows) * COLUMN_SCALE

    @property
    def above(self) -> int:
        """Sequences are brought below 2^(above + 1) before they are transformed: the vector of a sequence's spectrum
        stays shorter than 2^13, whatever the numbers, and each of its products with a filter's below 2 (1 + i) below
        2^15."""
        return 12 - (round(self.points * self.scale).bit_length() - 1)


def planes_of(split: bool) -> int:
    return 4 if split else 2


def size_of(tokens: int, split: bool = False) -> Size | None:
    """The smallest from 8192 points on; None where there are too many tokens."""
    for rows in TRANSFORM_ROWS:
        if ROWS * COLS * rows >= tokens:
            return Size(1, rows, split)
    return next((Size(radix, TRANSFORM_ROWS[-1], split) for radix in RADICES
                 if ROWS * radix * COLS * TRANSFORM_ROWS[-1] >= tokens), None)
