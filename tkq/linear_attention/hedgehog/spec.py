"""What was asked for, as far as a kernel of Hedgehog's attention depends on it: the compile key."""
from __future__ import annotations

from dataclasses import dataclass

from tkq.linear_attention.spec import DTYPES

HEAD_DIMS = (64, 128)
PARTS = (None, "states", "outputs")
FEATURES = (32, 64)  # columns of a map; a token has twice as many features


@dataclass(frozen=True)
class HedgehogSpec:
    """dtype: of q, k, v, the maps and o. head_dim: columns of q, k and v. features: columns of the maps. part: of
    sequences in segments "states", what they add to the state, or "outputs"; None of whole ones. keeps: do features
    leave, for gradients?"""

    dtype: str
    head_dim: int
    features: int
    part: str | None = None
    keeps: bool = False

    def __post_init__(self):
        for name, got, allowed in (("dtype", self.dtype, DTYPES), ("head_dim", self.head_dim, HEAD_DIMS),
                                   ("features", self.features, FEATURES), ("part", self.part, PARTS)):
            if got not in allowed:
                raise ValueError(f"HedgehogSpec: {name} is {got!r}, allowed are {', '.join(map(str, allowed))}")
        if self.keeps and self.part == "states":
            raise ValueError("HedgehogSpec: keeps, allowed is where outputs are made, not with part 'states'")

    @property
    def in_place(self) -> bool:
        """Have a tile's features the room of the tile itself?"""
        return 2 * self.features == self.head_dim


@dataclass(frozen=True)
class WindowSpec:
    """The window's part of the gradients, of maps of 32 columns. dtype, head_dim: as `HedgehogSpec` has them."""

    dtype: str
    head_dim: int

    def __post_init__(self):
        for name, got, allowed in (("dtype", self.dtype, DTYPES), ("head_dim", self.head_dim, HEAD_DIMS)):
            if got not in allowed:
                raise ValueError(f"WindowSpec: {name} is {got!r}, allowed are {', '.join(map(str, allowed))}")


@dataclass(frozen=True)
class GradientSpec:
    """Gradients of queries, or of keys and values, of maps of 64 columns. dtype, head_dim: as `HedgehogSpec` has
    them."""

    dtype: str
    head_dim: int

    def __post_init__(self):
        for name, got, allowed in (("dtype", self.dtype, DTYPES), ("head_dim", self.head_dim, HEAD_DIMS)):
            if got not in allowed:
                raise ValueError(f"GradientSpec: {name} is {got!r}, allowed are {', '.join(map(str, allowed))}")
