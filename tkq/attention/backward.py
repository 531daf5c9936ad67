"""Flash attention backward (Dao et al., 2022, algorithm 4) on the tile layer: dK, dV, and dQ added up in fp32."""
from typing import Optional

import cuda.bindings.driver as cuda
import cutlass
import cutlass.cute as cute
from cutlass import Constexpr, Float32, Int32, Int64, Uint32, const_expr

import tkq.tile as tk
from tkq.attention.backward_dq import BackwardQueries, heads_outside
from tkq.attention.backward_math import gradients, limits, probabilities
from tkq.attention.backward_plan import BLOCK, BackwardConfig
from tkq.attention.backward_post import BackwardPost, load_part
from tkq.attention.backward_pre import BackwardPre
from tkq.attention.backward_spec import BackwardSpec
from tkq.attention.backward_state import Globals, Shared, State, Task
from tkq.attention.query_ranges import QueryExtent, mask_limits, nth_tile, place, query_range
from tkq.attention.ranges import ceil_div, heads_in_section
from tkq.runtime import fake

# named barriers; KEYS and TURNS: one for each warpgroup with keys
DQ_BARRIER, KEYS_BARRIER, TURNS_BARRIER, LAST_BARRIER = 1, 2, 4, 6

class AttentionBackward:
    """dV = P' dO, dK = scale * dS' Q, dQ = scale * dS K, with P = exp(scale * Q K' - lse) and
    dS = P * (dO V' - rowsum(o * do) + dlse).

    A task, one for each block, is 128 keys of one K/V head; all queries that see them, of all its query heads, pass by
    in tiles. Scores are transposed, (key, query), so that P' and dS' are operands in registers as they are.

      producer (warp 0)        K V, then Q dO of one tile after the other
      2 warpgroups, 64 keys    S' = K Q', dP' = V dO' | P under dP' | dV += P' dO | dS under dV | dS' to shared memory,
                               dK += dS' Q | next tile .. | write dK, dV
      1 warpgroup              dQ = dS K | added to the accumulator in global memory | next tile ..

      pipe      stages     full (arrivals)                     empty (arrivals)
      Q, stats  q_stages   producer's bytes (1)                every warp with keys (8)
      dO        do_stages  producer's bytes (1)                every warp with keys (8)
      dS        ds_stages  every warp with keys (8)            the dQ warpgroup's warps (4)

    The warpgroups with keys meet nobody but at the pipes: one's elementwise work runs under another's products. Adding
    to dQ, whose traffic comes in bursts, holds up its own warpgroup only. dQ is added up in the order in which the
    accumulator's registers lie; ``BackwardPost`` puts it right. ``BackwardPre`` makes the statistics of the rows, where
    rows past the end and rows that see no key have P = 0, so that no query needs a mask; and it zeroes dQ.
    """

    def __init__(self, spec: BackwardSpec, config: BackwardConfig):
        self.spec, self.config = spec, config.check(spec.head_dim)
        dtype = tk.element_type(spec.dtype)
        self.q_tile = tk.st(config.tile, spec.head_dim, dtype)
        self.kv_tile = tk.st(64, spec.head_dim, dtype)
        self.ds_tile = tk.st(64, config.tile, dtype)
        self.dq_tile = tk.st(64, config.dq_cols, dtype)
        self.stats_bytes = 8 * config.tile

    # ---- host ----------------------------------------------------------------------------------

    @cute.jit
    def __call__(self, do: cute.Tensor, q: cute.Tensor, k: cute.Tensor, v: cute.Tensor, o: cute.Tensor,
                 lse: cute.Tensor, dlse: Optional[cute.Tensor], dq: Optional[cute.Tensor], dk: cute.Tensor,
                 dv: cute.Tensor, workspace: cute.Tensor, scale: Float32, left: Int32, right: Int32,
                 stream: cuda.CUstream):
        """do, q, o, dq (B, Sq, H, D), k, v, dk, dv (B, Sk, Hk, D), lse, dlse (B, H, Sq) fp32; workspace: fp32,
        uninitialised, ``config.workspace_floats`` for each query head."""
        spec, c = self.spec, self.config
        all_tiles = ceil_div(q.shape[1], c.tile) * q.shape[2] * q.shape[0]
        stats, acc, counters = self.parts_of(workspace, all_tiles, k.shape[2] * k.shape[0])
        BackwardPre(spec, c)(do, o, lse, dlse, stats, acc, counters, stream)
        do, q, k, v, dk, dv = [heads_outside(x) for x in (do, q, k, v, dk, dv)]
        tiles, blocks = ceil_div(q.shape[0], c.tile), ceil_div(k.shape[0], BLOCK)
        all_kv_heads, heads_per_kv = k.shape[2] * k.shape[3], q.shape[2] // k.shape[2]
        # of a K/V head: Q, dO and the accumulator of its query heads; both factors bounded, to stay in 32 bits
        row_bytes = spec.head_dim * (2 * self.q_tile.dtype.width // 8 + 4) * cutlass.min(heads_per_kv, Int32(32))
        rows = cutlass.min(q.shape[0], Int32(1 << 15))
        g = Globals(
            q=tk.gl.load(q, self.q_tile), do=tk.gl.load(do, self.q_tile),
            k=tk.gl.load(k, self.kv_tile), v=tk.gl.load(v, self.kv_tile),
            dk=tk.gl.store(dk, self.kv_tile), dv=tk.gl.store(dv, self.kv_tile), stats=stats, acc=acc,
            dq=None if counters is None else tk.gl.store(heads_outside(dq), self.dq_tile), counters=counters,
            rows_q=q.shape[0], rows_k=k.shape[0], left=left, right=right, heads=q.shape[2], kv_heads=k.shape[2],
            heads_per_kv=heads_per_kv, tiles=tiles, blocks=blocks, all_kv_heads=all_kv_heads,
            section=heads_in_section(rows * row_bytes, c.section_mb << 20, 1, all_kv_heads),
            scale=scale, scale_log2=scale * tk.LOG2E)
        self.kernel(g).launch(grid=[blocks * all_kv_heads, 1, 1], block=[4 * tk.WARPGROUP, 1, 1], stream=stream,
                              min_blocks_per_mp=1, use_pdl=True)
        if const_expr(spec.adds_dq and c.post):
            BackwardPost(spec, c)(acc, dq, scale, stream)
        elif const_expr(spec.dq and not spec.adds_dq):
            BackwardQueries(spec, c)(do, q, k, v, dq, stats, scale, left, right, stream)

    def parts_of(self, workspace, tiles, heads):
        """Of so many tiles and K/V heads: the statistics; the accumulator, where dQ is added up; the counters, where a
        last block is asked for."""
        of_stats, of_acc = 2 * self.config.tile, self.config.tile * self.spec.head_dim  # floats of a tile
        stats = cute.make_tensor(workspace.iterator, cute.make_layout((tiles, of_stats), stride=(of_stats, 1)))
        if not self.spec.adds_dq:
            return stats, None, None
        start = (workspace.iterator + Int64(tiles) * of_stats).align(16)
        acc = cute.make_tensor(start, cute.make_layout((tiles, of_acc), stride=(of_acc, 1)))
        if self.config.post:
            return stats, acc, None
        end = cute.recast_ptr(start + Int64(tiles) * of_acc, dtype=Int32)
        return stats, acc, cute.make_tensor(end, cute.make_layout((heads,)))

    # ---- device --------------------------------------------------------------------------------

    @cute.kernel
    def kernel(self, g: Globals):
        c = self.config
        al = tk.SharedAllocator()
        s = Shared(
            k=al.tile(self.kv_tile, 2), v=al.tile(self.kv_tile, 2),
            q=al.tile(self.q_tile, c.q_stages), do=al.tile(self.q_tile, c.do_stages),
            ds=al.tile(self.ds_tile, 2 * c.ds_stages), stats=al.vector(2 * c.tile, c.q_stages),
            dq=self.dq_staging(al), last=None if g.counters is None else al.vector(1, 1, Int32),
            kv_full=al.semaphores(2),
            q_pipe=al.pipe(c.q_stages, self.q_tile.bytes + self.stats_bytes, 8),
            do_pipe=al.pipe(c.do_stages, self.q_tile.bytes, 8), ds_pipe=al.pipe(c.ds_stages, 0, 4, producers=8))

        def initialise():
            for pipe in (s.q_pipe, s.do_pipe, s.ds_pipe):
                pipe.init()
            for i in range(2):
                tk.init(s.kv_full[i], 1)

        tk.init_block(initialise)
        few, some, many = c.registers
        tk.assign((tk.Role(lambda _: self.producer(g, s), few, warps=1),
                   tk.Role(lambda _: self.queries(g, s), some),
                   tk.Role(lambda wg: self.keys(g, s, wg), many, warpgroups=2)))

    def dq_staging(self, al):
        """(4, thread, quads) fp32: a part of dQ as the threads have it."""
        if self.config.dq_add != "bulk":
            return None
        return al.allocate_tensor(Float32, cute.make_layout((4, tk.WARPGROUP, self.config.dq_cols // 8)), 128)

    def extent(self, g):
        left, right = (g.left if self.spec.left else None), (g.right if self.spec.right else None)
        return QueryExtent(g.rows_q, g.rows_k, self.config.tile, BLOCK, left, right)

    @cute.jit
    def task(self, g):
        """This block's."""
        i, masks = Int32(cute.arch.block_idx()[0]), const_expr(self.spec.left or self.spec.right)
        longest_first = const_expr(masks and self.config.longest_first)
        head, block = place(i, g.blocks, g.all_kv_heads, g.section, longest_first)
        r = query_range(self.extent(g), block * BLOCK)
        shift = Int32(0)
        if const_expr(self.config.stagger and not masks):
            shift = block * g.tiles // g.blocks
        return Task(head // g.kv_heads, head % g.kv_heads, block, r.first, r.whole, r.whole_end, r.end, shift)

    def query_head(self, g, t, h):
        return t.head * g.heads_per_kv + h

    def tile_number(self, g, t, head, m):
        """Of tile m of a query head, among those of all heads."""
        return Int64(t.batch * g.heads + head) * g.tiles + m

    # ---- producer ------------------------------------------------------------------------------

    @cute.jit
    def producer(self, g, s):
        tk.prefetch(g.k, g.v, g.q, g.do, g.dk, g.dv)
        t = self.task(g)
        for i, (tile, src) in enumerate(((s.k, g.k), (s.v, g.v))):
            self.load_keys(tile, src, t, s.kv_full[i])
        q_ring, do_ring = s.q_pipe.ring(), s.do_pipe.ring()
        cute.arch.griddepcontrol_wait()  # what comes next is BackwardPre's
        for h in cutlass.range(g.heads_per_kv, unroll=1):
            head = self.query_head(g, t, h)
            for n in cutlass.range(t.end - t.first, unroll=1):
                m = nth_tile(t, n, t.shift)
                sem = s.q_pipe.acquire(q_ring)
                tk.load_async(s.q[q_ring.stage], g.q, (t.batch, head, m, 0), sem)
                self.load_stats(g, s, self.tile_number(g, t, head, m), q_ring.stage, sem)
                q_ring.advance()
                sem = s.do_pipe.acquire(do_ring)
                tk.load_async(s.do[do_ring.stage], g.do, (t.batch, head, m, 0), sem)
                do_ring.advance()

    def load_keys(self, tile, src, t, sem):
        tk.expect_bytes(sem, 2 * self.kv_tile.bytes)
        for wg in range(2):
            tk.load_async(tile[wg], src, (t.batch, t.head, 2 * t.block + wg, 0), sem)

    def load_stats(self, g, s, number, stage, sem):
        with cute.arch.elect_one():
            tk.bulk_load(s.stats[None, stage].iterator.toint(),
                         g.stats.iterator.toint() + number * self.stats_bytes, self.stats_bytes, sem.ptr.toint())

    # ---- the warpgroups with keys ----------------------------------------------------------------

    @cute.jit
    def keys(self, g, s, wg):
        tile, D, dtype = self.config.tile, self.spec.head_dim, self.q_tile.dtype
        scores = tk.rt_fl(tile)
        c = State(s=scores, dp=scores, p=tk.rt(tile, dtype), ds=tk.rt(tile, dtype), dk=tk.rt_fl(D),
                  dv=tk.rt_fl(D), q=s.q_pipe.ring(), do=s.do_pipe.ring(), ds_ring=s.ds_pipe.ring(),
                  turns=tk.Turns(2, wg, self.config.turns, TURNS_BARRIER), wg=wg)
        t = self.task(g)
        c.turns.start()
        tk.zero(c.dk)
        tk.zero(c.dv)
        for i in cutlass.range_constexpr(2):
            tk.wait(s.kv_full[i], 0)
        for _ in cutlass.range(g.heads_per_kv, unroll=1):
            for m in cutlass.range(t.first, t.whole, unroll=1):
                self.step(g, s, t, c, m, True)
            for m in cutlass.range(t.whole, t.whole_end, unroll=1):
                self.step(g, s, t, c, m, False)
            if const_expr(self.spec.left):
                for m in cutlass.range(t.whole_end, t.end, unroll=1):
                    self.step(g, s, t, c, m, True)
        self.finish(g, s, t, c)

    @cute.jit
    def step(self, g, s, t, c, m, masked: Constexpr[bool]):
        q, do = s.q[c.q.stage], s.do[c.do.stage]
        s.q_pipe.wait(c.q)
        c.turns.take()  # one warpgroup makes P while the other is busy with the rest
        tk.mm_ABt(c.s, s.k[c.wg], q)
        tk.mma_wait(0)
        probabilities(c.p, c.s, self.stats(s, c, 0), g.scale_log2, self.limits(g, t, c, m) if masked else ())
        c.turns.give()
        s.do_pipe.wait(c.do)
        tk.mm_ABt(c.dp, s.v[c.wg], do)
        tk.mma_AB(c.dv, c.p, do)
        tk.mma_wait(1)  # dP
        gradients(c.ds, c.p, c.dp, self.stats(s, c, 1))
        if const_expr(self.spec.adds_dq):
            s.ds_pipe.acquire_empty(c.ds_ring)
            tk.store(s.ds[2 * c.ds_ring.stage + c.wg], c.ds)
            tk.publish()
            s.ds_pipe.commit(c.ds_ring)
            c.ds_ring.advance()
        tk.mma_AB(c.dk, c.ds, q)
        tk.mma_wait(1)  # dV
        s.do_pipe.release(c.do)
        c.do.advance()
        tk.mma_wait(0)
        s.q_pipe.release(c.q)
        c.q.advance()

    def limits(self, g, t, c, m):
        """Of ``probabilities``: which queries of tile m see which of this warpgroup's keys."""
        key = t.block * BLOCK + c.wg * 64
        return limits(*mask_limits(self.extent(g), key, m), rows=g.rows_k - key)

    def stats(self, s, c, which):
        """A row of the tile's statistics, as a value for each query."""
        tile, v = self.config.tile, tk.cv(self.config.tile)
        row = cute.make_tensor(s.stats[None, c.q.stage].iterator + which * tile, cute.make_layout((tile,)))
        tk.load_shared_cols(v, row)
        return v

    # ---- the dQ warpgroup --------------------------------------------------------------------------

    @cute.jit
    def queries(self, g, s):
        if const_expr(self.spec.adds_dq):
            dq, ring, t = tk.rt_fl(self.config.dq_cols), s.ds_pipe.ring(), self.task(g)
            tk.wait(s.kv_full[0], 0)
            cute.arch.griddepcontrol_wait()  # the accumulator is zero
            for h in cutlass.range(g.heads_per_kv, unroll=1):
                number = self.tile_number(g, t, self.query_head(g, t, h), 0)
                for n in cutlass.range(t.end - t.first, unroll=1):
                    s.ds_pipe.wait(ring)
                    self.add_dq(g, s, dq, ring, number + nth_tile(t, n, t.shift))
                    ring.advance()
            tk.store_wait(read=False)
            if const_expr(g.counters is not None):
                self.sign_off(g, s, t)

    @cute.jit
    def sign_off(self, g, s, t):
        """All that this block adds is in the accumulator. Is it the last of its K/V head? The others are told."""
        cute.arch.fence_acq_rel_gpu()  # each thread's additions come before the count
        tk.sync(DQ_BARRIER, tk.WARPGROUP)
        counter, last = g.counters.iterator + (t.batch * g.kv_heads + t.head), s.last
        if tk.thread_in_warpgroup() == 0:
            last[0, 0] = Int32(tk.count_up(counter.toint(), Uint32(g.blocks - 1)) == Uint32(g.blocks - 1))
            cute.arch.fence_acq_rel_gpu()  # the count comes before what anyone here reads of others' additions
        tk.sync_arrive(LAST_BARRIER, 3 * tk.WARPGROUP)

    @cute.jit
    def add_dq(self, g, s, dq, ring, number):
        """The accumulator's tile ``number`` += dS K."""
        rows, cols = self.config.dq_parts(self.spec.head_dim)
        ds, part_bytes = 2 * ring.stage, 64 * self.config.dq_cols * 4
        address = g.acc.iterator.toint() + number * (rows * cols * part_bytes)
        for i in cutlass.range_constexpr(rows * cols):
            parts = dict(a_part=i // cols, b_part=i % cols)
            tk.mm_AtB(dq, s.ds[ds], s.k[0], **parts)
            tk.mma_AtB(dq, s.ds[ds + 1], s.k[1], **parts)
            tk.mma_wait(0)
            if const_expr(i == rows * cols - 1):
                s.ds_pipe.release(ring)
            if const_expr(self.config.dq_add == "bulk"):
                self.bulk_add_part(s, dq, address + i * part_bytes)
            else:
                self.add_part(dq, address + i * part_bytes)

    def add_part(self, dq, address):
        """From registers: 16 bytes of every thread side by side, then the next 16."""
        x = dq.tensor
        for j in range(self.config.dq_cols // 8):
            tk.red_add4(address + (tk.thread_in_warpgroup() * 16 + j * 2048), *[x[4 * j + e] for e in range(4)])

    @cute.jit
    def bulk_add_part(self, s, dq, address):
        """By way of shared memory, in the same order."""
        first, quads = tk.thread_in_warpgroup() == 0, self.config.dq_cols // 8
        tk.store_wait()  # the part before has left
        tk.sync(DQ_BARRIER, tk.WARPGROUP)
        mine = cute.make_tensor(dq.tensor.iterator, cute.make_layout((4, quads)))
        for j in cutlass.range_constexpr(quads):
            cute.autovec_copy(mine[None, j], s.dq[None, tk.thread_in_warpgroup(), j])
        tk.publish()
        tk.sync(DQ_BARRIER, tk.WARPGROUP)
        if first:
            tk.bulk_add(address, s.dq.iterator.toint(), quads * 2048)
            tk.bulk_commit()

    # ---- writing out ---------------------------------------------------------------------------

    @cute.jit
    def finish(self, g, s, t, c):
        """Write dK and dV, by way of the shared memory of K and V."""
        barrier, at = KEYS_BARRIER + c.wg, (t.batch, t.head, 2 * t.block + c.wg, 0)
        tk.sync(barrier, tk.WARPGROUP)  # V has been read
        tk.store(s.v[c.wg], c.dv)
        self.send(g.dv, s.v[c.wg], at, barrier)
        tk.mul(c.dk, c.dk, g.scale)
        if const_expr(self.spec.adds_dq):  # until the dQ warpgroup has read K for the last time, with the last dS
            for _ in cutlass.range_constexpr(self.config.ds_stages - 1):
                c.ds_ring.advance()
            s.ds_pipe.acquire_empty(c.ds_ring)
        tk.store(s.k[c.wg], c.dk)
        self.send(g.dk, s.k[c.wg], at, barrier)
        if const_expr(g.counters is not None):
            tk.sync(LAST_BARRIER, 3 * tk.WARPGROUP)
            if s.last[0, 0] != 0:
                cute.arch.fence_acq_rel_gpu()  # all blocks' additions come before what is read now
                self.convert(g, s, t, c.wg, barrier)
        tk.store_wait()

    @cute.jit
    def convert(self, g, s, t, wg, barrier):
        """dQ of all query heads of the block's K/V head from the accumulator, by the warpgroups with keys: parts in
        turns, as many at once as Q's tiles, which nobody needs any more, have room for."""
        rows, cols = self.config.dq_parts(self.spec.head_dim)
        at_once = self.config.q_stages * self.q_tile.bytes // (2 * self.dq_tile.bytes)
        x, out = [tk.rt_fl(self.config.dq_cols) for _ in range(at_once)], s.q.scratch(self.dq_tile)
        first = self.tile_number(g, t, self.query_head(g, t, 0), 0)
        parts = g.heads_per_kv * g.tiles * (rows * cols)
        for i in cutlass.range(wg * at_once, parts, 2 * at_once, unroll=1):
            for n in cutlass.range_constexpr(at_once):
                if i + n < parts:
                    load_part(x[n], g.acc[first + (i + n) // (rows * cols), None], (i + n) % (rows * cols))
            tk.store_wait()  # the tiles are free again
            tk.sync(barrier, tk.WARPGROUP)
            for n in cutlass.range_constexpr(at_once):
                tk.mul(x[n], x[n], g.scale)
                tk.store(out[wg * at_once + n], x[n])
            tk.publish()
            tk.sync(barrier, tk.WARPGROUP)
            if tk.first_warp_of_group():
                for n in cutlass.range_constexpr(at_once):
                    if i + n < parts:
                        tile, part = (i + n) // (rows * cols), (i + n) % (rows * cols)
                        head, m = self.query_head(g, t, tile // g.tiles), tile % g.tiles
                        tk.store_async(g.dq, out[wg * at_once + n],
                                       (t.batch, head, m * rows + part // cols, part % cols))

    @cute.jit
    def send(self, dst, tile, at, barrier):
        tk.publish()
        tk.sync(barrier, tk.WARPGROUP)
        if tk.first_warp_of_group():
            tk.store_async(dst, tile, at)


def build(spec: BackwardSpec, config: BackwardConfig):
    """The kernels and their fake arguments: any B, Sq, Sk, H, Hk and strides that are multiples of 16 bytes."""
    B, Sq, Sk, H, Hk = (fake.sym() for _ in range(5))

    def operand(seqlen, heads):
        strides = (*(fake.sym64(divisibility=8) for _ in range(3)), 1)
        return fake.tensor(spec.dtype, (B, seqlen, heads, spec.head_dim), strides, align=16)

    def rows():
        return fake.tensor("fp32", (B, H, Sq), tuple(fake.sym64() for _ in range(3)), align=4)

    queries, keys = [operand(Sq, H) for _ in range(4)], [operand(Sk, Hk) for _ in range(4)]
    do, q, o, dq = queries
    k, v, dk, dv = keys
    return AttentionBackward(spec, config), (
        do, q, k, v, o, rows(), rows() if spec.dlse else None, dq if spec.dq else None, dk, dv,
        fake.tensor("fp32", (fake.sym64(),)), Float32(1.0), Int32(0), Int32(0))
