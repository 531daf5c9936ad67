"""What the roles of chunked prefill see beside what the forward's do."""
from dataclasses import dataclass
from typing import NamedTuple, Optional

import cutlass.cute as cute
from cutlass import Constexpr, Float32, Int32

import tkq.tile as tk


class Operands(NamedTuple):
    """Beside q (B, Sq, H, D), of ragged queries (1, T, H, D). k, v: pages (N, page, Hk, D or Dv), without a table (B,
    S, Hk, D or Dv). table (B, pages of a sequence). seqlens (B,). plan: see `words`. o as q, lse (B, H, Sq), sinks
    (H,). cu (B + 1,): of ragged queries."""

    k: cute.Tensor
    v: cute.Tensor
    table: Optional[cute.Tensor]
    seqlens: cute.Tensor
    plan: cute.Tensor
    o: cute.Tensor
    lse: Optional[cute.Tensor]
    sinks: Optional[cute.Tensor]
    cu: Optional[cute.Tensor]


class Scalars(NamedTuple):
    """scale: of scores. softcap: 1 without. left, right: keys beside its own that a query sees, -1: all. parts: that
    the plan divides the work into. batch: of ragged queries, tiles that the plan lists. num_sms: of the device."""

    scale: Float32
    softcap: Float32
    left: Int32
    right: Int32
    parts: Int32
    batch: Int32
    num_sms: Int32


@dataclass(frozen=True)
class Shared:
    """The forward's. words (1, stages + 2): of each block of keys, see `softmax.Blocks`. numbers (1, 2): of tasks, from
    the first producer warp to the others."""

    q: tk.SharedTile
    o: tk.SharedTile
    k: tk.SharedTile
    v: tk.SharedTile
    task: cute.Tensor
    q_full: tk.Semaphore
    q_empty: tk.Semaphore
    k_pipe: tk.Pipe
    v_pipe: tk.Pipe
    next_task_slot: Optional[tuple]
    words: cute.Tensor
    numbers: cute.Tensor


@dataclass(frozen=True)
class Results:
    """As they came in."""

    o: cute.Tensor
    lse: Optional[cute.Tensor]
    plan: cute.Tensor


@dataclass(frozen=True)
class Sizes:
    """batch: sequences of the plan, of ragged queries tiles. rows: queries of a sequence, of ragged queries of all.
    tiles: of a sequence. heads: of tiles, ``heads_per_kv`` of each K/V head. group: query heads of one. planned:
    queries of a sequence of the plan, of ``planned_tiles`` tiles there. capacity: keys that a sequence may have. left:
    see `Scalars`. groups: of 8 rows from a page to the next, with ``row_groups``."""

    batch: Int32
    rows: Int32
    tiles: Int32
    heads: Int32
    heads_per_kv: Int32
    heads_kv: Int32
    group: Int32
    planned: Int32
    planned_tiles: Int32
    parts: Int32
    page: Int32
    pages: Int32
    capacity: Int32
    left: Int32
    key_block: Constexpr[int]  # that plans count
    groups: Optional[Int32] = None
