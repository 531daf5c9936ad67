"""The producer of attention's backward: a warp that loads K and V of a task, then its tiles of Q and dO."""
from dataclasses import fields

import cutlass
import cutlass.cute as cute
from cutlass import Int32, const_expr

import tkq.tile as tk
from tkq.attention.backward.config import BackwardConfig
from tkq.attention.backward.state import Task, Tiles
from tkq.attention.backward.tile_scheduler import values_of
from tkq.attention.common.counters import claim
from tkq.attention.common.sequences import piece


class Producer:
    """helper_warps: those whose statistics it waits for, with ``fuse_preprocess``."""

    def __init__(self, config: BackwardConfig, tiles: Tiles, scheduler, helper_warps):
        self.config, self.tiles, self.scheduler, self.helper_warps = config, tiles, scheduler, helper_warps

    @cute.jit
    def run(self, g, s):
        c, ring = self.config, s.q_pipe.ring()
        tk.prefetch(g.q, g.do, g.k, g.v, *[g.dk, g.dv] * (not c.store_from_registers))
        if const_expr(c.persistent):
            self.one_after_the_other(g, s, ring)
        else:
            t = self.scheduler.task(g, s)
            for i in cutlass.range_constexpr(2):
                self.load_kv(g, s, t, i)
            cute.arch.griddepcontrol_wait()  # what comes next is BackwardPreprocess's
            self.load_q_do(g, s, t, ring)

    @cute.jit
    def one_after_the_other(self, g, s, ring):
        """V, which is free first, then the first queries, then K."""
        kv, box = tk.ring(1), s.tasks.ring()
        cute.arch.griddepcontrol_wait()  # the counter is zero, the statistics are there
        number = claim(g.next, 0)
        while number < g.tasks:
            t = self.scheduler.find_task(g, number)
            if self.scheduler.first_key(t) < t.rows_k:  # else the slot has no key
                s.tasks.post(box, *values_of(t))
                tk.wait(s.kv_empty[1], kv.phase ^ 1)
                self.load_kv(g, s, t, 1)
                if const_expr(self.config.fuse_preprocess):
                    self.helper_warps.wait_ready(g, t)
                self.load_q_do(g, s, t, ring, kv)
                kv.advance()
            number = claim(g.next, 0)
        s.tasks.post(box, *[Int32(0) for _ in fields(Task)])

    @cute.jit
    def load_q_do(self, g, s, t, ring, kv=None):
        """All tiles of Q and dO; kv: K behind the first, when it is free."""
        q, do = piece(g.layout, g.q, t.rows_q), piece(g.layout, g.do, t.rows_q)

        def load(i, h, m):
            head, sem = self.scheduler.query_head(g, t, h), s.q_pipe.acquire(ring)
            tk.load_async(s.q[ring.stage], q, (t.batch_q, head, m, 0), sem)
            self.load_stats(g, s, self.scheduler.tile_number(g, t, head, m), ring.stage, sem)
            tk.load_async(s.do[ring.stage], do, (t.batch_q, head, m, 0), s.do_pipe.acquire(ring))
            ring.advance()
            self.load_k_behind(g, s, t, kv, i == 0)

        self.scheduler.each_tile(g, t, load)
        self.load_k_behind(g, s, t, kv, t.end == t.first)

    @cute.jit
    def load_k_behind(self, g, s, t, kv, now):
        if const_expr(kv is not None):
            if now:
                self.load_free_k(g, s, t, kv)

    def load_free_k(self, g, s, t, kv):
        tk.wait(s.kv_empty[0], kv.phase ^ 1)
        self.load_kv(g, s, t, 0)

    def load_kv(self, g, s, t, which):
        """K (0) or V (1)."""
        tile, src = ((s.k, g.k), (s.v, g.v))[which]
        src = piece(g.layout, src, t.rows_k)
        n = self.tiles.of_keys
        tk.expect_bytes(s.kv_full[which], n * self.tiles.kv.bytes)
        for i in range(n):
            tk.load_async(tile[i], src, (t.batch_k, self.scheduler.kv_head(g, t), n * t.block + i, 0),
                          s.kv_full[which])

    def load_stats(self, g, s, number, stage, sem):
        size = self.tiles.stats_bytes
        with cute.arch.elect_one():
            tk.bulk_load(s.stats[None, stage].iterator.toint(), g.stats.iterator.toint() + number * size, size,
                         sem.ptr.toint())
