"""What the roles of the attention kernel see: what came in, what is shared, and a consumer's registers."""
from dataclasses import dataclass
from typing import Optional

import cutlass.cute as cute
from cutlass import Float32, Int32

import tkq.tile as tk

BATCH, HEAD, TILE, BLOCKS, MASKED = range(5)  # what the producer tells of a task
FIELDS = 5


@dataclass(frozen=True)
class Globals:
    q: tk.gl
    k: tk.gl
    v: tk.gl
    o: tk.gl
    lse: Optional[cute.Tensor]  # (batch, head, row)
    schedule: tk.Schedule
    rows_q: Int32
    rows_k: Int32
    heads: Int32
    heads_per_kv: Int32
    tiles: Int32  # tasks of a head
    all_heads: Int32  # of all batch elements
    section: Int32  # how many heads are worked on together
    scale: Float32  # softmax scale * log2(e)


@dataclass(frozen=True)
class Shared:
    q: tk.SharedTile  # a ring of q_stages, one tile for each consumer
    o: tk.SharedTile  # one for each consumer, or a panel of one
    k: tk.SharedTile
    v: tk.SharedTile
    task: cute.Tensor  # (field, as q): comes and goes with the tile of q
    q_full: tk.Semaphore
    q_empty: tk.Semaphore
    k_pipe: tk.Pipe
    v_pipe: tk.Pipe


@dataclass(frozen=True)
class State:
    """A consumer's registers."""

    att: tk.RegTile
    att_mma: tk.RegTile
    o: tk.RegTile
    max: tk.RowVec
    norm: tk.RowVec
    correct: tk.RowVec
    max_scaled: tk.RowVec
    last_max: tk.RowVec  # of the task that is being finished
    last_norm: tk.RowVec
    task: cute.Tensor
    last: cute.Tensor
    k: tk.Ring
    v: tk.Ring
    q: tk.Ring
    turns: tk.Turns
    wg: Int32
