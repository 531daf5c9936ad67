"""Flash attention forward (Dao et al., 2022; the pipelining of Shah et al., 2024) on the tile layer."""
from typing import Optional

import cuda.bindings.driver as cuda
import cutlass
import cutlass.cute as cute
from cutlass import Constexpr, Float32, Int32, const_expr

import tkq.tile as tk
from tkq.attention.plan import AttentionConfig
from tkq.attention.ranges import Extent, ceil_div, heads_in_section, key_range
from tkq.attention.softmax import LEFT, RIGHT, Softmax
from tkq.attention.spec import AttentionSpec
from tkq.attention.state import Fields, Globals, Shared, State, field_names
from tkq.attention.tasks import Dense, Task, Varlen
from tkq.runtime import fake


class AttentionForward:
    """o = softmax(scale * q @ k.T) @ v, and the log-sum-exp of each row where it is asked for.

    A task is 64 rows of Q for each consumer warpgroup of a block; its K and V pass by in blocks, the last ones (those
    with a mask on the right) first.

      producer (warp 0)     K(n-1) | task and Q | K(n-2) V(n-1) | K(n-3) V(n-2) | .. | next task | V(0)
      consumer warpgroups   S = Q K(n-1)' softmax | S' = Q K(i-1)' and O += P V(i), softmax of S' under P V | ..
                            .. | next task's first S and softmax under this one's last P V (``bridge``) | write O

      pipe      stages    full (arrivals)                  empty (arrivals)
      K, V      stages    producer's bytes (1)             every warp of every consumer (4 x consumers x cluster)
      Q, task   q_stages  producer's bytes (1), for each   the consumer's own warps (4), after its last S; or after O has
                          consumer by itself               left, where O goes out through Q's tile (``o_over_q``)

    Consumers take turns to issue their products (``turns``), so that one's softmax runs under another's. The producer
    alone knows the schedule: what a task is travels beside its Q tile, under the same semaphore, and a task of no
    blocks says that all is done. Cluster of 2: two blocks, one above the other, share each K and V tile.

    ``pack`` query heads of one K/V head share a tile: its row r is query r // pack of head r % pack.
    """

    def __init__(self, spec: AttentionSpec, config: AttentionConfig):
        self.spec, self.config, self.softmax = spec, config, Softmax(spec, config)
        dtype = tk.element_type(spec.dtype)
        self.q_tile = tk.st(64, spec.head_dim, dtype)
        self.k_tile = tk.st(config.kv, spec.head_dim, dtype)
        self.v_tile = tk.st(config.kv, spec.head_dim_v, dtype)
        self.o_tile = tk.st(64, spec.head_dim_v // config.o_panels, dtype)
        self.fields = field_names(spec)

    # ---- host ----------------------------------------------------------------------------------

    @cute.jit
    def __call__(self, q: cute.Tensor, k: cute.Tensor, v: cute.Tensor, o: cute.Tensor, lse: Optional[cute.Tensor],
                 sinks: Optional[cute.Tensor], cu_q: Optional[cute.Tensor], cu_k: Optional[cute.Tensor],
                 used_q: Optional[cute.Tensor], used_k: Optional[cute.Tensor], counter: cute.Tensor, scale: Float32,
                 softcap: Float32, left: Int32, right: Int32, processors: Int32, stream: cuda.CUstream):
        """q, o (B, Sq, H, D), k, v (B, Sk, Hk, D), lse (B, H, Sq) fp32 or None, sinks (H,) or None; varlen: q, o (total,
        H, D), k, v (total, Hk, D), lse (H, total), cu_q, cu_k (B + 1,) int32, used_q, used_k (B,) int32 or None.

        counter (1,) int32 that is 0. softcap, left, right: ignored where the spec has none."""
        spec, c = self.spec, self.config
        # (batch, row, head, col) to (row, col, head, batch)
        order = [0, 2, 1] if const_expr(spec.varlen) else [1, 3, 2, 0]
        q, k, v, o = [cute.make_tensor(x.iterator, cute.select(x.layout, order)) for x in (q, k, v, o)]
        tasks, number = self.tasks(q, k, cu_q, cu_k, used_q, used_k)
        capped = const_expr(spec.softcap)
        g = Globals(
            q=tk.gl.load(self.view(q, spec.pack), self.q_tile),
            k=tk.gl.load(self.view(k), self.k_tile, c.cluster), v=tk.gl.load(self.view(v), self.v_tile, c.cluster),
            o=tk.gl.store(self.view(o, spec.pack), self.o_tile),
            lse=self.packed_lse(lse) if const_expr(lse is not None) else None, sinks=sinks, tasks=tasks,
            schedule=tk.Schedule(number, c.schedule, c.cluster, counter),
            left=left if const_expr(spec.left) else None, right=right if const_expr(spec.right) else None,
            scale=(softcap if capped else scale) * tk.LOG2E, cap=scale / softcap if capped else None)
        blocks = tk.blocks_for(c.schedule, number, processors, c.cluster)
        self.kernel(g).launch(grid=[blocks, 1, 1], block=[tk.WARPGROUP * (c.consumers + 1), 1, 1],
                              cluster=[c.cluster, 1, 1] if const_expr(c.cluster > 1) else None, stream=stream,
                              min_blocks_per_mp=1)

    def view(self, x, pack=1):
        """x as TMA is to see it."""
        return tk.packed(tk.ragged(x) if self.spec.varlen else x, pack)

    def packed_lse(self, lse):
        """lse ([batch,] head, row) with ``pack`` heads' rows between each other, as a tile has them."""
        pack = self.spec.pack
        if pack == 1:
            return lse
        *batch, heads, rows = lse.shape
        *outer, head, row = lse.stride
        return cute.make_tensor(lse.iterator, cute.make_layout(
            (*batch, heads // pack, (pack, rows)), stride=(*outer, head * pack, (head, row))))

    def tasks(self, q, k, cu_q, cu_k, used_q, used_k):
        """(what knows the tasks, how many there are; of sequences of any length, how many there may be)"""
        spec, c = self.spec, self.config
        heads, heads_per_kv = q.shape[2] // spec.pack, q.shape[2] // k.shape[2] // spec.pack
        queries = c.tile_rows // spec.pack
        key_bytes = (spec.head_dim + spec.head_dim_v) * self.k_tile.dtype.width // 8
        if spec.varlen:
            tiles = ceil_div(q.shape[0], queries) + cu_q.shape[0]
            return Varlen(cu_q, cu_k, used_q, used_k, q.shape[0], k.shape[0], heads, heads_per_kv, queries, c.kv,
                          key_bytes, c.section_mb << 20, spec.longest_first), tiles * heads
        tiles, all_heads = ceil_div(q.shape[0], queries), heads * q.shape[3]
        section = heads_in_section(cutlass.min(k.shape[0], Int32(1 << 20)) * key_bytes, c.section_mb << 20,
                                   heads_per_kv, all_heads)
        return Dense(q.shape[0], k.shape[0], heads, heads_per_kv, tiles, all_heads, section,
                     spec.longest_first), tiles * all_heads

    # ---- device --------------------------------------------------------------------------------

    @cute.kernel
    def kernel(self, g: Globals):
        c = self.config
        al = tk.SharedAllocator()
        tiles = c.consumers * c.q_stages
        q = al.tile(self.q_tile, tiles)
        s = Shared(
            q=q, o=q if c.o_over_q else al.tile(self.o_tile, c.consumers),
            k=al.tile(self.k_tile, c.stages), v=al.tile(self.v_tile, c.stages),
            task=al.vector(len(self.fields), tiles, Int32), q_full=al.semaphores(tiles), q_empty=al.semaphores(tiles),
            k_pipe=al.pipe(c.stages, self.k_tile.bytes, 4 * c.consumers, c.cluster),
            v_pipe=al.pipe(c.stages, self.v_tile.bytes, 4 * c.consumers, c.cluster))

        def initialise():
            s.k_pipe.init()
            s.v_pipe.init()
            for i in cutlass.range_constexpr(tiles):
                tk.init(s.q_full[i], 1)
                tk.init(s.q_empty[i], 4)

        tk.init_block(initialise, c.cluster)
        tk.specialise(lambda: self.producer(g, s), lambda wg: self.consumer(g, s, wg), c.consumers, c.registers)
        if const_expr(c.cluster > 1):
            tk.cluster_sync()  # nobody leaves while another may still write to it

    # ---- producer ------------------------------------------------------------------------------

    @cute.jit
    def producer(self, g, s):
        tk.prefetch(g.q, g.k, g.v, g.o)
        k_ring, v_ring, q_ring = s.k_pipe.ring(), s.v_pipe.ring(), tk.ring(self.config.q_stages)
        tasks, schedule = g.tasks.begin(g.schedule)
        number = schedule.first()
        while number < schedule.tasks:
            t = tasks.find(number)
            seen = self.seen(g, t)
            k, v, last = self.part(g.k, t.rows_k), self.part(g.v, t.rows_k), seen.first + seen.blocks - 1
            kv_head = (t.batch_k, t.head // g.tasks.heads_per_kv)
            self.load(s.k, k, s.k_pipe, k_ring, kv_head, last)
            self.load_q(g, s, q_ring, t, seen)
            for j in cutlass.range(1, seen.blocks, unroll=1):
                self.load(s.k, k, s.k_pipe, k_ring, kv_head, last - j)
                self.load(s.v, v, s.v_pipe, v_ring, kv_head, last + 1 - j)
            # Not earlier: fetching 1 or 3 blocks ahead gained nothing, and working the next task out before V's last
            # load lost 2 to 3 % of causal problems.
            fetched = schedule.fetch()
            self.load(s.v, v, s.v_pipe, v_ring, kv_head, seen.first)
            number = schedule.following(number, fetched)
        for w in cutlass.range_constexpr(self.config.consumers):  # no more tasks
            i = self.acquire_q(s, q_ring, w)
            with cute.arch.elect_one():
                s.task[self.fields.index("blocks"), i] = Int32(0)
                cute.arch.mbarrier_arrive(s.q_full[i].ptr)

    def seen(self, g, t: Task):
        """The key blocks of a task, the same for all blocks of a cluster."""
        queries = self.config.tile_rows // self.spec.pack
        extent = Extent(t.rows_q, t.rows_k, queries, self.config.kv, g.left, 0 if self.spec.causal else g.right)
        return key_range(extent, t.tile * queries)

    def part(self, x, rows):
        """x, where sequences lie one behind the other: the rows of one of them."""
        return x.part(rows) if self.spec.varlen else x

    def load(self, dst, src, pipe, ring, kv_head, block):
        sem = pipe.acquire(ring)
        tk.load_async(dst[ring.stage], src, (*kv_head, block, 0), sem)
        ring.advance()

    def acquire_q(self, s, ring, w):
        """Wait until consumer w has done with the Q tile at the ring's position: its index."""
        i = ring.stage * self.config.consumers + w
        tk.wait(s.q_empty[i], ring.phase ^ 1)
        return i

    def load_q(self, g, s, ring, t, seen):
        """Each consumer's Q tile, and the task with it."""
        tile = t.tile
        if self.config.cluster > 1:
            tile = tile * self.config.cluster + tk.cluster_rank()
        known = {**t._asdict(), "tile": tile, **vars(seen)}
        q = self.part(g.q, t.rows_q)
        for w in range(self.config.consumers):
            i = self.acquire_q(s, ring, w)
            with cute.arch.elect_one():
                for f, name in enumerate(self.fields):
                    s.task[f, i] = Int32(known[name])
                cute.arch.mbarrier_arrive_and_expect_tx(s.q_full[i].ptr, self.q_tile.bytes)
            tk.load_async(s.q[i], q, (t.batch, t.head, tile * self.config.consumers + w, 0), s.q_full[i])
        ring.advance()

    # ---- consumer ------------------------------------------------------------------------------

    @cute.jit
    def consumer(self, g, s, wg):
        config, kv = self.config, self.config.kv
        c = State(att=tk.rt_fl(kv), att_mma=tk.rt(kv, self.q_tile.dtype), o=tk.rt_fl(self.spec.head_dim_v),
                  max=tk.rv(), norm=tk.rv(), correct=tk.rv(), max_scaled=tk.rv(), last_max=tk.rv(), last_norm=tk.rv(),
                  task=Fields.new(self.fields), last=Fields.new(self.fields),
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
            if const_expr(not config.o_over_q):
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
        for f in range(len(self.fields)):
            c.last.values[f] = c.task.values[f]
        c.q.advance()

    def q_at(self, c):
        return c.q.stage * self.config.consumers + c.wg

    @cute.jit
    def next_task(self, s, c):
        """Wait for the next task's Q, and the task with it. How many blocks it has: none, and all is done."""
        i = self.q_at(c)
        tk.wait(s.q_full[i], c.q.phase)
        for f in cutlass.range_constexpr(len(self.fields)):
            c.task.values[f] = cute.arch.make_warp_uniform(s.task[f, i])
        return c.task["blocks"]

    @cute.jit
    def begin(self, g, s, c):
        """A task's first S = Q @ K.T, and its softmax."""
        s.k_pipe.wait(c.k)
        tk.mm_ABt(c.att, s.q[self.q_at(c)], s.k[c.k.stage])
        tk.mma_wait()
        self.release(s.k_pipe, c.k)
        self.softmax.first(g, c)
        tk.copy(c.att_mma, c.att)

    @cute.jit
    def steps(self, g, s, c):
        """Each further S and softmax, over the P @ V of the block before."""
        blocks, masked = c.task["blocks"], Int32(1)
        if const_expr(self.spec.causal or self.spec.right):
            masked = c.task["masked"]
            for i in cutlass.range(1, masked, unroll=1):
                self.step(g, s, c, i, RIGHT | LEFT)
        whole = blocks - c.task["masked_left"] if const_expr(self.spec.left) else blocks
        for i in cutlass.range(masked, whole, unroll=1):
            self.step(g, s, c, i, 0)
        if const_expr(self.spec.left):
            for i in cutlass.range(whole, blocks, unroll=1):
                self.step(g, s, c, i, LEFT)

    @cute.jit
    def step(self, g, s, c, i, sides: Constexpr[int]):
        """The i-th block of the visit."""
        self.issue(s, c)
        self.softmax.step(g, c, i, sides)
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
        self.softmax.first(g, c)
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

    # ---- writing out ---------------------------------------------------------------------------

    @cute.jit
    def finish(self, g, s, c):
        """Divide by the norm; write O, and perhaps the log-sum-exp, of the last task."""
        t, lse = c.last, tk.rv()
        row_tile = t["tile"] * self.config.consumers + c.wg
        self.softmax.statistics(g, c, lse)
        tk.mul_row(c.o, c.o, c.last_norm)
        if const_expr(self.spec.lse):
            self.store_lse(g, t, lse, row_tile * 64)
        o = self.part(g.o, g.tasks.lengths(t)[0])
        barrier, panel = 8 + c.wg, self.o_tile.cols
        for p in cutlass.range_constexpr(self.config.o_panels):
            tk.store_wait()  # the store before has left the tile
            tk.sync(barrier, tk.WARPGROUP)
            tk.store(s.o[c.wg], tk.columns(c.o, p * panel, panel))
            tk.publish()
            tk.sync(barrier, tk.WARPGROUP)
            if tk.first_warp_of_group():
                tk.store_async(o, s.o[c.wg], (t["batch"], t["head"], row_tile, p))
        if const_expr(self.config.o_over_q):
            tk.store_wait()
            tk.arrive(s.q_empty[c.wg])

    def store_lse(self, g, t, lse, row):
        """row: of the sequence's, the tile's first."""
        pack, rows = self.spec.pack, g.tasks.lengths(t)[0]
        if self.spec.varlen:
            first = (t["batch"] - rows) * pack
            tk.store_rows(g.lse[t["head"], None], lse, first + row, first + rows * pack)
        else:
            tk.store_rows(g.lse[t["batch"], t["head"], None], lse, row, rows * pack)


def build(spec: AttentionSpec, config: AttentionConfig):
    """The kernel and its fake arguments: any B, Sq, Sk, H, Hk, any head dims that its tiles hold, and strides that are
    multiples of 16 bytes."""
    if spec != spec.kernel():
        raise ValueError(f"attention's build: {spec} is not a kernel's; that is {spec.kernel()}")
    B, Sq, Sk, H, Hk = (fake.sym() for _ in range(5))
    D, Dv = (fake.sym(divisibility=8) for _ in range(2))

    def operand(seqlen, heads, cols):
        shape = (seqlen, heads, cols) if spec.varlen else (B, seqlen, heads, cols)
        strides = (*(fake.sym64(divisibility=8) for _ in shape[1:]), 1)
        return fake.tensor(spec.dtype, shape, strides, align=16)

    def ints(n, there):
        return fake.tensor("int32", (n,), align=4) if there else None

    Bp = fake.sym()
    lse = fake.tensor("fp32", (H, Sq) if spec.varlen else (B, H, Sq), align=4) if spec.lse else None
    sinks = fake.tensor(spec.sinks, (H,), align=2) if spec.sinks else None
    return AttentionForward(spec, config), (
        operand(Sq, H, D), operand(Sk, Hk, D), operand(Sk, Hk, Dv), operand(Sq, H, Dv), lse, sinks,
        ints(Bp, spec.varlen), ints(Bp, spec.varlen), ints(B, spec.used_q), ints(B, spec.used_k), ints(1, True),
        Float32(1.0), Float32(1.0), Int32(0), Int32(0), Int32(1))
