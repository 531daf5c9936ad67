"""What MLA decoding was asked for: the compile key."""
from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

DTYPES = ("bf16", "fp16")
HEAD_DIM, HEAD_DIM_V = 576, 512
ROW_BYTES = 656  # of a float8 row: 512 columns of e4m3, a float32 scale for each 128 of them, 64 columns of bf16


@dataclass(frozen=True)
class MlaSpec:
    """dtype: of q, the cache and o. edges: the rows of a tile see different keys, as several causal queries do. lse: is
    it written? fixed_splits: see `tkq.plan_decode`, batch_invariant. sparse: each query has a list of rows of the
    cache, and is a sequence of the plan. lengths: dimensions of what says how long the lists are; 0: all as long as
    they can be. float8: rows of the cache have ROW_BYTES."""

    dtype: str
    edges: bool = False
    lse: bool = False
    fixed_splits: bool = False
    sparse: bool = False
    lengths: int = 0
    float8: bool = False
    head_dim: ClassVar[int] = HEAD_DIM
    head_dim_v: ClassVar[int] = HEAD_DIM_V
    paged: ClassVar[bool] = True
    sinks: ClassVar[None] = None
    cache: ClassVar[None] = None
    scales: ClassVar[None] = None
    ragged: ClassVar[bool] = False
    few: ClassVar[bool] = False
    tree: ClassVar[bool] = False
    softcap: ClassVar[bool] = False

    @property
    def inner(self) -> str:
        """The products' type."""
        return self.dtype

    def __post_init__(self):
        if self.dtype not in DTYPES:
            raise NotImplementedError(f"MlaSpec: dtype is {self.dtype!r}, allowed are {', '.join(DTYPES)}")
        if self.float8 and self.dtype != "bf16":
            raise NotImplementedError(f"MlaSpec: dtype is {self.dtype!r}, float8 is True; allowed is bf16")
        if self.edges and self.sparse:
            raise NotImplementedError("MlaSpec: edges is True, and sparse; a list has only keys that its query sees")
