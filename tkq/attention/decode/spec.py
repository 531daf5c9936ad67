"""What decoding was asked for: the compile keys."""
from __future__ import annotations

from dataclasses import dataclass

HALF = "bf16", "fp16"
WIDE = "bf16", "fp16", "fp32"
SCALES = "head", "sequence", "token"
HEAD_DIMS = 64, 96, 128, 192, 256


@dataclass(frozen=True)
class DecodeSpec:
    """dtype: of q and o, and of the caches where cache is None. head_dim: of q and k; head_dim_v: of v and o. paged:
    keys and values lie in pages that a table names; else each sequence has its own rows. edges: queries of a
    tile see different keys, or not all of them: several causal queries, or a window. softcap: of scores. sinks: their
    dtype, None without. lse: is it written? fixed_splits: see `tkq.plan_decode`, batch_invariant. cache: "e4m3", or
    None. scales: of an e4m3 cache, by "head", by "sequence" and head, or by "token" and head; None: none.
    ragged: sequences have different numbers of queries, all in one dimension. few: up to 8 packed queries, of a float8
    cache. tree: of the last keys, the drafts, each query sees those that its mask names. in_parts: what several blocks
    share stays in parts, which `MergeState` adds up: their lse is inf."""

    dtype: str
    head_dim: int
    head_dim_v: int
    paged: bool = True
    edges: bool = False
    softcap: bool = False
    sinks: str | None = None
    lse: bool = False
    fixed_splits: bool = False
    cache: str | None = None
    scales: str | None = None
    ragged: bool = False
    few: bool = False
    tree: bool = False
    in_parts: bool = False

    def __post_init__(self):
        for name, got, allowed in (("dtype", self.dtype, HALF), ("head_dim", self.head_dim, HEAD_DIMS),
                                   ("head_dim_v", self.head_dim_v, HEAD_DIMS), ("sinks", self.sinks, (None, *WIDE)),
                                   ("cache", self.cache, (None, "e4m3")),
                                   ("scales", self.scales, (None, *SCALES) if self.cache else (None,))):
            if got not in allowed:
                raise NotImplementedError(f"DecodeSpec: {name} is {got!r}, allowed are "
                                          f"{', '.join(map(str, allowed))}")
        if self.in_parts and (self.sinks is not None or self.ragged or self.few or not self.lse):
            raise NotImplementedError("DecodeSpec: in_parts is of one sequence with its lse, without sinks, not few")

    @property
    def inner(self) -> str:
        """Of the tiles that are multiplied: e4m3 becomes fp16, which has all its numbers."""
        return "fp16" if self.cache else self.dtype


@dataclass(frozen=True)
class AppendSpec:
    """dtype: of k, v and q, and of the caches where cache is None. slots, positions: their dtypes. table: dtype of cos
    and sin, None without a rotation. interleaved: pairs are neighbouring columns; else column i and i + half. queries:
    are q rotated, too? cache: "e4m3", or None. scales: of an e4m3 cache, given for each "head", or found for each
    "token" and head."""

    dtype: str
    slots: str = "int64"
    table: str | None = None
    interleaved: bool = False
    positions: str | None = None
    queries: bool = False
    cache: str | None = None
    scales: str | None = None

    def __post_init__(self):
        index = "int32", "int64"
        for name, got, allowed in (("dtype", self.dtype, WIDE), ("slots", self.slots, index),
                                   ("table", self.table, (None, *WIDE)),
                                   ("positions", self.positions, index if self.table else (None,)),
                                   ("queries", self.queries, (False, True) if self.table else (False,)),
                                   ("cache", self.cache, (None, "e4m3")),
                                   ("scales", self.scales, (None, "head", "token") if self.cache else (None,))):
            if got not in allowed:
                raise ValueError(f"AppendSpec: {name} is {got!r}, allowed are {', '.join(map(str, allowed))}")


@dataclass(frozen=True)
class MergeSpec:
    """dtype: of the outputs; the log-sum-exps are fp32. parts: may the first result lie in parts?"""

    dtype: str
    parts: bool = False

    def __post_init__(self):
        if self.dtype not in WIDE:
            raise ValueError(f"MergeSpec: dtype is {self.dtype!r}, allowed are {', '.join(WIDE)}")
