"""The producer warp and a consumer warpgroup: ``flash_attn``'s, with a list of key tiles in the place of a range."""
import cutlass
import cutlass.cute as cute
from cutlass import Constexpr, Int32, Uint32, const_expr

import tkq.tile as tk
from tkq.attention.common.mask import KeyBlockRange
from tkq.attention.flex.scheduler import AHEAD, FlexTask
from tkq.attention.flex.softmax import FlexSoftmax
from tkq.attention.flex.state import Counts
from tkq.attention.forward.consumer import Consumer
from tkq.attention.forward.producer import Producer
from tkq.attention.forward.tile_scheduler import Task


class FlexProducer:
    """Each tile of K takes along which one it is: consumers do not look it up in lists again."""

    def __init__(self, spec, config):
        self.config, self.base = config, Producer(spec.attention, config)

    @cute.jit
    def run(self, g, smem, numbers, mail):
        """mail: of ``FlexSchedulerWarp``."""
        tk.prefetch(g.q, g.k, g.v, *[g.o] * (not self.config.o_from_registers))
        k_ring, v_ring, q_ring = smem.k_pipe.ring(), smem.v_pipe.ring(), tk.ring(self.config.q_stages)
        mail_ring = mail.ring()
        t = FlexTask(*mail.read(mail_ring))
        while t.blocks > 0:
            of, counts = (t.batch, t.head, t.tile), Counts(cutlass.max(t.masked, 0), t.blocks)
            tile = t.first
            self.load_k(g, smem, numbers, k_ring, (t.batch, t.kv_head, tile))
            self.base.load_q(g, smem, q_ring, Task(t.batch, t.batch, t.head, t.tile, g.tasks.rows_q, g.tasks.rows_k),
                             KeyBlockRange(0, t.blocks, t.masked, 0))
            following = g.keys.at(*of, Int32(1), counts)
            if t.blocks <= AHEAD:
                mail.release(mail_ring)
            for j in cutlass.range(1, t.blocks, unroll=1):
                if j == t.blocks - AHEAD:
                    mail.release(mail_ring)
                before, tile = tile, following
                following = g.keys.at(*of, j + 1, counts)  # under the waits for room
                self.load_k(g, smem, numbers, k_ring, (t.batch, t.kv_head, tile))
                self.base.load(smem.v, g.v, smem.v_pipe, v_ring, (t.batch, t.kv_head), before)
            self.base.load(smem.v, g.v, smem.v_pipe, v_ring, (t.batch, t.kv_head), tile)
            mail_ring.advance()
            t = FlexTask(*mail.read(mail_ring))
        self.base.close(smem, q_ring)

    def load_k(self, g, smem, numbers, ring, at):
        """A tile of K, and its number. at: (batch, head, number)."""
        pipe, stage = smem.k_pipe, ring.stage
        pipe.acquire_empty(ring)
        with cute.arch.elect_one():
            numbers[0, stage] = Int32(at[2])
            cute.arch.mbarrier_arrive_and_expect_tx(pipe.full[stage].ptr, pipe.bytes)
        tk.load_async(smem.k[stage], g.k, (*at, 0), pipe.full[stage])
        ring.advance()


class FlexConsumer:
    def __init__(self, spec, config):
        self.spec, self.config, self.base = spec, config, Consumer(spec.attention, config)
        self.softmax = FlexSoftmax(spec, config)

    @cute.jit
    def run(self, g, smem, numbers, wg):
        """numbers: (1, stages), of the tiles of K."""
        regs, seen = self.base.state(smem, wg), cute.make_rmem_tensor((2,), Uint32)
        regs.ping_pong.start()
        blocks = self.base.next_task(smem, regs)
        while blocks > 0:
            known = self.softmax.of_task(g, regs)
            self.begin(g, smem, numbers, regs, seen, known)
            tk.zero(regs.o)
            self.steps(g, smem, numbers, regs, seen, known)
            tk.arrive(smem.q_empty[self.base.q_at(regs)])
            self.base.swap_task(regs)
            self.base.end(smem, regs)
            self.finish(g, smem, regs)
            blocks = self.base.next_task(smem, regs)
        tk.store_wait()

    @cute.jit
    def begin(self, g, smem, numbers, regs, seen, known: Constexpr):
        """A task's first S = Q @ K.T, and its softmax. known: of ``of_task``."""
        smem.k_pipe.wait(regs.k)
        tk.mm_ABt(regs.s, smem.q[self.base.q_at(regs)], smem.k[regs.k.stage])
        tile = cute.arch.make_warp_uniform(numbers[0, regs.k.stage])
        self.softmax.look_if(g, regs, tile, seen, known)
        graph = self.softmax.ready(regs, tile, known)
        tk.mma_wait()
        self.base.release(smem.k_pipe, regs.k)
        self.softmax.first(g, regs, tile, seen, graph)
        tk.copy(regs.p, regs.s)

    @cute.jit
    def steps(self, g, smem, numbers, regs, seen, known: Constexpr):
        """Each further S and softmax, over the P @ V of the tile before: tiles with the mask, then those without."""
        blocks, whole = regs.task["blocks"], Int32(1)
        if const_expr(self.spec.mask is not None):
            masked = regs.task["n_masked_right"]
            for _ in cutlass.range(1, masked, unroll=1):
                self.step(g, smem, numbers, regs, seen, known, True)
            whole = cutlass.max(masked, 1)
        if const_expr(self.spec.mask is None or self.spec.full):
            for _ in cutlass.range(whole, blocks, unroll=1):
                self.step(g, smem, numbers, regs, seen, known, False)

    @cute.jit
    def step(self, g, smem, numbers, regs, seen, known: Constexpr, masked: Constexpr[bool]):
        """The next tile of the visit."""
        tile = self.issue(smem, numbers, regs)
        if const_expr(masked or self.spec.score is not None):
            tile = cute.arch.make_warp_uniform(tile)
        if const_expr(masked):
            self.softmax.look(g, regs, tile, seen, known)
        graph = self.softmax.ready(regs, tile, known)
        tk.mma_wait(1)
        if const_expr(not masked):
            self.softmax.end_of_full(g, regs, numbers)
        self.base.release(smem.k_pipe, regs.k)
        moved = self.softmax.step(g, regs, tile, (seen, graph), masked)
        tk.mma_wait(0)
        self.base.release(smem.v_pipe, regs.v)
        tk.copy(regs.p, regs.s)
        self.base.correct_if(regs, moved)

    def issue(self, smem, numbers, regs):
        """The next S = Q @ K.T, and O += P @ V of the tile before. The number of the next tile."""
        smem.k_pipe.wait(regs.k)
        regs.ping_pong.take()
        tk.mm_ABt(regs.s, smem.q[self.base.q_at(regs)], smem.k[regs.k.stage])
        tile = numbers[0, regs.k.stage]
        smem.v_pipe.wait(regs.v)
        tk.mma_AB(regs.o, regs.p, smem.v[regs.v.stage])
        regs.ping_pong.give()
        return tile

    @cute.jit
    def finish(self, g, smem, regs):
        """Divide by the norm; write O, and perhaps the log-sum-exp, of the last task."""
        t, lse = regs.last, tk.rv()
        row_tile = t["tile"] * self.config.consumers + regs.wg
        self.softmax.statistics(g, regs, lse)
        if const_expr(self.spec.lse):
            self.base.store_lse(g, t, lse, row_tile * 64)
        if const_expr(self.config.o_from_registers):
            self.base.store_o(g, regs, row_tile * 64)
        else:
            self.base.store_o_async(g, smem, regs, row_tile)
