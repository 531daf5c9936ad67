"""dK and dV of heads so wide that a warpgroup has no room for both: one for each, and P goes between them."""
import cutlass.cute as cute
from cutlass import Constexpr, Float16, Float32, Int32, const_expr

import tkq.tile as tk
from tkq.attention.backward.config import BackwardConfig
from tkq.attention.backward.dkv_output import DkvOutput, acquire_after
from tkq.attention.backward.ds import stats_of
from tkq.attention.backward.math import gradients, probabilities, probabilities_fp32
from tkq.attention.backward.spec import BackwardSpec
from tkq.attention.backward.state import DkState, DvState, Tiles
from tkq.attention.common.sequences import piece
from tkq.tile import WARPGROUP

DV_BARRIER, DK_BARRIER = 1, 2
P_BITS = 12  # P <= 1 in fp16 times 2 ** 12: room above for what rounding of large scores makes more of it


class DkvHdim256:
    """In ``BackwardKernel`` above head_dim 128, with 64 keys to a block and a warpgroup for each accumulated product:

      producer (warp 0)    K V, then Q dO of one tile after the other
      dV warpgroup         S' = K Q' | P (with a softcap its slope) to shared memory | dV += P' dO | next .. | write dV
      dK warpgroup         dP' = V dO' | dS to shared memory | dK += dS' Q | next .. | write dK
      dQ warpgroup         dQ = dS K, in parts | added to the accumulator in global memory | next ..

      pipe      stages     full (arrivals)              empty (arrivals)
      Q, stats  stages     producer's bytes (1)         dV and dK warps (8)
      dO        stages     producer's bytes (1)         dV and dK warps (8)
      P         p_stages   dV warps (4)                 dK warps (4)
      dS        ds_stages  dK warps (4)                 dQ warps (4)

    K, V and, of persistent blocks, tasks are as ``BackwardKernel`` has them.

    P goes from a thread to the one with the same place in the other warpgroup: 16 bytes of each side by side. For bf16
    it goes in fp16, times 2 ** P_BITS, so that dS is made of a P with an eighth of bf16's error in as many bytes; dV is
    of the same multiple, until it is written. With a softcap its slope goes, rounded."""

    kv_releases = 4, 4  # the dV warpgroup reads K, the dK warpgroup V

    def __init__(self, spec: BackwardSpec, config: BackwardConfig, tiles: Tiles, scheduler):
        self.spec, self.config, self.tiles, self.scheduler = spec, config, tiles, scheduler
        self.fp16_p = spec.dtype == "bf16" and not spec.softcap
        self.output = DkvOutput(spec, config, tiles, scheduler)

    def roles(self, g, s, registers):
        """A tuple of ``tk.Role``."""
        dv, dk = registers
        return tk.Role(lambda _: self.dv_warpgroup(g, s), dv), tk.Role(lambda _: self.dk_warpgroup(g, s), dk)

    def p_ring(self, al):
        """(4, thread, quads, stages) of 4 bytes each."""
        shape = 4, WARPGROUP, self.quads(), self.config.p_stages
        return al.allocate_tensor(Int32, cute.make_layout(shape), 128)

    def quads(self):
        """16 bytes each: what a thread hands over of a tile."""
        return self.config.tile * self.config.p_bytes // 32

    def accumulators(self):
        """dK or dV of 64 keys, in tiles of the most columns that one product may have here."""
        return tuple(tk.rt_fl(self.tiles.out.cols) for _ in range(self.spec.width // self.tiles.out.cols))

    def accumulate(self, accumulators, a, b):
        """accumulators += a @ b"""
        for i, x in enumerate(accumulators):
            tk.mma_AB(x, a, b, b_part=i)

    def send_accumulators(self, g, dst, ring, accumulators, t, barrier):
        """Write dK or dV: from registers, or through a ring of shared memory that is no longer read."""
        if self.config.store_from_registers:
            for i, x in enumerate(accumulators):
                self.output.write(g, dst, x, t, t.block, i)
        else:
            tiles = ring.scratch(self.tiles.out)
            for i, x in enumerate(accumulators):
                self.output.send(piece(g.layout, dst, t.rows_k), tiles[i], x, (t.batch_k, t.head, t.block, i), barrier)

    # ---- the dV warpgroup ------------------------------------------------------------------------

    @cute.jit
    def dv_warpgroup(self, g, s):
        tile, kv = self.config.tile, tk.ring(1)
        p = tk.rt(tile, self.tiles.q.dtype)
        slope = (tk.rt_hf(tile) if const_expr(self.fp16_p) else
                 tk.rt(tile, self.tiles.q.dtype) if const_expr(self.spec.softcap) else p)
        c = DvState(s=tk.rt_fl(tile), p=p, slope=slope, dv=self.accumulators(), ring=s.q_pipe.ring(),
                    p_ring=s.p_pipe.ring())
        self.scheduler.each_task(g, s, lambda t, reload_task: self.dv_task(g, s, t, reload_task, c, kv))

    @cute.jit
    def dv_task(self, g, s, t, reload_task: Constexpr, c, kv):
        for x in c.dv:
            tk.zero(x)
        tk.wait(s.kv_full[0], kv.phase)
        self.visit_dv(g, s, t, c)
        self.scheduler.release_kv(s, 0)
        t = reload_task()
        if const_expr(not self.config.store_from_registers):
            tk.wait(s.kv_full[1], kv.phase)  # where no query sees a key, V may still be on its way
            acquire_after(s.p_pipe, c.p_ring)  # V has been read for the last time, and then P
        self.scheduler.next_kv(kv)
        if const_expr(self.fp16_p):
            for x in c.dv:
                tk.mul(x, x, 2.0**-P_BITS)
        self.send_accumulators(g, g.dv, s.v, c.dv, t, DV_BARRIER)
        tk.store_wait()

    def visit_dv(self, g, s, t, c):
        """The task's tiles of queries."""
        self.scheduler.visit(g, s, t, c, self.dv_step)

    @cute.jit
    def dv_step(self, g, s, t, c, m, masked: Constexpr[bool]):
        do, c = s.do[c.ring.stage], self.of_step(c)
        s.q_pipe.wait(c.ring)
        tk.mm_ABt(c.s, s.k[0], s.q[c.ring.stage])
        seen = self.look(g, t, m) if masked else None
        tk.mma_wait(0)
        self.make_p(g, s, t, c, m, seen)
        s.do_pipe.wait(c.ring)
        self.accumulate(c.dv, c.p, do)
        s.q_pipe.release(c.ring)
        self.give_p(s, c)
        tk.mma_wait(0)
        s.do_pipe.release(c.ring)
        c.ring.advance()

    def of_step(self, c):
        """With the tiles of a step: those that the loop carries."""
        return c

    def look(self, g, t, m):
        """What is asked about a tile's mask while S is made: that it has one."""
        return True

    def make_p(self, g, s, t, c, m, seen):
        """P, and what goes to the other warpgroup. seen: of ``look``, where the tile is masked."""
        limits = self.scheduler.limits(g, t, m, 0) if seen else ()
        lse = stats_of(s, c.ring, 0, self.config.tile)
        if self.fp16_p:
            for i in range(cute.size(lse.tensor)):
                lse.tensor[i] = lse.tensor[i] + Float32(P_BITS)
            p = tk.rt_fl(self.config.tile)
            probabilities_fp32(p, c.s, lse, g.scores, limits)
            tk.copy(c.p, p)
            tk.copy(c.slope, p)
        else:
            probabilities(c.p, c.slope, c.s, lse, g.scores, limits)

    def give_p(self, s, c):
        """To the other warpgroup."""
        s.p_pipe.acquire_empty(c.p_ring)
        self.hand_over(c.slope, s.p, c.p_ring, False)
        s.p_pipe.commit(c.p_ring)
        c.p_ring.advance()

    def make_ds(self, s, c, delta):
        """dS of what came. P's factor is taken from delta, and from dP where delta is added."""
        if self.fp16_p:
            less = Float32(2.0**-P_BITS)
            for i in range(cute.size(delta.tensor)):
                delta.tensor[i] = delta.tensor[i] * less
            p = tk.rt_fl(self.config.tile)
            tk.copy(p, c.slope)
            tk.apply_narrow(c.ds, lambda p, dp, delta: p * cute.math.fma(dp, less, delta), p, c.dp, delta)
        else:
            gradients(c.ds, c.slope, c.dp, delta)

    def hand_over(self, x, ring_tensor, ring, back):
        """P, or its slope, to its place in shared memory; back: from there."""
        quads = self.quads()
        mine = cute.make_tensor(cute.recast_tensor(x.tensor, Int32).iterator, cute.make_layout((4, quads)))
        for j in range(quads):
            theirs = ring_tensor[None, tk.thread_in_warpgroup(), j, ring.stage]
            cute.autovec_copy(*((theirs, mine[None, j]) if back else (mine[None, j], theirs)))

    # ---- the dK warpgroup ------------------------------------------------------------------------

    @cute.jit
    def dk_warpgroup(self, g, s):
        tile, kv, dtype = self.config.tile, tk.ring(1), self.tiles.q.dtype
        slope_type = Float16 if const_expr(self.fp16_p) else dtype
        c = DkState(dp=tk.rt_fl(tile), slope=tk.rt(tile, slope_type), ds=tk.rt(tile, dtype), dk=self.accumulators(),
                    ring=s.q_pipe.ring(), p_ring=s.p_pipe.ring(), ds_ring=s.ds_pipe.ring())
        self.scheduler.each_task(g, s, lambda t, reload_task: self.dk_task(g, s, t, reload_task, c, kv))

    @cute.jit
    def dk_task(self, g, s, t, reload_task: Constexpr, c, kv):
        for x in c.dk:
            tk.zero(x)
        tk.wait(s.kv_full[1], kv.phase)
        self.visit_dk(g, s, t, c)
        self.scheduler.release_kv(s, 1)
        t = reload_task()
        for x in c.dk:
            tk.mul(x, x, g.scale)
        if const_expr(not self.config.store_from_registers):
            tk.wait(s.kv_full[0], kv.phase)
            # the last dS has been taken, and so K; the dV warpgroup has used it before P
            if const_expr(self.config.adds_dq(self.spec)):
                acquire_after(s.ds_pipe, c.ds_ring)
        self.scheduler.next_kv(kv)
        self.send_accumulators(g, g.dk, s.k, c.dk, t, DK_BARRIER)
        tk.store_wait()

    def visit_dk(self, g, s, t, c):
        """As ``visit_dv``."""
        self.scheduler.visit(g, s, t, c, lambda g, s, t, c, m, masked: self.dk_step(g, s, t, c))

    @cute.jit
    def dk_step(self, g, s, t, c):
        q = s.q[c.ring.stage]
        s.do_pipe.wait(c.ring)
        tk.mm_ABt(c.dp, s.v[0], s.do[c.ring.stage])
        s.p_pipe.wait(c.p_ring)
        self.take_p(s, c)
        s.q_pipe.wait(c.ring)
        delta = stats_of(s, c.ring, 1, self.config.tile)
        tk.mma_wait(0)
        s.do_pipe.release(c.ring)
        self.make_ds(s, c, delta)
        s.p_pipe.release(c.p_ring)  # not before dP is there: the dV warpgroup may then write over V
        c.p_ring.advance()
        if const_expr(self.config.adds_dq(self.spec)):
            s.ds_pipe.acquire_empty(c.ds_ring)
            tk.store(s.ds[c.ds_ring.stage], c.ds)
            self.clear_dead_keys(t, s.ds[c.ds_ring.stage])
            tk.publish()
            s.ds_pipe.commit(c.ds_ring)
            c.ds_ring.advance()
        self.accumulate(c.dk, c.ds, q)
        tk.mma_wait(0)
        s.q_pipe.release(c.ring)
        c.ring.advance()

    def take_p(self, s, c):
        """What the other warpgroup has handed over."""
        self.hand_over(c.slope, s.p, c.p_ring, True)

    def clear_dead_keys(self, t, ds):
        """dS of keys behind the last one: their P is 0 by the mask's limits."""
