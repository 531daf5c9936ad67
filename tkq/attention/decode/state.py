"""What the roles of the decode kernel see: what came in, what is shared, and a consumer's registers."""
from dataclasses import dataclass
from typing import Any, NamedTuple, Optional

import cutlass.cute as cute
from cutlass import Constexpr, Float32, Int32

import tkq.tile as tk


class Operands(NamedTuple):
    """Beside q (B, Sq, H, D). k, v: (pages, page, Hk, D or Dv), or (B, S, Hk, D or Dv) without a table (B, pages of a
    sequence). seqlens (B,). plan: see `words`. o (B, Sq, H, Dv), lse (B, H, Sq), sinks (H,).

    cu (B + 1,): of ragged queries, where each sequence's begin; q, o and lse are of one batch then.

    tree (B, Sq): of int64, which drafts each query sees: see `tree`.

    k_descale, v_descale: of float8, (Hk,), (B, Hk), or for each slot of a cache and head (pages, page,
    Hk).

    partial (slots, rows, Dv) and partial_lse (slots, rows): of tasks that several blocks share."""

    k: cute.Tensor
    v: cute.Tensor
    table: Optional[cute.Tensor]
    seqlens: cute.Tensor
    plan: cute.Tensor
    o: cute.Tensor
    lse: Optional[cute.Tensor]
    sinks: Optional[cute.Tensor]
    partial: cute.Tensor
    partial_lse: cute.Tensor
    k_descale: Optional[cute.Tensor]
    v_descale: Optional[cute.Tensor]
    cu: Optional[cute.Tensor]
    tree: Optional[cute.Tensor]


class Scalars(NamedTuple):
    """scale: of scores. softcap: 0 without. left, right: keys beside its own that a query sees, -1: all. split: blocks
    of a fixed split, or 0. parts: blocks of threads. batch, queries: of ragged queries, tiles that the plan lists, and
    the most of a tile."""

    scale: Float32
    softcap: Float32
    left: Int32
    right: Int32
    split: Int32
    parts: Int32
    batch: Int32
    queries: Int32


@dataclass(frozen=True)
class Globals:
    q: cute.Tensor
    k: cute.Tensor
    v: cute.Tensor
    table: Optional[cute.Tensor]
    seqlens: cute.Tensor
    plan: cute.Tensor
    o: cute.Tensor
    lse: Optional[cute.Tensor]
    sinks: Optional[cute.Tensor]
    partial: cute.Tensor
    partial_lse: cute.Tensor
    k_descale: Optional[cute.Tensor]
    v_descale: Optional[cute.Tensor]
    cu: Optional[cute.Tensor]
    tree: Optional[cute.Tensor]
    scale: Float32  # times log2(e); of a softcap, the cap's
    cap: Optional[Float32]
    left: Int32
    right: Int32
    split: Int32
    batch: Int32
    heads_kv: Int32
    group: Int32
    queries: Int32  # of each sequence; of ragged ones, of a tile
    tiles: Int32
    page_size: Int32
    capacity: Int32
    key_block: Constexpr[int]


@dataclass(frozen=True)
class Shared:
    q: Optional[tk.SharedTile]
    k: tk.SharedTile
    v: tk.SharedTile
    there: cute.Tensor  # (4, stages): one bit for each of a producer warp's rows
    bad: cute.Tensor  # (4, stages)
    ticket: cute.Tensor  # (1, 1)
    k_pipe: tk.Pipe
    v_pipe: tk.Pipe
    scales: Optional[cute.Tensor]  # (2 * keys + 4, stages) of K's rows, V's, each warp's largest of V


@dataclass(frozen=True)
class State:
    """A consumer's registers. first, end: of the keys that its two rows see, and
    between which all rows see all. fault: is the result NaN?

    Of float8 caches. q: where it is not in shared memory. scale: what a row's scores are multiplied by. of_v: (1,),
    what O is multiplied by. max: not the largest score, but what is taken from scores (`Scaling.base`).

    Of tree masks. tree (2,): of int64, those of its two rows. drafts (1,): the sequence's first draft."""

    s: tk.RegTile
    p: tk.RegTile
    o: tk.RegTile
    max: tk.RowVec
    norm: tk.RowVec
    correct: tk.RowVec
    shift: tk.RowVec
    first: Any
    end: Any
    fault: Any
    k: tk.Ring
    v: tk.Ring
    q: Optional[tk.RegTile] = None
    scale: Optional[tk.RowVec] = None
    of_v: Any = None
    tree: Any = None
    drafts: Any = None
