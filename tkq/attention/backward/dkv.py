"""dK and dV of heads of up to 128 columns: two warpgroups, each with 64 keys."""
import cutlass
import cutlass.cute as cute
from cutlass import Constexpr, Float32, Int32, const_expr

import tkq.tile as tk
from tkq.attention.backward.config import BackwardConfig
from tkq.attention.backward.dkv_output import DkvOutput, acquire_after
from tkq.attention.backward.ds import Fp32Ds, PackedDs, load_f32x2, slope, stats_of
from tkq.attention.backward.gqa_split import pass_on_dkv
from tkq.attention.backward.math import probabilities, probabilities_fp32
from tkq.attention.backward.spec import BackwardSpec
from tkq.attention.backward.state import State, Tiles
from tkq.attention.common.sequences import piece
from tkq.tile import WARPGROUP

DKV_BARRIER, PING_PONG_BARRIER = 1, 3  # one each for each warpgroup with keys


class Dkv:
    """Where a warpgroup has room for dK and dV together. The roles are drawn in ``BackwardKernel``.

    S and dP share registers: with both, dK and dV there would not be enough; the assembler still begins dP as soon as S
    has been scaled."""

    kv_releases = 8, 8  # warps that arrive on the empty barriers of K and of V

    def __init__(self, spec: BackwardSpec, config: BackwardConfig, tiles: Tiles, scheduler):
        self.spec, self.config, self.tiles, self.scheduler = spec, config, tiles, scheduler
        self.output = DkvOutput(spec, config, tiles, scheduler)
        self.ds = (PackedDs if config.packs_ds(spec) else Fp32Ds)(spec, config)

    def roles(self, g, s, registers):
        """A tuple of ``tk.Role``."""
        return tk.Role(lambda wg: self.run(g, s, wg), registers[0], warpgroups=2),

    def p_ring(self, al):
        """Where warpgroups hand P to each other: they do not."""

    @cute.jit
    def run(self, g, s, wg):
        tile, dim, dtype = self.config.tile, self.spec.width, self.tiles.q.dtype
        scores, kv = tk.rt_fl(tile), tk.ring(1)
        c = State(s=scores, dp=scores, p=tk.rt(tile, dtype), ds=tk.rt(tile, dtype), ds_prev=tk.rt(tile, dtype),
                  dk=tk.rt_fl(dim), dv=tk.rt_fl(dim), ring=s.q_pipe.ring(), q_prev=s.q_pipe.ring(),
                  ds_ring=s.ds_pipe.ring(), ping_pong=tk.PingPong(2, wg, self.config.ping_pong, PING_PONG_BARRIER),
                  wg=wg)
        c.ping_pong.start()
        self.scheduler.each_task(g, s, lambda t, reload_task: self.dkv_task(g, s, t, reload_task, c, kv))

    @cute.jit
    def dkv_task(self, g, s, t, reload_task: Constexpr, c, kv):
        tk.zero(c.dk)
        tk.zero(c.dv)
        for i in cutlass.range_constexpr(2):
            tk.wait(s.kv_full[i], kv.phase)
        if const_expr(self.config.overlap_dk):
            tk.zero(c.ds_prev)
        if const_expr(self.config.overlap_dk or "d" in self.config.joint):
            c.q_prev.count[0] = c.ring.count[0]
        self.scheduler.visit(g, s, t, c, self.step)
        if const_expr(self.config.overlap_dk):
            self.last_dk(s, c)
        if const_expr("d" in self.config.joint):
            tk.mma_wait(0)
            self.release_both_prev(s, c)
        for i in cutlass.range_constexpr(2):
            self.scheduler.release_kv(s, i)
        self.scheduler.next_kv(kv)
        self.finish(g, s, reload_task(), c)

    def step(self, *args):
        if self.config.joint:
            return self.joint_step(*args)
        return (self.overlapped_step if self.config.overlap_dk else self.plain_step)(*args)

    @cute.jit
    def joint_step(self, g, s, t, c, m, masked: Constexpr[bool]):
        """P stays in fp32 until dS is made of it."""
        tile, how, dtype = self.config.tile, self.config.joint, self.tiles.q.dtype
        scores, dp, p = tk.rt_fl(tile), tk.rt_fl(tile), tk.rt_fl(tile)
        p16, ds = tk.rt(tile, dtype), tk.rt(tile, dtype)
        s.q_pipe.wait(c.ring)
        c.ping_pong.take()
        tk.mm_ABt(scores, s.k[c.wg], s.q[c.ring.stage])
        if const_expr("l" in how):
            lse = stats_of(s, c.ring, 0, tile)
        if const_expr("d" in how):
            tk.mma_wait(1)
            self.release_both_prev(s, c)
        tk.mma_wait(0)
        limits = self.scheduler.limits(g, t, m, c.wg) if masked else ()
        early = () if "m" in how else limits
        if const_expr("l" not in how):
            lse = stats_of(s, c.ring, 0, tile)
        probabilities_fp32(p, scores, lse, g.scores, early)
        if const_expr("g" in how):
            c.ping_pong.give()
        s.do_pipe.wait(c.ring)
        tk.mm_ABt(dp, s.v[c.wg], s.do[c.ring.stage])
        late = limits if const_expr("m" in how) else ()
        delta = self.early_delta(s, c, how)
        tk.mma_wait(0)
        if const_expr("b" in how):
            c.ping_pong.give()
        delta = delta if const_expr("y" in how) else stats_of(s, c.ring, 1, tile)
        parts = 2 if const_expr("h" in how) else 4 if const_expr("q" in how) else 1
        for i in cutlass.range_constexpr(parts):
            self.make_part(p, dp, delta, late, p16, ds, (i * tile // parts, tile // parts))
            if const_expr(parts > 1 and (i < parts - 1 or "w" in how)):
                k = (i * tile // parts, (i + 1) * tile // parts)
                tk.mma_AB(c.dv, p16, s.do[c.ring.stage], k=k)
                tk.mma_AB(c.dk, ds, s.q[c.ring.stage], k=k)
        k = None if const_expr(parts == 1) else (tile - tile // parts, tile)
        if const_expr("g" not in how and "b" not in how):
            c.ping_pong.give()
        if const_expr("v" in how and "w" not in how):
            tk.mma_AB(c.dv, p16, s.do[c.ring.stage], k=k)
        if const_expr(self.spec.adds_dq):
            s.ds_pipe.acquire_empty(c.ds_ring)
            tk.store(s.ds[2 * c.ds_ring.stage + c.wg], ds)
            tk.publish()
            s.ds_pipe.commit(c.ds_ring)
            c.ds_ring.advance()
        if const_expr("v" not in how and "w" not in how):
            tk.mma_AB(c.dv, p16, s.do[c.ring.stage], k=k)
        if const_expr("w" not in how):
            tk.mma_AB(c.dk, ds, s.q[c.ring.stage], k=k)
        tk.mma_wait(1)  # dV
        s.do_pipe.release(c.ring)
        tk.mma_wait(0)
        s.q_pipe.release(c.ring)
        c.ring.advance()

    def early_delta(self, s, c, how):
        return stats_of(s, c.ring, 1, self.config.tile) if "y" in how else None

    def make_part(self, p, dp, delta, limits, p16, ds, which):
        part = lambda x: tk.columns(x, *which)

        def pair(p, dp, delta, col, first=None, end=None):
            col = col + which[0]
            if first is not None:
                p = cutlass.select_(first <= col, p, Float32(0.0))
            if end is not None:
                p = cutlass.select_(col < end, p, Float32(0.0))
            return p, p * (dp + delta)
        tk.apply_narrow((part(p16), part(ds)), pair, part(p), part(dp), part(delta), tk.COLUMN, *limits)

    @cute.jit
    def release_both_prev(self, s, c):
        """Of the tile before, if there is one."""
        if c.q_prev.count[0] != c.ring.count[0]:
            s.do_pipe.release(c.q_prev)
            s.q_pipe.release(c.q_prev)
            c.q_prev.advance()

    @cute.jit
    def plain_step(self, g, s, t, c, m, masked: Constexpr[bool]):
        s.q_pipe.wait(c.ring)
        c.ping_pong.take()
        tk.mm_ABt(c.s, s.k[c.wg], s.q[c.ring.stage])
        tk.mma_wait(0)
        self.make_p(g, s, t, c, m, masked)
        c.ping_pong.give()
        s.do_pipe.wait(c.ring)
        self.ds.multiply_dp(s, c)
        tk.mma_AB(c.dv, c.p, s.do[c.ring.stage])
        tk.mma_wait(1)  # dP
        self.ds.make(s, c)
        if const_expr(self.spec.adds_dq):
            self.hand_over(s, c)
            c.ds_ring.advance()
        tk.mma_AB(c.dk, c.ds, s.q[c.ring.stage])
        tk.mma_wait(1)  # dV
        s.do_pipe.release(c.ring)
        tk.mma_wait(0)
        s.q_pipe.release(c.ring)
        c.ring.advance()

    @cute.jit
    def overlapped_step(self, g, s, t, c, m, masked: Constexpr[bool]):
        """As ``plain_step``, but dK of the tile before runs under P. At the first tile there is none: its dS is 0, and
        its Q the first."""
        s.q_pipe.wait(c.ring)
        c.ping_pong.take()
        tk.mm_ABt(c.s, s.k[c.wg], s.q[c.ring.stage])
        tk.mma_AB(c.dk, c.ds_prev, s.q[c.q_prev.stage])
        tk.mma_wait(1)  # S
        self.make_p(g, s, t, c, m, masked)
        c.ping_pong.give()
        tk.mma_wait(0)  # dK
        self.release_q_prev(s, c)
        s.do_pipe.wait(c.ring)
        self.ds.multiply_dp(s, c)
        tk.mma_AB(c.dv, c.p, s.do[c.ring.stage])
        tk.mma_wait(1)  # dP
        self.ds.make(s, c)
        if const_expr(self.spec.adds_dq):
            self.hand_over(s, c)
            c.ds_ring.advance()
        tk.mma_wait(0)  # dV
        self.save_ds(g, c)
        s.do_pipe.release(c.ring)
        c.ring.advance()

    def make_p(self, g, s, t, c, m, masked):
        limits = self.scheduler.limits(g, t, m, c.wg) if masked else ()
        probabilities(c.p, slope(self.spec, c), c.s, stats_of(s, c.ring, 0, self.config.tile), g.scores, limits)

    def save_ds(self, g, c):
        """ds_prev = dS. An operand that comes round a loop must be written while no product runs, or the assembler lets
        none run under anything else; a copy it would see through, so a 0 that it does not know enters."""
        to, x = (cute.recast_tensor(tile.tensor, Int32) for tile in (c.ds_prev, c.ds))
        for i in range(cute.size(x)):
            to[i] = x[i] ^ (g.heads >> 31)

    @cute.jit
    def release_q_prev(self, s, c):
        """Of the tile before, if there is one."""
        if c.q_prev.count[0] != c.ring.count[0]:
            s.q_pipe.release(c.q_prev)
            c.q_prev.advance()

    @cute.jit
    def last_dk(self, s, c):
        """dK of the last tile."""
        if c.q_prev.count[0] != c.ring.count[0]:
            tk.mma_AB(c.dk, c.ds_prev, s.q[c.q_prev.stage])
            tk.mma_wait(0)
            s.q_pipe.release(c.q_prev)

    def hand_over(self, s, c):
        """dS, to the warpgroup that makes dQ."""
        s.ds_pipe.acquire_empty(c.ds_ring)
        tk.store(s.ds[2 * c.ds_ring.stage + c.wg], c.ds)
        tk.publish()
        s.ds_pipe.commit(c.ds_ring)

    def wait_for_dq(self, s, c):
        """Until the warpgroup that makes dQ has read K for the last time."""
        acquire_after(s.ds_pipe, c.ds_ring)

    @cute.jit
    def finish(self, g, s, t, c):
        """Write dK and dV: from registers, or by way of the shared memory of K and V."""
        barrier, number = DKV_BARRIER + c.wg, 2 * t.block + c.wg
        at = t.batch_k, t.head, number, 0
        if const_expr(self.config.store_from_registers):
            self.write_both(g, t, c, number)
        else:
            tk.sync(barrier, WARPGROUP)  # V has been read
            self.output.send(piece(g.layout, g.dv, t.rows_k), s.v[c.wg], c.dv, at, barrier)
            tk.mul(c.dk, c.dk, g.scale)
            if const_expr(self.spec.adds_dq):
                self.wait_for_dq(s, c)
            self.output.send(piece(g.layout, g.dk, t.rows_k), s.k[c.wg], c.dk, at, barrier)
        tk.store_wait()

    @cute.jit
    def write_both(self, g, t, c, number):
        if const_expr(self.config.heads_per_task):
            if self.pass_on(g, t, c, number):
                self.write_sums(g, t, c, number)
        else:
            self.write_sums(g, t, c, number)

    def pass_on(self, g, t, c, number):
        """From one part of the query heads to the next. Is this the last, which has the sums?"""
        blocks = g.tasks // (g.layout.batches * g.kv_heads)
        head = t.sequence * (g.kv_heads // g.splits_per_kv_head) + self.scheduler.kv_head(g, t)
        place = head * (2 * blocks) + number
        return pass_on_dkv(g.dkv_partials, place, t.head % g.splits_per_kv_head, g.splits_per_kv_head, (c.dk, c.dv))

    def write_sums(self, g, t, c, number):
        self.output.write(g, g.dv, c.dv, t, number)
        tk.mul(c.dk, c.dk, g.scale)
        self.output.write(g, g.dk, c.dk, t, number)
