"""What the roles of a pass see."""
from dataclasses import dataclass
from typing import Any, Optional

import cutlass.cute as cute
from cutlass import Constexpr, Float32, Int32

import tkq.tile as tk
from tkq.attention.forward.state import Fields
from tkq.attention.wide.config import ROWS

# A task's rows; its steps, ``blocks`` in all: ``per_head`` blocks of columns from ``first`` on, of one head of columns
# after the other
FIELDS = ("batch", "head", "tile", "blocks", "first", "per_head")


def fields_of(spec) -> tuple:
    """Of varlen also the sequence's lengths, of rows (rows_q) and of columns (rows_k), and where its columns end."""
    return (*FIELDS, *["rows_q", "rows_k", "batch_k"] * spec.varlen)


@dataclass(frozen=True)
class PassTiles:
    """rows: of all columns; part: those of one slot. column: a slot of S or dP. values: one of the gradient. x: P or
    dS, the columns of one values slot."""

    rows: tk.st
    part: tk.st
    column: tk.st
    values: tk.st
    x: tk.st

    @staticmethod
    def of(spec, config) -> "PassTiles":
        dtype, d = tk.element_type(spec.dtype), spec.width
        part = tk.st(ROWS, config.key_cols, dtype)
        return PassTiles(tk.st(ROWS, d, dtype, part.swizzle), part, tk.st(config.kv, config.key_cols, dtype),
                         tk.st(config.value_keys, config.value_cols, dtype), tk.st(ROWS, config.value_keys, dtype))


@dataclass(frozen=True)
class PassGlobals:
    """dq: rows are queries, and (Q, dO) stay while K, V and again K pass by. dk: keys, (K, V), Q, dO and Q. dv: keys,
    (K,), Q and dO."""

    stay: tuple
    columns: tuple
    values: tk.gl
    o: cute.Tensor  # (row, col, head[, batch]): the gradient
    stats: cute.Tensor  # (2, batch, head, query), of varlen with a batch of 1
    tasks: Any  # Dense or Varlen, of rows
    schedule: tk.Schedule
    heads: Int32  # query heads of a K/V head
    left: Optional[Int32]
    right: Optional[Int32]
    scale: Float32  # of the scores, times log2(e); with a softcap, of their tanh
    cap: Optional[Float32]  # what S is multiplied by under the tanh
    factor: Float32  # of the gradient


@dataclass(frozen=True)
class PassShared:
    """As ``tkq.attention.wide.state.Shared``."""

    stay: tuple
    parts: tuple  # the same memory, in parts
    p: tk.SharedTile
    k: tk.SharedTile  # the columns
    v: tk.SharedTile
    factors: cute.Tensor
    moved: cute.Tensor
    task: cute.Tensor
    q_full: tk.Semaphore
    q_empty: tk.Semaphore
    k_pipe: tk.Pipe
    v_pipe: tk.Pipe
    p_pipe: tk.Pipe
    end_pipe: tk.Pipe
    next_task_slot: Optional[tuple]


@dataclass(frozen=True)
class PassState:
    """Registers of the score warpgroup. lse, delta: of rows or of columns."""

    s: tk.RegTile
    dp: Optional[tk.RegTile]
    x: tk.RegTile
    lse: Any
    delta: Any
    task: Fields
    ring: tk.Ring
    q: tk.Ring
    p_ring: tk.Ring
    end: tk.Ring
    by_rows: Constexpr[bool]
