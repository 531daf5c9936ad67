"""The producer warp and a consumer warpgroup: ``flash_attn``'s, with a list of key tiles in the place of a range."""
import cutlass
import cutlass.cute as cute
from cutlass import Constexpr, Int32, Int64, Uint32, const_expr

import tkq.tile as tk
from tkq.attention.common.mask import KeyBlockRange
from tkq.attention.flex.softmax import FlexSoftmax
from tkq.attention.forward.consumer import Consumer
from tkq.attention.forward.producer import Producer
from tkq.tile.assembly import opaque_sum


class FlexProducer:
    def __init__(self, spec, config):
        self.spec, self.config, self.base = spec, config, Producer(spec.attention, config)

    @cute.jit
    def run(self, g, smem):
        tk.prefetch(g.q, g.k, g.v, g.o)
        k_ring, v_ring, q_ring = smem.k_pipe.ring(), smem.v_pipe.ring(), tk.ring(self.config.q_stages)
        tasks, schedule = g.tasks.begin(g.schedule)
        number = schedule.first()
        while number < schedule.tasks:
            t = tasks.find(number)
            of, kv_head = (t.batch, t.head, t.tile), t.head // g.tasks.heads_per_kv
            counts = g.keys.counts(*of)
            blocks, masked = cutlass.max(counts.all, 1), counts.masked
            if counts.all == 0:  # one tile, of which no key is seen
                masked = Int32(-1)
            tile = g.keys.at(*of, Int32(0), masked)
            self.base.load(smem.k, g.k, smem.k_pipe, k_ring, (t.batch, kv_head), tile)
            self.base.load_q(g, smem, q_ring, t, KeyBlockRange(0, blocks, masked, 0))
            for j in cutlass.range(1, blocks, unroll=1):
                before, tile = tile, g.keys.at(*of, j, masked)
                self.base.load(smem.k, g.k, smem.k_pipe, k_ring, (t.batch, kv_head), tile)
                self.base.load(smem.v, g.v, smem.v_pipe, v_ring, (t.batch, kv_head), before)
            fetched = schedule.fetch()
            self.base.load(smem.v, g.v, smem.v_pipe, v_ring, (t.batch, kv_head), tile)
            number = schedule.following(number, fetched)
        self.base.close(smem, q_ring)


class FlexConsumer:
    def __init__(self, spec, config):
        self.spec, self.config, self.base = spec, config, Consumer(spec.attention, config)
        self.softmax = FlexSoftmax(spec, config)

    @cute.jit
    def run(self, g, smem, wg):
        regs = self.base.state(smem, wg)
        seen, starts = cute.make_rmem_tensor((2,), Uint32), cute.make_rmem_tensor((2,), Int64)
        regs.ping_pong.start()
        blocks = self.base.next_task(smem, regs)
        while blocks > 0:
            self.begin(g, smem, regs, seen)
            tk.zero(regs.o)
            for n, start in enumerate(g.keys.starts(*(regs.task[name] for name in ("batch", "head", "tile")))):
                starts[n] = opaque_sum(start, Int64(0))  # kept, not made again for each tile
            self.steps(g, smem, regs, (seen, starts))
            tk.arrive(smem.q_empty[self.base.q_at(regs)])
            self.base.swap_task(regs)
            self.base.end(smem, regs)
            self.finish(g, smem, regs)
            blocks = self.base.next_task(smem, regs)
        tk.store_wait()

    def tile(self, g, regs, i):
        t = regs.task
        return g.keys.at(t["batch"], t["head"], t["tile"], i, t["n_masked_right"])

    @cute.jit
    def begin(self, g, smem, regs, seen):
        """A task's first S = Q @ K.T, and its softmax."""
        tile = self.tile(g, regs, Int32(0))
        smem.k_pipe.wait(regs.k)
        tk.mm_ABt(regs.s, smem.q[self.base.q_at(regs)], smem.k[regs.k.stage])
        tile = cute.arch.make_warp_uniform(tile)
        self.softmax.look_if(g, regs, tile, seen)
        tk.mma_wait()
        self.base.release(smem.k_pipe, regs.k)
        self.softmax.first(g, regs, tile, seen)
        tk.copy(regs.p, regs.s)

    @cute.jit
    def steps(self, g, smem, regs, seen):
        """Each further S and softmax, over the P @ V of the tile before: tiles with the mask, then those without.
        seen: with where the task's lists begin."""
        blocks, whole = regs.task["blocks"], Int32(1)
        if const_expr(self.spec.mask is not None):
            masked = regs.task["n_masked_right"]
            for i in cutlass.range(1, masked, unroll=1):
                self.step(g, smem, regs, i, seen, True)
            whole = cutlass.max(masked, 1)
        if const_expr(self.spec.mask is None or self.spec.full):
            for i in cutlass.range(whole, blocks, unroll=1):
                self.step(g, smem, regs, i, seen, False)

    @cute.jit
    def step(self, g, smem, regs, i, seen, masked: Constexpr[bool]):
        """The i-th tile of the visit."""
        seen, starts = seen
        if const_expr(self.spec.mask is None):  # of either list
            tile = self.tile(g, regs, i)
        else:
            tile = g.keys.from_start(starts, i, regs.task["n_masked_right"], masked)
        self.issue(smem, regs)
        tile = cute.arch.make_warp_uniform(tile)
        if const_expr(masked):
            self.softmax.look(g, regs, tile, seen)
        tk.mma_wait(1)
        self.base.release(smem.k_pipe, regs.k)
        moved = self.softmax.step(g, regs, tile, seen, masked)
        tk.mma_wait(0)
        self.base.release(smem.v_pipe, regs.v)
        tk.copy(regs.p, regs.s)
        self.base.correct_if(regs, moved)

    def issue(self, smem, regs):
        """The next S = Q @ K.T, and O += P @ V of the tile before."""
        smem.k_pipe.wait(regs.k)
        regs.ping_pong.take()
        tk.mm_ABt(regs.s, smem.q[self.base.q_at(regs)], smem.k[regs.k.stage])
        smem.v_pipe.wait(regs.v)
        tk.mma_AB(regs.o, regs.p, smem.v[regs.v.stage])
        regs.ping_pong.give()

    @cute.jit
    def finish(self, g, smem, regs):
        """Divide by the norm; write O, and perhaps the log-sum-exp, of the last task."""
        t, lse = regs.last, tk.rv()
        row_tile = t["tile"] * self.config.consumers + regs.wg
        self.softmax.statistics(g, regs, lse)
        if const_expr(self.spec.lse):
            self.base.store_lse(g, t, lse, row_tile * 64)
        self.base.store_o_async(g, smem, regs, row_tile)
