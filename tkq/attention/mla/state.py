"""What the roles of the MLA kernel see: what came in, what is shared, and the consumers' registers."""
from dataclasses import dataclass
from typing import Any, NamedTuple, Optional

import cutlass.cute as cute
from cutlass import Constexpr, Float32, Int32

import tkq.tile as tk

HALF = 256  # columns of half of the values
FIELDS, AHEAD = 8, 4  # of a segment that is announced; segments that are announced at a time, at most


class Operands(NamedTuple):
    """Beside q (B, Sq, H, 576). k: the cache, pages (N, page, 1, 576). table (B, pages of a sequence), or (B, Sq, keys)
    lists of rows of the cache. seqlens (B,), of lists also (B, Sq) or None: all of them. plan: see
    `tkq.attention.decode.words`. o (B, Sq, H, 512), lse (B, H, Sq).

    partial (slots, rows, 512) and partial_lse (slots, rows): of tasks that several parts share, rows of all tiles that
    go together."""

    k: cute.Tensor
    table: cute.Tensor
    seqlens: Optional[cute.Tensor]
    plan: cute.Tensor
    o: cute.Tensor
    lse: Optional[cute.Tensor]
    partial: cute.Tensor
    partial_lse: cute.Tensor


class Scalars(NamedTuple):
    """scale: of scores. right: keys behind its own that a query sees, -1: all. split: blocks of a fixed split, or 0.
    parts: of the plan. together: blocks of threads that have a part, each for another tile."""

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
    seqlens: Optional[cute.Tensor]
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
    tiles: Int32  # of a sequence's rows, that a block of threads has one after the other
    together: Int32
    page_size: Int32
    capacity: Int32
    latent: Any
    key_block: Constexpr[int]
    rows_per_page: Any  # page_size, as a divisor; of float8 rows


class Segment(NamedTuple):
    """Blocks first .. end of keys of a task, as the producer announces them; first is -1 behind the last one.

    tile: this block's own. slot: of a part's result. Otherwise as `decode.walk.Segment`."""

    first: Int32
    end: Int32
    batch: Int32
    tile: Int32
    length: Int32
    inside: Int32
    splits: Int32
    slot: Int32
    head: Int32

    @classmethod
    def read(cls, smem, ring):
        """Where it is used: no register holds it in between."""
        return cls(*(smem.segments[i, ring.stage] for i in range(FIELDS)), Int32(0))


@dataclass(frozen=True)
class Shared:
    q: tk.SharedTile  # columns 384 to 511 of Q, as the end of a tile of columns 256 to 511
    q_rope: tk.SharedTile  # columns 512 to 575
    left: tk.SharedTile  # columns 0 to 255 of keys
    right: tk.SharedTile
    rope: tk.SharedTile
    p: tk.SharedTile
    there: cute.Tensor  # (4, stages of left): one bit for each of a producer warp's rows
    bad: cute.Tensor  # (4, stages of left)
    faults: cute.Tensor  # (4, AHEAD): of a segment, by producer warps
    correct: cute.Tensor  # (64, 2): factors of O's rows
    inverse: cute.Tensor  # (64, 1): of a segment
    segments: cute.Tensor  # (FIELDS, AHEAD)
    left_pipe: tk.Pipe
    right_pipe: tk.Pipe
    rope_pipe: Optional[tk.Pipe]  # of float8 rows, the right half's
    p_pipe: tk.Pipe
    segment_pipe: tk.Pipe
    scored: tk.Semaphore  # a block's scores are there
    scales: Optional[cute.Tensor]  # of float8 rows, all with each half
    addresses: Optional[cute.Tensor]  # of float8 rows: of the block that is copied next


@dataclass(frozen=True)
class Scores:
    """Registers of the warpgroup that has the scores: see `decode.state.State`. deep: the place in the ring of left
    halves; pair: in all others."""

    q_left: tk.RegTile
    q_right: tk.RegTile  # its first 128 columns
    s: tk.RegTile
    max: tk.RowVec
    norm: tk.RowVec
    correct: tk.RowVec
    shift: tk.RowVec
    total: tk.RowVec
    first: Any
    end: Any
    deep: tk.Ring
    pair: tk.Ring
    segment: tk.Ring


@dataclass(frozen=True)
class Values:
    """Registers of a warpgroup that sums up half of the values' columns. ahead: the block behind."""

    o: tuple  # of two tiles of 128 columns: the assembler has no wider ones with 512 threads
    correct: tk.RowVec
    deep: tk.Ring
    pair: tk.Ring
    ahead: tk.Ring
    segment: tk.Ring
