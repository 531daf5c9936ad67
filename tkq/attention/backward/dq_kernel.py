"""dQ by itself, without additions in memory: for gradients that are the same in each run."""
from dataclasses import dataclass
from typing import Any

import cuda.bindings.driver as cuda
import cutlass
import cutlass.cute as cute
from cutlass import Constexpr, Float32, Int32, Int64, const_expr

import tkq.tile as tk
from tkq.attention.backward.config import ROWS, BackwardConfig
from tkq.attention.backward.math import Scores, gradients, limits, probabilities, probabilities_fp32
from tkq.attention.backward.spec import BackwardSpec
from tkq.attention.backward.state import Scalars
from tkq.attention.common.query_mask import QueryExtent, key_blocks_of, mask_limits
from tkq.attention.common.sequences import loads, piece, stores
from tkq.attention.common.tile_order import tile_of_task


@dataclass(frozen=True)
class Globals:
    q: tk.gl
    do: tk.gl
    k: tk.gl
    v: tk.gl
    dq: tk.gl
    stats: cute.Tensor  # as for the main kernel
    layout: Any  # DenseBatch or VarlenBatch
    left: Int32
    right: Int32
    heads: Int32
    heads_per_kv: Int32
    stats_tiles: Int32  # of a head, in stats
    scale: Float32
    scores: Scores


@dataclass(frozen=True)
class Shared:
    q: tk.SharedTile  # 64 rows for each warpgroup
    do: tk.SharedTile
    k: tk.SharedTile  # rings
    v: tk.SharedTile
    q_full: tk.Semaphore
    k_pipe: tk.Pipe
    v_pipe: tk.Pipe


@dataclass(frozen=True)
class State:
    """A warpgroup's registers."""

    s: tk.RegTile  # 64 queries x the block's keys; as are dp, p, ds
    dp: tk.RegTile
    p: tk.RegTile
    ds: tk.RegTile
    dq: tk.RegTile
    lse: tk.RowVec
    delta: tk.RowVec
    k: tk.Ring
    v: tk.Ring
    wg: Int32


