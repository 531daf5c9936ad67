"""What was asked for, as far as a kernel of Based depends on it: a frozen dataclass, the compile key."""
from __future__ import annotations

from dataclasses import dataclass

DTYPES = ("bf16", "fp16")
FEATURE_DIM = 16  # of q and k
VALUE_DIMS = tuple(range(32, 129, 16))
PARTS = (None, "states", "outputs")


@dataclass(frozen=True)
class BasedSpec:
    """A launch of Based.

    dtype: of q, k, v and o. value_dim: V. norm: outputs are divided by the sums of their weights, which come out, too;
    not reversed. reverse: from the last token to the first, each of which sees those behind it: v's gradient is of this
    form. part: of sequences in segments: "states" are what each adds to the state, "outputs" begin with the sum of the
    states of those before; None: a block has a whole sequence.
    """

    dtype: str
    value_dim: int
    norm: bool = True
    reverse: bool = False
    part: str | None = None

    def __post_init__(self):
        for name, got, allowed in (("dtype", self.dtype, DTYPES), ("value_dim", self.value_dim, VALUE_DIMS),
                                   ("part", self.part, PARTS)):
            if got not in allowed:
                raise ValueError(f"BasedSpec: {name} is {got!r}, allowed are {', '.join(map(str, allowed))}")
        if self.norm and self.reverse:
            raise ValueError("BasedSpec: norm and reverse, allowed is one of them")


@dataclass(frozen=True)
class GradientSpec:
    """A launch that makes the gradient of q, or reversed that of k. Otherwise as `BasedSpec`."""

    dtype: str
    value_dim: int
    norm: bool = True
    reverse: bool = False

    def __post_init__(self):
        for name, got, allowed in (("dtype", self.dtype, DTYPES), ("value_dim", self.value_dim, VALUE_DIMS)):
            if got not in allowed:
                raise ValueError(f"GradientSpec: {name} is {got!r}, allowed are {', '.join(map(str, allowed))}")
