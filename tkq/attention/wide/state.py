"""What the roles of the kernel see: what came in, what is shared, and their registers."""
from dataclasses import dataclass
from typing import Any, Optional

import cutlass.cute as cute
from cutlass import Float32, Int32

import tkq.tile as tk
from tkq.attention.forward.state import Fields
from tkq.attention.wide.config import ROWS


@dataclass(frozen=True)
class Tiles:
    """The types of the shared tiles. q: of all columns; q_part: those of one K slot. p: the keys of one
    V slot."""

    q: tk.st
    q_part: tk.st
    k: tk.st
    v: tk.st
    p: tk.st

    @staticmethod
    def of(spec, config) -> "Tiles":
        dtype, d = tk.element_type(spec.dtype), spec.head_dim
        # Q in panels as wide as those of its parts: the same memory is one tile for TMA, and one for each K slot
        part = tk.st(ROWS, config.key_cols, dtype)
        return Tiles(tk.st(ROWS, d, dtype, part.swizzle), part, tk.st(config.kv, config.key_cols, dtype),
                     tk.st(config.value_keys, config.value_cols, dtype), tk.st(ROWS, config.value_keys, dtype))


@dataclass(frozen=True)
class Globals:
    q: tk.gl
    k: tk.gl
    v: tk.gl
    o: cute.Tensor  # (row, col, head[, batch])
    lse: Optional[cute.Tensor]  # (batch, head, row); varlen (head, row)
    sinks: Optional[cute.Tensor]  # (head,)
    tasks: Any  # Dense or Varlen
    schedule: tk.Schedule
    left: Optional[Int32]
    right: Optional[Int32]
    scale: Float32  # of the scores, times log2(e)
    cap: Optional[Float32]  # what Q @ K.T is multiplied by under the tanh


@dataclass(frozen=True)
class Shared:
    q: tk.SharedTile
    q_parts: tk.SharedTile  # the same memory
    p: tk.SharedTile  # a tile for each V slot's keys
    k: tk.SharedTile  # the ring
    v: tk.SharedTile  # the same ring
    factors: cute.Tensor  # (row, 2): what O is multiplied by before P V; what it is multiplied by in the end
    moved: cute.Tensor  # (warp of a warpgroup,): is the first one needed?
    task: cute.Tensor  # (field,)
    q_full: tk.Semaphore
    q_empty: tk.Semaphore
    k_pipe: tk.Pipe
    v_pipe: tk.Pipe  # the same semaphores, other bytes
    p_pipe: tk.Pipe
    end_pipe: tk.Pipe  # of the last factors
    next_task_slot: Optional[tuple]


@dataclass(frozen=True)
class ScoreState:
    """Registers of the score warpgroup: see ``tkq.attention.forward.softmax``."""

    s: tk.RegTile
    p: tk.RegTile
    max: tk.RowVec
    norm: tk.RowVec
    correct: tk.RowVec
    shift: tk.RowVec
    last_max: tk.RowVec
    last_norm: tk.RowVec
    moved: cute.Tensor
    task: Fields
    last: Fields
    ring: tk.Ring
    q: tk.Ring
    p_ring: tk.Ring
    end: tk.Ring
    wg: Int32


@dataclass(frozen=True)
class OutputState:
    """Registers of an output warpgroup. o: tiles of neighbouring columns."""

    o: tuple
    factor: tk.RowVec
    task: Fields
    ring: tk.Ring
    q: tk.Ring
    p_ring: tk.Ring
    end: tk.Ring
    part: Int32


def in_slots(ring: tk.SharedTile, type: tk.st) -> tk.SharedTile:
    """The same slots, for tiles of a type that may be smaller: what is left of a slot is not used."""
    one, slot = type.layout(1), ring.type.bytes * 8 // type.dtype.width
    (rows, cols, _), (row, col, _) = one.outer.shape, one.outer.stride
    layout = cute.make_layout((rows, cols, ring.stages), stride=(row, col, slot))
    return tk.SharedTile(cute.make_tensor(cute.recast_ptr(ring.staged.iterator, one.inner, dtype=type.dtype), layout),
                         type)
