"""What was asked for, as far as the kernels beside the engine's, of segments, depend on it: the compile keys."""
from __future__ import annotations

from dataclasses import dataclass

from tkq.linear_attention.spec import DTYPES

TRANSFERS = ("none", "heads", "columns", "matrix", "transposed")
STATES = (None, "fp32", "bf16")
WIDEST = 128  # K: a thread has a row of it


@dataclass(frozen=True)
class CombineSpec:
    """head_dim: K. transfer: what a segment makes of a state before it: "none", nothing; "heads", a factor for each
    head; "columns", for each row of K, too; "matrix", the transpose of a matrix of K x K; "transposed", that matrix.
    initial, final: dtypes of the state before the first segment and of that behind the last one, or None. reverse: the
    last segment is the first. reach: with a matrix, of which segments it is nothing is given (see `reach.Reach`).
    halves: segments are halves of others, whose first states alone are made, and of which some are left out (see
    `engine.segmented.is_needed`); with reach."""

    head_dim: int
    transfer: str = "none"
    initial: str | None = None
    final: str | None = None
    reverse: bool = False
    reach: bool = False
    halves: bool = False

    def __post_init__(self):
        for name, got, allowed in (("head_dim", self.head_dim, tuple(range(32, WIDEST + 1, 16))),
                                   ("transfer", self.transfer, TRANSFERS),
                                   ("initial", self.initial, STATES), ("final", self.final, STATES)):
            if got not in allowed:
                raise ValueError(f"CombineSpec: {name} is {got!r}, allowed are {', '.join(map(str, allowed))}")
        if self.reach and self.transfer not in ("matrix", "transposed"):
            raise ValueError(f"CombineSpec: reach, allowed is with a matrix, and not with transfer {self.transfer!r}")
        if self.halves and not self.reach:
            raise ValueError("CombineSpec: halves, allowed is with reach")


@dataclass(frozen=True)
class ReachSpec:
    """How many chunks reach a segment's last state (`reach.Reach`). dtype: of k. head_dim: K, whose
    vectors are those of 8 or 16 lanes. beta: its dtype."""

    dtype: str
    head_dim: int
    beta: str

    def __post_init__(self):
        for name, got, allowed in (("dtype", self.dtype, DTYPES), ("beta", self.beta, ("fp32", "bf16")),
                                   ("head_dim", self.head_dim, (64, 128))):
            if got not in allowed:
                raise ValueError(f"ReachSpec: {name} is {got!r}, allowed are {', '.join(map(str, allowed))}")
