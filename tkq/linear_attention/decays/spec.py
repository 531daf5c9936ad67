"""What was asked for, as far as a kernel of `column_decays` depends on it: the compile key."""
from __future__ import annotations

from dataclasses import dataclass

from tkq.linear_attention.spec import COLUMN_DIMS

DTYPES = ("bf16", "fp16", "fp32")


@dataclass(frozen=True)
class DecaySpec:
    """dtype: of g and of its gradient. head_dim: columns of a head. bounded: is there a lower bound? gradient: of a
    given gradient of the decays' logarithms, that of g and sums of those of dt_bias and A_log."""

    dtype: str
    head_dim: int
    bounded: bool = False
    gradient: bool = False

    def __post_init__(self):
        for name, got, allowed in (("dtype", self.dtype, DTYPES), ("head_dim", self.head_dim, COLUMN_DIMS)):
            if got not in allowed:
                raise ValueError(f"DecaySpec: {name} is {got!r}, allowed are {', '.join(map(str, allowed))}")
