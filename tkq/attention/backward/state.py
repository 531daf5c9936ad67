"""What the roles of the backward kernel see: what came in, what is shared, a task, and a warpgroup's registers."""
from dataclasses import dataclass
from typing import Any, NamedTuple, Optional

import cutlass.cute as cute
from cutlass import Float32, Int32

import tkq.tile as tk
from tkq.attention.backward.config import BackwardConfig
from tkq.attention.backward.math import Scores
from tkq.attention.backward.spec import BackwardSpec


class Scalars(NamedTuple):
    """What a call says besides tensors. An argument of the compiled function."""

    scale: Float32
    softcap: Float32
    left: Int32
    right: Int32
    num_sms: Int32  # of the device


class DqSerialOperands(NamedTuple):
    """dq: (B, Sq, H, D). counts: (4 x tile of all heads,) int32, zero in the beginning: of each warp's rows of a tile,
    how many blocks have a part in them. heads: K/V heads, in order, that are reduced serially; the others' accumulators
    are zeroed before, and their dQ is made by ``BackwardPostprocess``. tiles: likewise, of query heads. right: of the
    call."""

    dq: cute.Tensor
    counts: cute.Tensor
    heads: Int32
    tiles: Int32
    right: Int32


@dataclass(frozen=True)
class Tiles:
    """The tiles in shared memory. of_keys: tiles of K, of V and of dS that a block has."""

    q: tk.st
    kv: tk.st
    out: tk.st  # of dK and dV
    ds: tk.st
    of_keys: int
    stats_bytes: int

    @staticmethod
    def of(spec: BackwardSpec, config: BackwardConfig) -> "Tiles":
        dtype = tk.element_type(spec.dtype)
        return Tiles(tk.st(config.tile, spec.width, dtype), tk.st(64, spec.width, dtype),
                     tk.st(64, min(spec.width, 128), dtype), tk.st(64, config.tile, dtype), config.block // 64,
                     8 * config.tile)


@dataclass(frozen=True)
class Globals:
    q: tk.gl
    do: tk.gl
    k: tk.gl
    v: tk.gl
    dk: Any  # a tk.gl; where it is written from registers (row, col, head[, batch])
    dv: Any
    stats: cute.Tensor  # (tile of all heads, 2 x rows of a tile): -lse * log2(e), then dlse - rowsum(o * do)
    acc: Optional[cute.Tensor]  # (tile of all heads, floats): dQ in fp32, in the order of the accumulators
    helper_warps: Any  # HelperOperands, where there are helper warps
    dq_serial: Any  # DqSerialOperands, where dQ is reduced serially
    dkv_partials: Any  # where dK and dV are handed on, or None
    next: Optional[cute.Tensor]  # (.., ) int32: the number of the next task, where blocks take one after the other
    tasks: Int32  # how many there are
    layout: Any  # DenseBatch or VarlenBatch: where a task's rows are
    left: Int32
    right: Int32
    heads: Int32
    kv_heads: Int32  # with ``heads_per_task`` times ``splits_per_kv_head``, as if each part had K and V of its own
    heads_per_kv: Int32
    splits_per_kv_head: Optional[Int32]  # with ``heads_per_task``: parts of a K/V head's query heads
    tiles: Int32  # slots of a query head
    l2_section: Int32  # how many K/V heads are worked on together; varlen: bytes of a K/V head for each of its queries
    tail_heads: Int32  # see ``tile_of_task``
    scale: Float32
    scores: Scores
    descending: Optional[Int32] = None  # with an ordered dQ, see ``TileScheduler.descending``


@dataclass(frozen=True)
class Shared:
    k: tk.SharedTile  # 64 keys for each warpgroup
    v: tk.SharedTile
    q: tk.SharedTile  # rings of tiles that pass by
    do: tk.SharedTile
    ds: tk.SharedTile  # dS transposed: a stage is one tile of 64 keys from each warpgroup
    stats: cute.Tensor  # (2 x rows of a tile, stages of q)
    p: Optional[cute.Tensor]  # P on its way from one warpgroup to another
    dq: Optional[cute.Tensor]  # a part of dQ on its way out; with a serial reduction all parts, and on their way in
    dq_full: Optional[tk.Semaphore]  # of each warp's rows, on their way in
    task: Optional[cute.Tensor]  # (field of Task, 1), where it is found once
    tasks: Optional[tk.Mailbox]  # where the producer names one after the other: fields of Task
    kv_full: tk.Semaphore  # of K, of V
    kv_empty: tk.Semaphore  # likewise, where there is a next task
    q_pipe: tk.Pipe
    do_pipe: tk.Pipe
    ds_pipe: tk.Pipe
    p_pipe: tk.Pipe
    dq_pipe: Optional[tk.Pipe] = None  # of parts of dQ, where other warps send them


@dataclass(frozen=True)
class Task:
    sequence: Int32
    rows_q: Int32
    rows_k: Int32
    batch_q: Int32  # TMA's coordinate of the sequence in Q, dO and dQ
    batch_k: Int32  # in K, V, dK and dV
    first_tile: Int32  # of the sequence's and query head 0's, among those of all
    head: Int32  # K/V head
    block: Int32
    first: Int32  # see TileRange
    first_unmasked: Int32
    end_unmasked: Int32
    end: Int32


@dataclass(frozen=True)
class State:
    """Registers of a warpgroup that has keys."""

    s: tk.RegTile  # scores, transposed: 64 keys x the tile's queries; as are dp, p, ds
    dp: tk.RegTile
    p: tk.RegTile
    ds: tk.RegTile
    dk: tk.RegTile
    dv: tk.RegTile
    ring: tk.Ring  # of Q and dO
    ds_ring: tk.Ring
    ping_pong: tk.PingPong
    wg: Int32


@dataclass(frozen=True)
class DvState:
    """Registers of the warpgroup of a wide head that makes P and keeps dV."""

    s: tk.RegTile
    p: tk.RegTile
    slope: tk.RegTile
    dv: tuple  # of tiles, side by side
    ring: tk.Ring
    p_ring: tk.Ring


@dataclass(frozen=True)
class DkState:
    """Registers of the warpgroup of a wide head that makes dS and keeps dK."""

    dp: tk.RegTile
    slope: tk.RegTile
    ds: tk.RegTile
    dk: tuple  # of tiles, side by side
    ring: tk.Ring
    p_ring: tk.Ring
    ds_ring: tk.Ring
