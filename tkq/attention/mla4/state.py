"""What the roles of the MLA kernel see: what came in, what is shared, and the consumers' registers."""
from dataclasses import dataclass
from typing import Any, NamedTuple

import cutlass.cute as cute
from cutlass import Constexpr, Float32, Int32

import tkq.tile as tk
from tkq.attention.mla.state import Globals, Operands, Scalars  # noqa

HALF, ROPE = 256, 64  # columns: of half of the values, and of the part of a key that is no value



class Segment(NamedTuple):
    """Blocks first .. end of keys of a task, as the producer announces them; first is -1 behind the last one. slot: of
    a part's result. The other fields: see `tkq.attention.decode.walk.Segment`."""

    first: Int32
    end: Int32
    batch: Int32
    tile: Int32
    length: Int32
    inside: Int32
    splits: Int32
    slot: Int32
    head: Int32 = 0

    @classmethod
    def read(cls, smem, ring):
        return cls(*(smem.segments[i, ring.stage] for i in range(8)), Int32(0))


@dataclass(frozen=True)
class Shared:
    q: tk.SharedTile  # columns 384 to 511 of Q, as the end of a tile of 256
    q_rope: tk.SharedTile
    left: tk.SharedTile
    right: tk.SharedTile
    rope: tk.SharedTile
    p: tk.SharedTile
    there: cute.Tensor  # (4, stages): one bit for each of a producer warp's rows
    bad: cute.Tensor  # (4, stages)
    faults: cute.Tensor  # (4, 4)
    correct: cute.Tensor  # (64, 2): factors of O's rows
    inverse: cute.Tensor  # (64, 1): of a segment
    segments: cute.Tensor  # (8, 4)
    left_pipe: tk.Pipe
    right_pipe: tk.Pipe
    rope_pipe: tk.Pipe
    p_pipe: tk.Pipe
    segment_pipe: tk.Pipe
    s_full: tk.Semaphore


@dataclass(frozen=True)
class Scores:
    """deep, pair: places in the ring of left halves, and in all others."""

    q_left: tk.RegTile
    q_right: tk.RegTile  # two panels of four
    s: tk.RegTile
    max: tk.RowVec
    norm: tk.RowVec
    correct: tk.RowVec
    shift: tk.RowVec
    first: Any
    end: Any
    deep: tk.Ring
    pair: tk.Ring
    segment: tk.Ring


@dataclass(frozen=True)
class Values:
    o: tk.RegTile
    o2: tk.RegTile
    correct: tk.RowVec
    deep: tk.Ring
    pair: tk.Ring
    ahead: tk.Ring
    segment: tk.Ring
