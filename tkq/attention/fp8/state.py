"""What the roles of the kernel see: what came in, and a consumer's registers."""
from dataclasses import dataclass
from typing import Any, ClassVar, Optional

import cutlass.cute as cute
from cutlass import Float32, Int32

import tkq.tile as tk
from tkq.attention.forward.state import Fields
from tkq.attention.forward.state import field_names as forward_field_names


def field_names(spec) -> tuple:
    """As of ``tkq.attention.forward``. sequence: of packed ones, whose descales a task has."""
    return (*forward_field_names(spec), *["sequence"] * bool(spec.varlen and spec.descales))


@dataclass(frozen=True)
class Tiles:
    """The types of the shared tiles. v: transposed, a row for each column of V."""

    q: tk.st
    k: tk.st
    v: tk.st

    @staticmethod
    def of(spec, config) -> "Tiles":
        dtype, d = tk.element_type(spec.dtype), spec.head_dim
        return Tiles(tk.st(64, d, dtype), tk.st(config.kv, d, dtype), tk.st(d, config.kv, dtype))


@dataclass(frozen=True)
class Globals:
    q: tk.gl
    k: tk.gl
    v: tk.gl  # transposed, keys in the order of P
    o: cute.Tensor  # (row, col, head[, batch])
    lse: Optional[cute.Tensor]  # (batch, head, row); varlen (head, row)
    q_descale: Optional[cute.Tensor]  # (batch, K/V head), as the next two
    k_descale: Optional[cute.Tensor]
    v_descale: Optional[cute.Tensor]
    tasks: Any  # Dense or Varlen
    schedule: tk.Schedule
    left: Optional[Int32]
    right: Optional[Int32]
    scale: Float32  # of the scores, times log2(e)


@dataclass(frozen=True)
class Shared:
    """As of ``tkq.attention.forward``."""

    q: tk.SharedTile
    k: tk.SharedTile
    v: tk.SharedTile
    ones: Optional[tk.SharedTile]  # as many as a tile has keys, times ``ONES``; with row_sum="mma"
    task: cute.Tensor
    q_full: tk.Semaphore
    q_empty: tk.Semaphore
    k_pipe: tk.Pipe
    v_pipe: tk.Pipe
    next_task_slot: ClassVar[None] = None


@dataclass(frozen=True)
class State:
    """A consumer's registers: see ``tkq.attention.forward.softmax`` for those of the softmax."""

    s: tk.RegTile
    p: tk.RegTile
    sums: Optional[tk.RegTile]  # of P's columns, with row_sum="mma"
    o: tuple  # tiles of neighbouring columns
    product: Optional[tk.RegTile]  # P V of one block, and of one tile of o; fast: None
    max: tk.RowVec
    norm: tk.RowVec
    correct: tk.RowVec
    shift: tk.RowVec
    last_max: tk.RowVec
    last_norm: tk.RowVec
    factors: cute.Tensor  # (2,): of the scores, of o
    task: Fields
    k: tk.Ring
    v: tk.Ring
    q: tk.Ring
    ping_pong: tk.PingPong
    wg: Int32
