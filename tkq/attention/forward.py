"""Flash attention forward (Dao et al., 2022; the pipelining of Shah et al., 2024) on the tile layer."""
from typing import Optional

import cuda.bindings.driver as cuda
import cutlass
import cutlass.cute as cute
from cutlass import Constexpr, Float32, Int32, const_expr

import tkq.tile as tk
from tkq.attention.plan import AttentionConfig
from tkq.attention.ranges import Extent, ceil_div, heads_in_section, key_range, place
from tkq.attention.spec import AttentionSpec
from tkq.attention.state import BATCH, BLOCKS, FIELDS, HEAD, MASKED, TILE, Globals, Shared, State
from tkq.runtime import fake


class AttentionForward:
    """o = softmax(scale * q @ k.T) @ v, and the log-sum-exp of each row where it is asked for.

    A task is 64 rows of Q for each consumer warpgroup of a block; its K and V pass by in blocks, the last ones (those
    with a mask) first.

      producer (warp 0)     K(n-1) | task and Q | K(n-2) V(n-1) | K(n-3) V(n-2) | .. | next task | V(0)
      consumer warpgroups   S = Q K(n-1)' softmax | S' = Q K(i-1)' and O += P V(i), softmax of S' under P V | ..
                            .. | next task's first S and softmax under this one's last P V (``bridge``) | write O

      pipe      stages    full (arrivals)                  empty (arrivals)
      K, V      stages    producer's bytes (1)             every warp of every consumer (4 x consumers x cluster)
      Q, task   q_stages  producer's bytes (1), for each   the consumer's own warps (4)
                          consumer by itself

    Consumers take turns to issue their products (``turns``), so that one's softmax runs under another's. The producer
    alone knows the schedule: what a task is travels beside its Q tile, under the same semaphore, and a task of no
    blocks says that all is done. Cluster of 2: two blocks, one above the other, share each K and V tile.
    """

    def __init__(self, spec: AttentionSpec, config: AttentionConfig):
        self.spec, self.config = spec, config
        dtype = tk.element_type(spec.dtype)
        self.q_tile = tk.st(64, spec.head_dim, dtype)
        self.kv_tile = tk.st(config.kv, spec.head_dim, dtype)
        self.o_tile = tk.st(64, spec.head_dim // config.o_panels, dtype)

    # ---- host ----------------------------------------------------------------------------------

    @cute.jit
    def __call__(self, q: cute.Tensor, k: cute.Tensor, v: cute.Tensor, o: cute.Tensor, lse: Optional[cute.Tensor],
                 counter: cute.Tensor, scale: Float32, processors: Int32, stream: cuda.CUstream):
        """q, o (B, Sq, H, D), k, v (B, Sk, Hk, D), lse (B, H, Sq) fp32 or None, counter (1,) int32 that is 0."""
        c, cluster = self.config, self.config.cluster
        # (batch, row, head, col) to (row, col, head, batch)
        q, k, v, o = [cute.make_tensor(x.iterator, cute.select(x.layout, [1, 3, 2, 0])) for x in (q, k, v, o)]
        tiles = ceil_div(q.shape[0], c.tile_rows)
        all_heads = q.shape[2] * q.shape[3]
        heads_per_kv = q.shape[2] // k.shape[2]
        kv_bytes = cutlass.min(k.shape[0], Int32(1 << 20)) * (2 * self.spec.head_dim * self.kv_tile.dtype.width // 8)
        g = Globals(
            q=tk.gl.load(q, self.q_tile),
            k=tk.gl.load(k, self.kv_tile, cluster), v=tk.gl.load(v, self.kv_tile, cluster),
            o=tk.gl.store(o, self.o_tile), lse=lse,
            schedule=tk.Schedule(tiles * all_heads, c.schedule, cluster, counter),
            rows_q=q.shape[0], rows_k=k.shape[0], heads=q.shape[2], heads_per_kv=heads_per_kv, tiles=tiles,
            all_heads=all_heads,
            section=heads_in_section(kv_bytes, c.section_mb << 20, heads_per_kv, all_heads),
            scale=scale * tk.LOG2E)
        blocks = tk.blocks_for(c.schedule, tiles * all_heads, processors, cluster)
        self.kernel(g).launch(grid=[blocks, 1, 1], block=[tk.WARPGROUP * (c.consumers + 1), 1, 1],
                              cluster=[cluster, 1, 1] if const_expr(cluster > 1) else None, stream=stream,
                              min_blocks_per_mp=1)

    # ---- device --------------------------------------------------------------------------------

    @cute.kernel
    def kernel(self, g: Globals):
        c = self.config
        al = tk.SharedAllocator()
        tiles = c.consumers * c.q_stages
        s = Shared(
            q=al.tile(self.q_tile, tiles), o=al.tile(self.o_tile, c.consumers),
            k=al.tile(self.kv_tile, c.stages), v=al.tile(self.kv_tile, c.stages),
            task=al.vector(FIELDS, tiles, Int32), q_full=al.semaphores(tiles), q_empty=al.semaphores(tiles),
            k_pipe=al.pipe(c.stages, self.kv_tile.bytes, 4 * c.consumers, c.cluster),
            v_pipe=al.pipe(c.stages, self.kv_tile.bytes, 4 * c.consumers, c.cluster))

        def initialise():
            s.k_pipe.init()
            s.v_pipe.init()
            for i in cutlass.range_constexpr(tiles):
                tk.init(s.q_full[i], 1)
                tk.init(s.q_empty[i], 4)

        tk.init_block(initialise, c.cluster)
        tk.specialise(lambda: self.producer(g, s), lambda wg: self.consumer(g, s, wg), c.consumers)
        if const_expr(c.cluster > 1):
            tk.cluster_sync()  # nobody leaves while another may still write to it

    # ---- producer ------------------------------------------------------------------------------

    @cute.jit
    def producer(self, g, s):
        tk.prefetch(g.q, g.k, g.v, g.o)
        k_ring, v_ring, q_ring = s.k_pipe.ring(), s.v_pipe.ring(), tk.ring(self.config.q_stages)
        number = g.schedule.first()
        while number < g.schedule.tasks:
            t = self.task(g, number)
            kv_head, blocks = (t[BATCH], t[HEAD] // g.heads_per_kv), t[BLOCKS]
            self.load(s.k, g.k, s.k_pipe, k_ring, kv_head, blocks - 1)
            self.load_q(g, s, q_ring, t)
            for j in cutlass.range(1, blocks, unroll=1):
                self.load(s.k, g.k, s.k_pipe, k_ring, kv_head, blocks - 1 - j)
                self.load(s.v, g.v, s.v_pipe, v_ring, kv_head, blocks - j)
            # Not earlier: fetching 1 or 3 blocks ahead gained nothing, and working the next task out before V's last
            # load lost 2 to 3 % of causal problems.
            fetched = g.schedule.fetch()
            self.load(s.v, g.v, s.v_pipe, v_ring, kv_head, Int32(0))
            number = g.schedule.following(number, fetched)
        for w in cutlass.range_constexpr(self.config.consumers):  # no more tasks
            i = self.acquire_q(s, q_ring, w)
            with cute.arch.elect_one():
                s.task[BLOCKS, i] = Int32(0)
                cute.arch.mbarrier_arrive(s.q_full[i].ptr)

    def task(self, g, number):
        """BATCH .. MASKED of task ``number``, for this block of the cluster."""
        c = self.config
        head, tile = place(number, g.tiles, g.all_heads, g.section, self.spec.causal)
        seen = key_range(Extent(g.rows_q, g.rows_k, c.tile_rows, c.kv, self.spec.causal), tile * c.tile_rows)
        if c.cluster > 1:
            tile = tile * c.cluster + tk.cluster_rank()
        return head // g.heads, head % g.heads, tile, seen.blocks, seen.masked

    def load(self, dst, src, pipe, ring, kv_head, block):
        sem = pipe.acquire(ring)
        tk.load_async(dst[ring.stage], src, (*kv_head, block, 0), sem)
        ring.advance()

    def acquire_q(self, s, ring, w):
        """Wait until consumer w has done with the Q tile at the ring's position: its index."""
        i = ring.stage * self.config.consumers + w
        tk.wait(s.q_empty[i], ring.phase ^ 1)
        return i

    def load_q(self, g, s, ring, t):
        """Each consumer's Q tile, and the task with it."""
        for w in range(self.config.consumers):
            i = self.acquire_q(s, ring, w)
            with cute.arch.elect_one():
                for f in range(FIELDS):
                    s.task[f, i] = Int32(t[f])
                cute.arch.mbarrier_arrive_and_expect_tx(s.q_full[i].ptr, self.q_tile.bytes)
            row_tile = t[TILE] * self.config.consumers + w
            tk.load_async(s.q[i], g.q, (t[BATCH], t[HEAD], row_tile, 0), s.q_full[i])
        ring.advance()

    # ---- consumer ------------------------------------------------------------------------------

    @cute.jit
    def consumer(self, g, s, wg):
        config, kv = self.config, self.config.kv
        c = State(att=tk.rt_fl(kv), att_mma=tk.rt(kv, self.q_tile.dtype), o=tk.rt_fl(self.spec.head_dim),
                  max=tk.rv(), norm=tk.rv(), correct=tk.rv(), max_scaled=tk.rv(), last_max=tk.rv(), last_norm=tk.rv(),
                  task=cute.make_rmem_tensor((FIELDS,), Int32), last=cute.make_rmem_tensor((FIELDS,), Int32),
                  k=s.k_pipe.ring(), v=s.v_pipe.ring(), q=tk.ring(config.q_stages),
                  turns=tk.Turns(config.consumers, wg, enabled=config.turns), wg=wg)
        c.turns.start()
        blocks = self.next_task(s, c)
        if const_expr(config.bridge):
            self.begin(g, s, c)
        while blocks > 0:
            if const_expr(not config.bridge):
                self.begin(g, s, c)
            tk.zero(c.o)
            self.steps(g, s, c)
            tk.arrive(s.q_empty[self.q_at(c)])
            self.turn_page(c)
            if const_expr(config.bridge):
                blocks = self.next_task(s, c)
                if blocks > 0:
                    self.bridge(g, s, c)
                else:
                    self.end(s, c)
                self.finish(g, s, c)
            else:
                self.end(s, c)
                self.finish(g, s, c)
                blocks = self.next_task(s, c)
        tk.store_wait()

    def turn_page(self, c):
        """The task at hand becomes the one to be finished."""
        for f in range(FIELDS):
            c.last[f] = c.task[f]
        c.q.advance()

    def q_at(self, c):
        return c.q.stage * self.config.consumers + c.wg

    @cute.jit
    def next_task(self, s, c):
        """Wait for the next task's Q, and the task with it. How many blocks it has: none, and all is done."""
        i = self.q_at(c)
        tk.wait(s.q_full[i], c.q.phase)
        for f in cutlass.range_constexpr(FIELDS):
            c.task[f] = cute.arch.make_warp_uniform(s.task[f, i])
        return c.task[BLOCKS]

    @cute.jit
    def begin(self, g, s, c):
        """A task's first S = Q @ K.T, and its softmax."""
        s.k_pipe.wait(c.k)
        tk.mm_ABt(c.att, s.q[self.q_at(c)], s.k[c.k.stage])
        tk.mma_wait()
        self.release(s.k_pipe, c.k)
        self.first_softmax(g, c)
        tk.copy(c.att_mma, c.att)

    @cute.jit
    def steps(self, g, s, c):
        """Each further S and softmax, over the P @ V of the block before."""
        blocks, masked = c.task[BLOCKS], Int32(1)
        if const_expr(self.spec.causal):
            masked = c.task[MASKED]
            for i in cutlass.range(1, masked, unroll=1):
                self.step(g, s, c, blocks - 1 - i, True)
        for i in cutlass.range(masked, blocks, unroll=1):
            self.step(g, s, c, blocks - 1 - i, False)

    @cute.jit
    def step(self, g, s, c, block, masked: Constexpr[bool]):
        self.issue(s, c)
        if const_expr(masked):
            self.mask(g, c, block)
        self.softmax(g, c, masked)
        tk.mma_wait(0)
        self.release(s.v_pipe, c.v)
        tk.copy(c.att_mma, c.att)
        tk.mul_row(c.o, c.o, c.correct)

    def issue(self, s, c):
        """The next S = Q @ K.T, and O += P @ V of the block before; wait for S."""
        s.k_pipe.wait(c.k)
        c.turns.take()
        tk.mm_ABt(c.att, s.q[self.q_at(c)], s.k[c.k.stage])
        s.v_pipe.wait(c.v)
        tk.mma_AB(c.o, c.att_mma, s.v[c.v.stage])
        c.turns.give()
        tk.mma_wait(1)
        self.release(s.k_pipe, c.k)

    @cute.jit
    def bridge(self, g, s, c):
        """The next task's first S and softmax, over this task's last P @ V."""
        self.issue(s, c)
        self.keep_statistics(c)
        self.first_softmax(g, c)
        tk.mma_wait(0)
        self.release(s.v_pipe, c.v)
        tk.copy(c.att_mma, c.att)

    @cute.jit
    def end(self, s, c):
        """The last P @ V."""
        s.v_pipe.wait(c.v)
        tk.mma_AB(c.o, c.att_mma, s.v[c.v.stage])
        self.keep_statistics(c)
        tk.mma_wait()
        self.release(s.v_pipe, c.v)

    def release(self, pipe, ring):
        pipe.release(ring)
        ring.advance()

    def keep_statistics(self, c):
        tk.copy(c.last_max, c.max)
        tk.copy(c.last_norm, c.norm)

    # ---- softmax -------------------------------------------------------------------------------

    def mask(self, g, c, block):
        start = block * self.config.kv
        if self.spec.causal:
            row = c.task[TILE] * self.config.rows + c.wg * 64
            tk.right_fill(c.att, row + g.rows_k - g.rows_q + 1 - start, -Float32.inf, diagonal=True)
        else:
            tk.right_fill(c.att, g.rows_k - start, -Float32.inf)

    def first_softmax(self, g, c):
        tk.zero(c.norm)
        tk.neg_infty(c.max)
        self.mask(g, c, c.task[BLOCKS] - 1)
        self.softmax(g, c, True)

    def softmax(self, g, c, masked):
        """att becomes exp2(scale * (att - max)); max and norm move on; correct is what o is owed."""
        tk.copy(c.correct, c.max)
        tk.row_max(c.max, c.att, c.max)
        if masked and self.spec.causal:  # a row may have seen no key yet
            tk.finite_or_zero(c.max_scaled, c.max)
        else:
            tk.copy(c.max_scaled, c.max)
        tk.sub(c.correct, c.correct, c.max_scaled)
        tk.mul(c.correct, c.correct, g.scale)
        tk.exp2(c.correct, c.correct)
        tk.mul(c.max_scaled, c.max_scaled, g.scale)
        tk.mul(c.att, c.att, g.scale)  # one FFMA with the next line
        tk.sub_row(c.att, c.att, c.max_scaled)
        tk.exp2(c.att, c.att)
        tk.mul(c.norm, c.norm, c.correct)
        tk.row_sum_partial(c.norm, c.att, c.norm)

    # ---- writing out ---------------------------------------------------------------------------

    @cute.jit
    def finish(self, g, s, c):
        """Divide by the norm; write O, and perhaps the log-sum-exp, of the last task."""
        t, lse = c.last, tk.rv()
        self.statistics(g, c, lse)
        tk.mul_row(c.o, c.o, c.last_norm)
        row_tile = t[TILE] * self.config.consumers + c.wg
        if const_expr(self.spec.lse):
            tk.store_rows(g.lse[t[BATCH], t[HEAD], None], lse, row_tile * 64, g.rows_q)
        barrier, panel = 8 + c.wg, self.o_tile.cols
        for p in cutlass.range_constexpr(self.config.o_panels):
            tk.store_wait()  # the store before has left the tile
            tk.sync(barrier, tk.WARPGROUP)
            tk.store(s.o[c.wg], tk.columns(c.o, p * panel, panel))
            tk.publish()
            tk.sync(barrier, tk.WARPGROUP)
            if tk.first_warp_of_group():
                tk.store_async(g.o, s.o[c.wg], (t[BATCH], t[HEAD], row_tile, p))

    @cute.jit
    def statistics(self, g, c, lse):
        """lse from max and norm; the norm becomes its reciprocal, or 0 for a row that saw no key."""
        tk.quad_sum(c.last_norm)
        for r in cutlass.range_constexpr(2):
            norm = c.last_norm.tensor[r]
            empty = norm == Float32(0.0)
            c.last_norm.tensor[r] = Float32(0.0) if empty else cute.arch.rcp_approx(norm)
            lse.tensor[r] = -Float32.inf if empty else (
                c.last_max.tensor[r] * g.scale + cute.math.log2(norm, fastmath=True)) * tk.LN2


def build(spec: AttentionSpec, config: AttentionConfig):
    """The kernel and its fake arguments: any B, Sq, Sk, H, Hk and strides that are multiples of 16 bytes."""
    B, Sq, Sk, H, Hk = (fake.sym() for _ in range(5))

    def operand(seqlen, heads):
        strides = (*(fake.sym64(divisibility=8) for _ in range(3)), 1)
        return fake.tensor(spec.dtype, (B, seqlen, heads, spec.head_dim), strides, align=16)

    lse = fake.tensor("fp32", (B, H, Sq), align=4) if spec.lse else None
    counter = fake.tensor("int32", (1,), align=4)
    return AttentionForward(spec, config), (
        operand(Sq, H), operand(Sk, Hk), operand(Sk, Hk), operand(Sq, H), lse, counter, Float32(1.0), Int32(1))
