"""dQ by itself, without additions in memory: for gradients that are the same in each run."""
from dataclasses import dataclass

import cuda.bindings.driver as cuda
import cutlass
import cutlass.cute as cute
from cutlass import Constexpr, Float32, Int32, Int64, const_expr

import tkq.tile as tk
from tkq.attention.backward_math import Scores, gradients, limits, probabilities
from tkq.attention.backward_plan import ROWS, BackwardConfig
from tkq.attention.backward_spec import BackwardSpec
from tkq.attention.query_ranges import QueryExtent, key_range, mask_limits
from tkq.attention.ranges import ceil_div, place


@dataclass(frozen=True)
class Globals:
    q: tk.gl
    do: tk.gl
    k: tk.gl
    v: tk.gl
    dq: tk.gl
    stats: cute.Tensor  # as for the main kernel
    rows_q: Int32
    rows_k: Int32
    left: Int32
    right: Int32
    heads: Int32
    heads_per_kv: Int32
    tiles: Int32  # of ROWS rows, of a head
    all_heads: Int32
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


class BackwardQueries:
    """dQ = scale * dS K, with dS = P * (dO V' - rowsum(o * do) + dlse).

    A block has 128 queries of one head, 64 for each of two consumer warpgroups; their keys pass by.

      producer (warp 0)       Q dO, then K V of one block after the other
      consumer warpgroups     S = Q K', dP = dO V' | P under dP | dS | dQ += dS K, next S .. | write dQ

      pipe    stages     full (arrivals)        empty (arrivals)
      K, V    kv_stages  producer's bytes (1)   every consumer warp (8)
    """

    def __init__(self, spec: BackwardSpec, config: BackwardConfig):
        self.spec, self.config = spec, config
        dtype = tk.element_type(spec.dtype)
        self.q_tile, self.kv_tile = tk.st(64, spec.width, dtype), tk.st(config.kv, spec.width, dtype)

    @cute.jit
    def __call__(self, do: cute.Tensor, q: cute.Tensor, k: cute.Tensor, v: cute.Tensor, dq: cute.Tensor,
                 stats: cute.Tensor, scale: Float32, softcap: Float32, left: Int32, right: Int32,
                 stream: cuda.CUstream):
        """do, q, k, v: (row, col, head, batch); dq (B, Sq, H, D); all else as the main kernel's."""
        tiles, all_heads = ceil_div(q.shape[0], ROWS), q.shape[2] * q.shape[3]
        g = Globals(
            q=tk.gl.load(q, self.q_tile), do=tk.gl.load(do, self.q_tile), k=tk.gl.load(k, self.kv_tile),
            v=tk.gl.load(v, self.kv_tile), dq=tk.gl.store(heads_outside(dq), self.q_tile), stats=stats,
            rows_q=q.shape[0], rows_k=k.shape[0], left=left, right=right, heads=q.shape[2],
            heads_per_kv=q.shape[2] // k.shape[2], tiles=tiles, all_heads=all_heads, scale=scale,
            scores=Scores.of(scale, softcap, self.spec.softcap))
        self.kernel(g).launch(grid=[tiles * all_heads, 1, 1], block=[3 * tk.WARPGROUP, 1, 1], stream=stream,
                              min_blocks_per_mp=1)

    @cute.kernel
    def kernel(self, g: Globals):
        al, stages = tk.SharedAllocator(), self.config.kv_stages
        s = Shared(
            q=al.tile(self.q_tile, 2), do=al.tile(self.q_tile, 2), k=al.tile(self.kv_tile, stages),
            v=al.tile(self.kv_tile, stages), q_full=al.semaphores(),
            k_pipe=al.pipe(stages, self.kv_tile.bytes, 8), v_pipe=al.pipe(stages, self.kv_tile.bytes, 8))

        def initialise():
            s.k_pipe.init()
            s.v_pipe.init()
            tk.init(s.q_full, 1)

        tk.init_block(initialise)
        tk.specialise(lambda: self.producer(g, s), lambda wg: self.consumer(g, s, wg), 2)

    def extent(self, g):
        left, right = (g.left if self.spec.left else None), (g.right if self.spec.right else None)
        return QueryExtent(g.rows_q, g.rows_k, ROWS, self.config.kv, left, right)

    def task(self, g):
        """(batch, query head, tile), and the key blocks. The last tiles, which may see the most keys, come first."""
        index = Int32(cute.arch.block_idx()[0])
        head, tile = place(index, g.tiles, g.all_heads, Int32(1), True)
        return (head // g.heads, head % g.heads, tile), key_range(self.extent(g), tile * ROWS)

    @cute.jit
    def producer(self, g, s):
        tk.prefetch(g.q, g.do, g.k, g.v, g.dq)
        (batch, head, tile), seen = self.task(g)
        tk.expect_bytes(s.q_full, 4 * self.q_tile.bytes)
        for wg in cutlass.range_constexpr(2):
            tk.load_async(s.q[wg], g.q, (batch, head, 2 * tile + wg, 0), s.q_full)
            tk.load_async(s.do[wg], g.do, (batch, head, 2 * tile + wg, 0), s.q_full)
        k_ring, v_ring, kv_head = s.k_pipe.ring(), s.v_pipe.ring(), head // g.heads_per_kv
        for n in cutlass.range(seen.first, seen.end, unroll=1):
            tk.load_async(s.k[k_ring.stage], g.k, (batch, kv_head, n, 0), s.k_pipe.acquire(k_ring))
            k_ring.advance()
            tk.load_async(s.v[v_ring.stage], g.v, (batch, kv_head, n, 0), s.v_pipe.acquire(v_ring))
            v_ring.advance()

    @cute.jit
    def consumer(self, g, s, wg):
        kv, dtype = self.config.kv, self.q_tile.dtype
        c = State(s=tk.rt_fl(kv), dp=tk.rt_fl(kv), p=tk.rt(kv, dtype), ds=tk.rt(kv, dtype),
                  dq=tk.rt_fl(self.spec.width), lse=tk.rv(), delta=tk.rv(), k=s.k_pipe.ring(), v=s.v_pipe.ring(),
                  wg=wg)
        at, seen = self.task(g)
        self.load_stats(g, c, at)
        tk.zero(c.dq)
        tk.wait(s.q_full, 0)
        if const_expr(self.spec.left):
            for n in cutlass.range(seen.first, seen.whole, unroll=1):
                self.step(g, s, c, at, n, True)
        for n in cutlass.range(seen.whole, seen.whole_end, unroll=1):
            self.step(g, s, c, at, n, False)
        for n in cutlass.range(seen.whole_end, seen.end, unroll=1):
            self.step(g, s, c, at, n, True)
        self.finish(g, s, c, at)

    def load_stats(self, g, c, at):
        batch, head, tile = at
        # a warpgroup whose rows are all past the end takes others': nothing of it is stored
        size, row = self.config.tile, cutlass.min(tile * ROWS + c.wg * 64, (g.rows_q - 1) // 64 * 64)
        number = Int64(batch * g.heads + head) * ceil_div(g.rows_q, size) + row // size
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
            e, block, row = self.extent(g), self.config.kv, at[2] * ROWS + c.wg * 64
            found = limits(*mask_limits(e.mirrored, row, n), g.rows_k - n * block)
        slope = c.ds if self.spec.softcap else c.p
        probabilities(c.p, slope, c.s, c.lse, g.scores, found)
        tk.mma_wait(0)  # dP
        s.v_pipe.release(c.v)
        c.v.advance()
        gradients(c.ds, slope, c.dp, c.delta)
        tk.mma_AB(c.dq, c.ds, k)
        tk.mma_wait(0)
        s.k_pipe.release(c.k)
        c.k.advance()

    @cute.jit
    def finish(self, g, s, c, at):
        batch, head, tile = at
        barrier = 1 + c.wg
        tk.mul(c.dq, c.dq, g.scale)
        tk.sync(barrier, tk.WARPGROUP)  # Q has been read
        tk.store(s.q[c.wg], c.dq)
        tk.publish()
        tk.sync(barrier, tk.WARPGROUP)
        if tk.first_warp_of_group():
            tk.store_async(g.dq, s.q[c.wg], (batch, head, 2 * tile + c.wg, 0))
            tk.store_wait()


def heads_outside(x):
    """(batch, row, head, col) as (row, col, head, batch)."""
    return cute.make_tensor(x.iterator, cute.select(x.layout, [1, 3, 2, 0]))
