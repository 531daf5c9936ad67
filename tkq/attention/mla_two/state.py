"""What the roles of the MLA kernel see: what came in, what is shared, and the consumers' registers."""
from dataclasses import dataclass
from typing import Any, NamedTuple, Optional

import cutlass.cute as cute
from cutlass import Constexpr, Float32, Int32

import tkq.tile as tk

HALF, ROPE = 256, 64  # columns: of half of the values, and of the part of a key that is no value


class Operands(NamedTuple):
    """Beside q (B, Sq, H, 576). k: the cache, pages (N, page, 1, 576). table (B, pages of a sequence). seqlens (B,).
    plan: see `tkq.attention.decode.words`. o (B, Sq, H, 512), lse (B, H, Sq).

    partial (slots, rows, 512) and partial_lse (slots, rows): of tasks that several blocks share."""

    k: cute.Tensor
    table: cute.Tensor
    seqlens: cute.Tensor
    plan: cute.Tensor
    o: cute.Tensor
    lse: Optional[cute.Tensor]
    partial: cute.Tensor
    partial_lse: cute.Tensor


class Scalars(NamedTuple):
    """scale: of scores. right: keys behind its own that a query sees, -1: all. split: blocks of a fixed split, or 0.
    parts: of the plan. together: blocks of threads that have a part each."""

    scale: Float32
    right: Int32
    split: Int32
    parts: Int32
    together: Int32


@dataclass(frozen=True)
class Globals:
    q: cute.Tensor
    k: cute.Tensor
    table: cute.Tensor
    seqlens: cute.Tensor
    plan: cute.Tensor
    o: cute.Tensor
    lse: Optional[cute.Tensor]
    partial: cute.Tensor
    partial_lse: cute.Tensor
    scale: Float32  # times log2(e)
    left: Int32
    right: Int32
    split: Int32
    batch: Int32
    heads_kv: Int32
    group: Int32
    queries: Int32
    tiles: Int32
    together: Int32
    page_size: Int32
    capacity: Int32
    key_block: Constexpr[int]


@dataclass(frozen=True)
class Tiles:
    """A tile of rows in three: columns 0 to 255, 256 to 511 and 512 to 575."""

    left: tk.SharedTile
    right: tk.SharedTile
    rope: tk.SharedTile


@dataclass(frozen=True)
class Shared:
    q: Tiles
    k: Tiles  # rope: P as well, once the scores of its block are there
    there: cute.Tensor  # (4, stages): one bit for each of a producer warp's rows
    bad: cute.Tensor  # (4, stages)
    correct: cute.Tensor  # (64, stages): factors of O's rows, for the other warpgroup
    inverse: cute.Tensor  # (64, 1): of a segment
    left_pipe: tk.Pipe
    right_pipe: tk.Pipe  # of the rope part, too
    p_full: tk.Semaphore
    s_full: tk.Semaphore  # the scores of a block are there


@dataclass(frozen=True)
class Scores:
    """Registers of the warpgroup that has the scores: see `decode.state.State`."""

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
    left: tk.Ring
    done: tk.Ring  # of the left half: what is still to be released
    right: tk.Ring


@dataclass(frozen=True)
class Values:
    """Registers of the other warpgroup."""

    o: tk.RegTile
    correct: tk.RowVec
    right: tk.Ring
    ahead: tk.Ring  # the block behind
