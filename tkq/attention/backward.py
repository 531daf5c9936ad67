"""Flash attention backward (Dao et al., 2022, algorithm 4) on the tile layer: dK, dV, and dQ added up in fp32."""
from typing import Optional

import cuda.bindings.driver as cuda
import cutlass
import cutlass.cute as cute
from cutlass import Constexpr, Float32, Int32, Int64, const_expr

import tkq.tile as tk
from tkq.attention.backward_plan import BLOCK, BackwardConfig
from tkq.attention.backward_post import BackwardPost
from tkq.attention.backward_pre import BackwardPre
from tkq.attention.backward_spec import BackwardSpec
from tkq.attention.backward_state import Globals, Shared, State, Task
from tkq.attention.query_ranges import QueryExtent, mask_limits, nth_tile, place, query_range
from tkq.attention.ranges import ceil_div, heads_in_section
from tkq.runtime import fake

NOBODY = 1 << 30  # the first column that sees a key, where none does

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
        stats, acc = self.parts_of(workspace, ceil_div(q.shape[1], c.tile) * q.shape[2] * q.shape[0])
        BackwardPre(spec, c)(do, o, lse, dlse, stats, acc, stream)
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
            rows_q=q.shape[0], rows_k=k.shape[0], left=left, right=right, heads=q.shape[2], kv_heads=k.shape[2],
            heads_per_kv=heads_per_kv, tiles=tiles, blocks=blocks, all_kv_heads=all_kv_heads,
            section=heads_in_section(rows * row_bytes, c.section_mb << 20, 1, all_kv_heads),
            scale=scale, scale_log2=scale * tk.LOG2E)
        self.kernel(g).launch(grid=[blocks * all_kv_heads, 1, 1], block=[4 * tk.WARPGROUP, 1, 1], stream=stream,
                              min_blocks_per_mp=1, use_pdl=True)
        if const_expr(spec.dq):
            BackwardPost(spec, c)(acc, dq, scale, stream)

    def parts_of(self, workspace, tiles):
        """Of so many tiles: the statistics, and the accumulator where dQ is wanted."""
        of_stats, of_acc = 2 * self.config.tile, self.config.tile * self.spec.head_dim  # floats of a tile
        stats = cute.make_tensor(workspace.iterator, cute.make_layout((tiles, of_stats), stride=(of_stats, 1)))
        if not self.spec.dq:
            return stats, None
        start = (workspace.iterator + Int64(tiles) * of_stats).align(16)
        return stats, cute.make_tensor(start, cute.make_layout((tiles, of_acc), stride=(of_acc, 1)))

    # ---- device --------------------------------------------------------------------------------

    @cute.kernel
    def kernel(self, g: Globals):
        c = self.config
        al = tk.SharedAllocator()
        s = Shared(
            k=al.tile(self.kv_tile, 2), v=al.tile(self.kv_tile, 2),
            q=al.tile(self.q_tile, c.q_stages), do=al.tile(self.q_tile, c.do_stages),
            ds=al.tile(self.ds_tile, 2 * c.ds_stages), stats=al.vector(2 * c.tile, c.q_stages),
            kv_full=al.semaphores(2), q_pipe=al.pipe(c.q_stages, self.q_tile.bytes + self.stats_bytes, 8),
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

    def extent(self, g):
        left, right = (g.left if self.spec.left else None), (g.right if self.spec.right else None)
        return QueryExtent(g.rows_q, g.rows_k, self.config.tile, BLOCK, left, right)

    @cute.jit
    def task(self, g):
        """This block's."""
        i, masks = Int32(cute.arch.block_idx()[0]), const_expr(self.spec.left or self.spec.right)
        head, block = place(i, g.blocks, g.all_kv_heads, g.section, masks)
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
                  dv=tk.rt_fl(D), q=s.q_pipe.ring(), do=s.do_pipe.ring(),
                  ds_ring=s.ds_pipe.ring(), wg=wg)
        t = self.task(g)
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
        tk.mm_ABt(c.s, s.k[c.wg], q)
        tk.mma_wait(0)
        self.probabilities(g, s, t, c, m, masked)
        s.do_pipe.wait(c.do)
        tk.mm_ABt(c.dp, s.v[c.wg], do)
        tk.mma_AB(c.dv, c.p, do)
        tk.mma_wait(1)  # dP
        self.gradients(s, c)
        if const_expr(self.spec.dq):
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

    def probabilities(self, g, s, t, c, m, masked):
        """p = exp2(scale_log2 * s - lse * log2(e)), 0 where a query does not see a key. s itself is written by the
        tensor cores only: were it written here too, the assembler would serialise them."""
        lse, limits = tk.cv(c.s.cols), self.limits(g, t, c, m) if masked else ()
        tk.load_shared_cols(lse, self.stats(s, c, 0))

        def p(x, lse, col=0, *limits):
            x = cute.math.exp2(cute.math.fma(x, g.scale_log2, lse), fastmath=True)
            for inside, limit in zip((lambda n: n <= col, lambda n: n > col), limits):
                x = cutlass.select_(inside(limit), x, Float32(0.0))
            return x

        tk.apply_narrow(c.p, p, c.s, lse, tk.COLUMN, *limits)

    def limits(self, g, t, c, m):
        """For each row, that is key, of this thread: the first column that sees it, and the one after the last."""
        key = t.block * BLOCK + c.wg * 64
        first, end = mask_limits(self.extent(g), key, m)

        def per_row(limit):
            x = cute.make_rmem_tensor((2,), Int32)
            for r in range(2):
                x[r] = limit(tk.first_row() + 8 * r)
            return tk.RowVec(x)

        def first_or_none(row):
            col = Int32(0) if first is None else first + row - tk.first_col()
            return cutlass.select_(key + row < g.rows_k, col, Int32(NOBODY))

        limits = [per_row(first_or_none)]
        return limits if end is None else [*limits, per_row(lambda row: end + row - tk.first_col())]

    def gradients(self, s, c):
        """ds = p * (dp + dlse - rowsum(o * do)), from p as dV has it: s is free by then."""
        delta = tk.cv(c.dp.cols)
        tk.load_shared_cols(delta, self.stats(s, c, 1))
        tk.apply_narrow(c.ds, lambda p, dp, d: p * (dp + d), c.p, c.dp, delta)

    def stats(self, s, c, which):
        tile = self.config.tile
        return cute.make_tensor(s.stats[None, c.q.stage].iterator + which * tile, cute.make_layout((tile,)))

    # ---- the dQ warpgroup --------------------------------------------------------------------------

    @cute.jit
    def queries(self, g, s):
        if const_expr(self.spec.dq):
            dq, ring, t = tk.rt_fl(self.config.dq_cols), s.ds_pipe.ring(), self.task(g)
            tk.wait(s.kv_full[0], 0)
            cute.arch.griddepcontrol_wait()  # the accumulator is zero
            for h in cutlass.range(g.heads_per_kv, unroll=1):
                number = self.tile_number(g, t, self.query_head(g, t, h), 0)
                for n in cutlass.range(t.end - t.first, unroll=1):
                    s.ds_pipe.wait(ring)
                    self.add_dq(g, s, dq, ring, number + nth_tile(t, n, t.shift))
                    ring.advance()

    @cute.jit
    def add_dq(self, g, s, dq, ring, number):
        """The accumulator's tile ``number`` += dS K."""
        rows, cols = self.config.dq_parts(self.spec.head_dim)
        ds, part_bytes = 2 * ring.stage, 64 * self.config.dq_cols * 4
        address = g.acc.iterator.toint() + number * (rows * cols * part_bytes) + tk.thread_in_warpgroup() * 16
        for i in cutlass.range_constexpr(rows * cols):
            parts = dict(a_part=i // cols, b_part=i % cols)
            tk.mm_AtB(dq, s.ds[ds], s.k[0], **parts)
            tk.mma_AtB(dq, s.ds[ds + 1], s.k[1], **parts)
            tk.mma_wait(0)
            if const_expr(i == rows * cols - 1):
                s.ds_pipe.release(ring)
            x = dq.tensor
            for j in cutlass.range_constexpr(self.config.dq_cols // 8):
                tk.red_add4(address + (i * part_bytes + j * 2048), *[x[4 * j + e] for e in range(4)])

    # ---- writing out ---------------------------------------------------------------------------

    @cute.jit
    def finish(self, g, s, t, c):
        """Write dK and dV, by way of the shared memory of K and V."""
        barrier, at = 8 + c.wg, (t.batch, t.head, 2 * t.block + c.wg, 0)
        tk.sync(barrier, tk.WARPGROUP)  # V has been read
        tk.store(s.v[c.wg], c.dv)
        self.send(g.dv, s.v[c.wg], at, barrier)
        tk.mul(c.dk, c.dk, g.scale)
        if const_expr(self.spec.dq):  # until the dQ warpgroup has read K for the last time, with the last dS
            for _ in cutlass.range_constexpr(self.config.ds_stages - 1):
                c.ds_ring.advance()
            s.ds_pipe.acquire_empty(c.ds_ring)
        tk.store(s.k[c.wg], c.dk)
        self.send(g.dk, s.k[c.wg], at, barrier)
        tk.store_wait()

    @cute.jit
    def send(self, dst, tile, at, barrier):
        tk.publish()
        tk.sync(barrier, tk.WARPGROUP)
        if tk.first_warp_of_group():
            tk.store_async(dst, tile, at)


def heads_outside(x):
    """(batch, row, head, col) as (row, col, head, batch)."""
    return cute.make_tensor(x.iterator, cute.select(x.layout, [1, 3, 2, 0]))


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