class DqKernel:
    """dQ = scale * dS K, with dS = P * (dO V' - rowsum(o * do) + dlse).

    A block has 128 queries of one head, 64 for each of two consumer warpgroups; their keys pass by.

      producer (warp 0)       Q dO, then K V of one block after the other
      consumer warpgroups     S = Q K', dP = dO V' | P under dP | dS | dQ += dS K, next S .. | write dQ

      pipe    stages            full (arrivals)        empty (arrivals)
      Q, dO   1                 producer's bytes (1)   none: a block has one task
      K, V    dq_kernel_stages  producer's bytes (1)   every consumer warp (8)
    """

    def __init__(self, spec: BackwardSpec, config: BackwardConfig):
        self.spec, self.config = spec, config
        dtype = tk.element_type(spec.dtype)
        self.q_tile, self.kv_tile = tk.st(64, spec.width, dtype), tk.st(config.dq_kernel_kv, spec.width, dtype)

    @cute.jit
    def __call__(self, operands, stats: cute.Tensor, layout: Any, scalars: Scalars, stream: cuda.CUstream):
        """operands: do, q, k, v, dq, as the main kernel's, like all else."""
        do, q, k, v, dq = operands
        ragged, heads = layout.ragged, q.shape[-2]
        batches = 1 if const_expr(ragged) else q.shape[0]
        tiles = layout.slots(False, ROWS)
        g = Globals(
            q=loads(q, self.q_tile, ragged), do=loads(do, self.q_tile, ragged), k=loads(k, self.kv_tile, ragged),
            v=loads(v, self.kv_tile, ragged), dq=stores(dq, self.q_tile, ragged), stats=stats, layout=layout,
            left=scalars.left, right=scalars.right, heads=heads, heads_per_kv=heads // k.shape[-2],
            stats_tiles=layout.slots(False, self.config.tile), scale=scalars.scale,
            scores=Scores.of(scalars.scale, scalars.softcap, self.spec.softcap))
        self.kernel(g).launch(grid=[tiles * heads * batches, 1, 1], block=[3 * tk.WARPGROUP, 1, 1], stream=stream,
                              min_blocks_per_mp=1)

    @cute.kernel
    def kernel(self, g: Globals):
        al, stages = tk.SharedAllocator(), self.config.dq_kernel_stages
        s = Shared(
            q=al.tile(self.q_tile, 2), do=al.tile(self.q_tile, 2), k=al.tile(self.kv_tile, stages),
            v=al.tile(self.kv_tile, stages), q_full=al.semaphores(),
            k_pipe=al.pipe(stages, self.kv_tile.bytes, 8), v_pipe=al.pipe(stages, self.kv_tile.bytes, 8))

        def initialise():
            s.k_pipe.init()
            s.v_pipe.init()
            tk.init(s.q_full, 1)

        tk.init_block(initialise)
        at = self.task(g)
        if const_expr(self.spec.varlen):
            if at.number * ROWS < at.rows_q:  # else the slot has no row
                self.specialise(g, s, at)
        else:
            self.specialise(g, s, at)

    @cute.jit
    def specialise(self, g, s, at):
        tk.specialise(lambda: self.producer(g, s, at), lambda wg: self.consumer(g, s, at, wg), 2,
                      self.config.dq_kernel_registers)

    def extent(self, g, at):
        left, right = (g.left if self.spec.left else None), (g.right if self.spec.right else None)
        return QueryExtent(at.rows_q, at.rows_k, ROWS, self.config.dq_kernel_kv, left, right)

    def task(self, g):
        """The last tiles of a head, which may see the most keys, come first."""
        return g.layout.at(False, ROWS, Int32(cute.arch.block_idx()[0]), g.heads,
                           lambda i, tiles, heads, _: tile_of_task(i, tiles, heads, Int32(1), True))

    def seen(self, g, at):
        return key_blocks_of(self.extent(g, at), at.number * ROWS)

    @cute.jit
    def producer(self, g, s, at):
        tk.prefetch(g.q, g.do, g.k, g.v, g.dq)
        seen, kv_head = self.seen(g, at), at.head // g.heads_per_kv
        q, do = (piece(g.layout, x, at.rows_q) for x in (g.q, g.do))
        k, v = (piece(g.layout, x, at.rows_k) for x in (g.k, g.v))
        tk.expect_bytes(s.q_full, 4 * self.q_tile.bytes)
        for wg in cutlass.range_constexpr(2):
            tk.load_async(s.q[wg], q, (at.batch_q, at.head, 2 * at.number + wg, 0), s.q_full)
            tk.load_async(s.do[wg], do, (at.batch_q, at.head, 2 * at.number + wg, 0), s.q_full)
        k_ring, v_ring = s.k_pipe.ring(), s.v_pipe.ring()
        for n in cutlass.range(seen.first, seen.end, unroll=1):
            tk.load_async(s.k[k_ring.stage], k, (at.batch_k, kv_head, n, 0), s.k_pipe.acquire(k_ring))
            k_ring.advance()
            tk.load_async(s.v[v_ring.stage], v, (at.batch_k, kv_head, n, 0), s.v_pipe.acquire(v_ring))
            v_ring.advance()

    @cute.jit
    def consumer(self, g, s, at, wg):
        kv, dtype = self.config.dq_kernel_kv, self.q_tile.dtype
        c = State(s=tk.rt_fl(kv), dp=tk.rt_fl(kv), p=tk.rt(kv, dtype), ds=tk.rt(kv, dtype),
                  dq=tk.rt_fl(self.spec.width), lse=tk.rv(), delta=tk.rv(), k=s.k_pipe.ring(), v=s.v_pipe.ring(),
                  wg=wg)
        seen = self.seen(g, at)
        self.load_stats(g, c, at)
        tk.zero(c.dq)
        tk.wait(s.q_full, 0)
        if const_expr(self.spec.left):
            for n in cutlass.range(seen.first, seen.first_unmasked, unroll=1):
                self.step(g, s, c, at, n, True)
        for n in cutlass.range(seen.first_unmasked, seen.end_unmasked, unroll=1):
            self.step(g, s, c, at, n, False)
        for n in cutlass.range(seen.end_unmasked, seen.end, unroll=1):
            self.step(g, s, c, at, n, True)
        # looked up again, so that registers need not hold it all the time
        self.finish(g, s, c, self.task(g) if const_expr(self.spec.varlen) else at)

    def load_stats(self, g, c, at):
        # a warpgroup whose rows are all past the end takes others': nothing of it is stored
        size, row = self.config.tile, cutlass.min(at.number * ROWS + c.wg * 64, (at.rows_q - 1) // 64 * 64)
        first = g.layout.first_tile(at, size, g.heads, g.stats_tiles)
        number = first + Int64(at.head) * g.stats_tiles + row // size
        for which, vector in enumerate((c.lse, c.delta)):
            start = g.stats.iterator + number * (2 * size) + (which * size + row % size)
            tk.load_rows(vector, cute.make_tensor(start, cute.make_layout((64,))), 0, 64)

    @cute.jit
    def step(self, g, s, c, at, n, masked: Constexpr[bool]):
        k, v = s.k[c.k.stage], s.v[c.v.stage]
        s.k_pipe.wait(c.k)
        tk.mm_ABt(c.s, s.q[c.wg], k)
        s.v_pipe.wait(c.v)
        tk.mm_ABt(c.dp, s.do[c.wg], v)
        tk.mma_wait(1)  # S
        found = ()
        if const_expr(masked):
            e, block, row = self.extent(g, at), self.config.dq_kernel_kv, at.number * ROWS + c.wg * 64
            found = limits(*mask_limits(e.mirrored, row, n), at.rows_k - n * block)
        p = tk.rt_fl(self.config.dq_kernel_kv)
        if const_expr(self.spec.softcap):
            probabilities(c.p, c.ds, c.s, c.lse, g.scores, found)
        else:
            probabilities_fp32(p, c.s, c.lse, g.scores, found)
        tk.mma_wait(0)  # dP
        s.v_pipe.release(c.v)
        c.v.advance()
        gradients(c.ds, c.ds if self.spec.softcap else p, c.dp, c.delta)
        tk.mma_AB(c.dq, c.ds, k)
        tk.mma_wait(0)
        s.k_pipe.release(c.k)
        c.k.advance()

    @cute.jit
    def finish(self, g, s, c, at):
        barrier = 1 + c.wg
        tk.mul(c.dq, c.dq, g.scale)
        tk.sync(barrier, tk.WARPGROUP)  # Q has been read
        tk.store(s.q[c.wg], c.dq)
        tk.publish()
        tk.sync(barrier, tk.WARPGROUP)
        if tk.first_warp_of_group():
            tk.store_async(piece(g.layout, g.dq, at.rows_q), s.q[c.wg],
                           (at.batch_q, at.head, 2 * at.number + c.wg, 0))
            tk.store_wait()

