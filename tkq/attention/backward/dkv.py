"""dK and dV of heads of up to 128 columns: two warpgroups, each with 64 keys."""
from dataclasses import replace

import cutlass
import cutlass.cute as cute
from cutlass import Constexpr, const_expr

import tkq.tile as tk
from tkq.attention.backward.config import BackwardConfig
from tkq.attention.backward.dkv_output import DkvOutput, acquire_after
from tkq.attention.backward.ds import slope, stats_of
from tkq.attention.backward.gqa_split import pass_on_dkv
from tkq.attention.backward.math import gradients, probabilities, probabilities_fp32, seen
from tkq.attention.backward.spec import BackwardSpec
from tkq.attention.backward.state import State, Tiles
from tkq.attention.common.sequences import piece
from tkq.tile import WARPGROUP

DKV_BARRIER, PING_PONG_BARRIER = 1, 3  # one each for each warpgroup with keys


class Dkv:
    """Where a warpgroup has room for dK and dV together. The roles are drawn in ``BackwardKernel``.

    P is in fp32 until dS has been made of it: with P rounded, as dV takes it, dQ and dK would have 1.2 times the error.
    So P and dP have registers of their own; as operands, P and dS take their place. A softcap's slope needs registers
    too: dS is then made of a rounded slope (``slope_step``)."""

    kv_releases = 8, 8  # warps that arrive on the empty barriers of K and of V

    def __init__(self, spec: BackwardSpec, config: BackwardConfig, tiles: Tiles, scheduler):
        self.spec, self.config, self.tiles, self.scheduler = spec, config, tiles, scheduler
        self.output = DkvOutput(spec, config, tiles, scheduler)
        self.by_slope = spec.softcap

    def roles(self, g, s, registers):
        """A tuple of ``tk.Role``."""
        return tk.Role(lambda wg: self.run(g, s, wg), registers[0], warpgroups=2),

    def p_ring(self, al):
        """Where warpgroups hand P to each other: they do not."""

    @cute.jit
    def run(self, g, s, wg):
        tile, dim, dtype = self.config.tile, self.spec.width, self.tiles.q.dtype
        scores, kv = tk.rt_fl(tile), tk.ring(1)
        c = State(s=scores, dp=scores, p=tk.rt(tile, dtype), ds=tk.rt(tile, dtype), dk=tk.rt_fl(dim), dv=tk.rt_fl(dim),
                  ring=s.q_pipe.ring(), ds_ring=s.ds_pipe.ring(),
                  ping_pong=tk.PingPong(2, wg, self.config.ping_pong, PING_PONG_BARRIER), wg=wg)
        c.ping_pong.start()
        self.scheduler.each_task(g, s, lambda t, reload_task: self.dkv_task(g, s, t, reload_task, c, kv))

    @cute.jit
    def dkv_task(self, g, s, t, reload_task: Constexpr, c, kv):
        tk.zero(c.dk)
        tk.zero(c.dv)
        for i in cutlass.range_constexpr(2):
            tk.wait(s.kv_full[i], kv.phase)
        self.visit(g, s, t, c)
        for i in cutlass.range_constexpr(2):
            self.scheduler.release_kv(s, i)
        self.scheduler.next_kv(kv)
        self.finish(g, s, reload_task(), c)

    def visit(self, g, s, t, c):
        """The task's tiles of queries."""
        self.scheduler.visit(g, s, t, c, self.step)

    def step(self, *args):
        return (self.slope_step if self.by_slope else self.fp32_step)(*args)

    @cute.jit
    def fp32_step(self, g, s, t, c, m, masked: Constexpr[bool]):
        """The tiles are made here: one that the loop carries would be in use all through it. dP's product is asked for
        behind P; the assembler begins it as soon as S has been scaled."""
        tile, dtype, stage = self.config.tile, self.tiles.q.dtype, c.ring.stage
        scores, dp, p = tk.rt_fl(tile), tk.rt_fl(tile), tk.rt_fl(tile)
        of = replace(c, s=scores, dp=dp, p=tk.rt(tile, dtype), ds=tk.rt(tile, dtype))
        s.q_pipe.wait(c.ring)
        c.ping_pong.take()
        tk.mm_ABt(scores, s.k[c.wg], s.q[stage])
        seen = self.look(g, t, of, m) if masked else None
        lse = stats_of(s, c.ring, 0, tile)
        tk.mma_wait(0)
        self.make_p_fp32(g, t, of, m, p, lse)
        c.ping_pong.give()
        s.do_pipe.wait(c.ring)
        tk.mm_ABt(dp, s.v[c.wg], s.do[stage])
        tk.mma_wait(0)
        limits = self.limits(g, t, of, m, seen) if masked else ()
        self.make_ds(s, of, lambda which: self.make_part(s, of, p, limits, which))
        self.add_last_part(s, t, of)

    def look(self, g, t, c, m):
        """What is asked about a tile's mask while S is made: nothing."""

    def limits(self, g, t, c, m, seen):
        """For ``make_part``. seen: of ``look``."""
        return self.scheduler.limits(g, t, m, c.wg)

    def make_p_fp32(self, g, t, c, m, p, lse):
        probabilities_fp32(p, c.s, lse, g.scores)

    def add_last_part(self, s, t, c):
        """When dS is there: the products with the last part, and dS on its way to dQ."""
        last = self.part(self.config.dkv_parts - 1)
        tk.mma_AB(c.dv, c.p, s.do[c.ring.stage], k=last)
        self.add_last_ds(s, t, c, last)

    def add_last_ds(self, s, t, c, queries=None):
        """Behind dV's last product. queries: of the part, as of ``part``; None: of the tile."""
        if const_expr(self.config.adds_dq(self.spec)):
            self.hand_over(s, t, c)
            c.ds_ring.advance()
        tk.mma_AB(c.dk, c.ds, s.q[c.ring.stage], k=queries)
        tk.mma_wait(1)  # dV
        s.do_pipe.release(c.ring)
        tk.mma_wait(0)
        s.q_pipe.release(c.ring)
        c.ring.advance()

    def part(self, i):
        """Queries of part i: first, end."""
        size = self.config.tile // self.config.dkv_parts
        return i * size, (i + 1) * size

    def make_ds(self, s, c, make_part):
        """P as an operand and dS, part by part, and the products with all parts but the last."""
        for i in range(self.config.dkv_parts):
            first, end = self.part(i)
            make_part((first, end - first))
            if i < self.config.dkv_parts - 1:
                tk.mma_AB(c.dv, c.p, s.do[c.ring.stage], k=(first, end))
                tk.mma_AB(c.dk, c.ds, s.q[c.ring.stage], k=(first, end))

    def make_part(self, s, c, p, limits, which):
        """Outside of the limits P is 0, whatever it was: masked here, where registers are free."""
        def pair(p, dp, delta, col, *limits):
            p = seen(p, which[0] + col, *limits)
            return p, p * (dp + delta)

        to_p, to_ds, p, dp = (tk.columns(x, *which) for x in (c.p, c.ds, p, c.dp))
        delta = stats_of(s, c.ring, 1, self.config.tile, *which)
        tk.apply_narrow((to_p, to_ds), pair, p, dp, delta, tk.COLUMN, *limits)

    @cute.jit
    def slope_step(self, g, s, t, c, m, masked: Constexpr[bool]):
        """S and dP share registers: with both, dK, dV and the slope there would not be enough."""
        s.q_pipe.wait(c.ring)
        c.ping_pong.take()
        tk.mm_ABt(c.s, s.k[c.wg], s.q[c.ring.stage])
        tk.mma_wait(0)
        self.make_p(g, s, t, c, m, masked)
        c.ping_pong.give()
        s.do_pipe.wait(c.ring)
        tk.mm_ABt(c.dp, s.v[c.wg], s.do[c.ring.stage])
        tk.mma_AB(c.dv, c.p, s.do[c.ring.stage])
        tk.mma_wait(1)  # dP
        gradients(c.ds, slope(self.spec, c), c.dp, stats_of(s, c.ring, 1, self.config.tile))
        self.add_last_ds(s, t, c)

    def make_p(self, g, s, t, c, m, masked):
        """P, rounded, and the slope."""
        limits = self.scheduler.limits(g, t, m, c.wg) if masked else ()
        probabilities(c.p, slope(self.spec, c), c.s, stats_of(s, c.ring, 0, self.config.tile), g.scores, limits)

    def hand_over(self, s, t, c):
        """dS, to the warpgroup that makes dQ."""
        to = s.ds[2 * c.ds_ring.stage + c.wg]
        s.ds_pipe.acquire_empty(c.ds_ring)
        tk.store(to, c.ds)
        self.clear_dead_keys(t, c, to)
        tk.publish()
        s.ds_pipe.commit(c.ds_ring)

    def clear_dead_keys(self, t, c, ds):
        """dS of keys behind the last one: their P is 0 by the mask's limits."""

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
            if const_expr(self.config.adds_dq(self.spec)):
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
