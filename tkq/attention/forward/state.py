"""What the roles of the attention kernel see: what came in, what is shared, and a consumer's registers."""
from dataclasses import dataclass
from typing import Any, Optional

import cutlass.cute as cute
from cutlass import Constexpr, Float32, Int32

import tkq.tile as tk
from tkq.attention.common.mask import Extent
from tkq.attention.forward.spec import AttentionSpec


@dataclass(frozen=True)
class Tiles:
    """The types of the shared tiles."""

    q: tk.st
    k: tk.st
    v: tk.st
    o: tk.st  # a panel, where O is cut

    @staticmethod
    def of(spec: AttentionSpec, config) -> "Tiles":
        dtype, d, dv = tk.element_type(spec.dtype), spec.head_dim, spec.head_dim_v
        return Tiles(tk.st(64, d, dtype), tk.st(config.kv, d, dtype), tk.st(config.kv, dv, dtype),
                     tk.st(64, dv // config.o_store_steps, dtype))


def field_names(spec: AttentionSpec) -> tuple:
    """The fields of a task that the producer passes to the consumers. batch, head, tile: where its rows of Q and O are
    (varlen: batch is where the sequence ends). blocks, n_masked_right, first, n_masked_left: its ``KeyBlockRange``.
    rows_q, rows_k: the sequence's lengths."""
    return ("batch", "head", "tile", "blocks", "n_masked_right", *["first", "n_masked_left"] * spec.left,
            *["rows_q", "rows_k"] * spec.varlen)


@dataclass(frozen=True)
class Fields:
    """A task in a consumer's registers, ``t["head"]`` and so on."""

    values: cute.Tensor
    names: Constexpr[tuple]

    @staticmethod
    def new(names):
        return Fields(cute.make_rmem_tensor((len(names),), Int32), names)

    def __getitem__(self, name):
        return self.values[self.names.index(name)]


@dataclass(frozen=True)
class Globals:
    q: tk.gl
    k: tk.gl
    v: tk.gl
    o: Any  # a tk.gl; with o_from_registers (row, col, head[, batch])
    lse: Optional[cute.Tensor]  # (batch, head, row); varlen (head, row)
    sinks: Optional[cute.Tensor]  # (head,)
    tasks: Any  # Dense or Varlen
    schedule: tk.Schedule
    left: Optional[Int32]
    right: Optional[Int32]
    scale: Float32  # of the scores, times log2(e)
    cap: Optional[Float32]  # what Q @ K.T is multiplied by under the tanh


def extent(spec, config, g: Globals, rows_q, rows_k) -> Extent:
    """What ranges and masks of a sequence depend on."""
    return Extent(rows_q, rows_k, config.tile_rows // spec.pack, config.kv, g.left, 0 if spec.causal else g.right)


def clipped(spec, x: tk.gl, batch, rows):
    """(x as a task sees it, what comes before the other coordinates of a tile); varlen: the ``rows`` rows that end at
    ``batch``, and behind them nothing."""
    return x.part(rows) if spec.varlen else x, (batch,)


def unclipped(spec, x: tk.gl, batch, rows):
    """The same, but behind its own rows a task sees those of the next sequence."""
    return (x.rows_from(batch - rows), ()) if spec.varlen else (x, (batch,))


@dataclass(frozen=True)
class Shared:
    q: tk.SharedTile  # a ring of q_stages, one tile for each consumer
    o: tk.SharedTile  # one for each consumer, or a panel of one; or q's (o_from_registers: not used)
    k: tk.SharedTile
    v: tk.SharedTile
    task: cute.Tensor  # (field, as q): comes and goes with the tile of q
    q_full: tk.Semaphore
    q_empty: tk.Semaphore
    k_pipe: tk.Pipe
    v_pipe: tk.Pipe
    # of dynamic pairs of blocks: (the next task's number, semaphores: it is there, it was read)
    next_task_slot: Optional[tuple]


@dataclass(frozen=True)
class State:
    """A consumer's registers."""

    s: tk.RegTile
    p: tk.RegTile
    o: tk.RegTile
    max: tk.RowVec
    norm: tk.RowVec
    correct: tk.RowVec
    shift: tk.RowVec
    last_max: tk.RowVec  # of the task that is being finished
    last_norm: tk.RowVec
    task: Fields
    last: Fields
    k: tk.Ring
    v: tk.Ring
    q: tk.Ring
    ping_pong: tk.PingPong
    stagger: tk.PingPong
    wg: Int32
    blocks: Any = None  # what another softmax than the forward's knows of blocks of keys
