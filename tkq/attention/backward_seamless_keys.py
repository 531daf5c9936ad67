"""Attention's backward without seams, with room for the next task's K beside this one's."""
from dataclasses import dataclass, fields, replace
from typing import Any

import cutlass.cute as cute
from cutlass import Constexpr, Int32, const_expr

import tkq.tile as tk
from tkq.attention import backward
from tkq.attention.backward import TURNS_BARRIER
from tkq.attention.backward_seamless import Seamless
from tkq.attention.backward_seamless_config import SeamlessConfig
from tkq.attention.backward_sequences import piece
from tkq.attention.backward_spec import BackwardSpec
from tkq.attention.backward_state import Globals, Shared, State, Task

V = 2  # of Shared.kv_empty


@dataclass(frozen=True)
class Keys:
    """One task's tiles of K: those from tile ``first`` on."""

    tiles: tk.SharedTile
    first: Any

    def __getitem__(self, i):
        return self.tiles[self.first + i]


@dataclass(frozen=True)
class TwoKeysState(State):
    """kv: of K's memories; its count is that of the tasks."""

    kv: tk.Ring


class TwoKeys(Seamless):
    """A task ends when its last dQ has been made, and only then is K's memory free. Here the next K has memory of its
    own, for which dS has one stage only, and V, which is not needed before P is made, comes with the first dO: as bytes
    of that stage.

      semaphores  full (arrivals)           empty (arrivals)
      K, 2        producer's bytes (1)      every warp with keys, the dQ warpgroup's warps (12)
      V           (the first dO's)          every warp with keys (8)
    """

    @cute.kernel
    def kernel(self, g: Globals):
        c = self.config
        al = tk.SharedAllocator()
        s = Shared(
            k=al.tile(self.kv_tile, 2 * self.halves), v=al.tile(self.kv_tile, self.halves),
            q=al.tile(self.q_tile, c.stages), do=al.tile(self.q_tile, c.stages),
            ds=al.tile(self.ds_tile, self.halves * c.ds_stages), stats=al.vector(2 * c.tile, c.stages),
            p=None, dq=self.dq_staging(al), dq_full=None, task=None, tasks=al.mailbox(len(fields(Task)), 2, 12),
            kv_full=al.semaphores(2), kv_empty=al.semaphores(3),
            q_pipe=al.pipe(c.stages, self.q_tile.bytes + self.stats_bytes, 8),
            do_pipe=al.pipe(c.stages, self.q_tile.bytes, 8),
            ds_pipe=al.pipe(c.ds_stages, 0, 4, producers=8), p_pipe=None)

        def initialise():
            for pipe in (s.q_pipe, s.do_pipe, s.ds_pipe, s.tasks):
                pipe.init()
            for i in range(2):
                tk.init(s.kv_full[i], 1)
                tk.init(s.kv_empty[i], 12)
            tk.init(s.kv_empty[V], 8)

        tk.init_block(initialise)
        tk.assign(self.roles(g, s))

    def of_task(self, s, kv):
        """s, as one task's K has it."""
        return replace(s, k=Keys(s.k, kv.stage * self.halves), kv_full=s.kv_full[kv.stage],
                       kv_empty=s.kv_empty[kv.stage])

    # ---- for the warpgroups with keys --------------------------------------------------------------

    @cute.jit
    def keys(self, g, s, wg):
        tile, dim, dtype = self.config.tile, self.spec.width, self.q_tile.dtype
        scores = tk.rt_fl(tile)
        c = TwoKeysState(
            s=scores, dp=scores, p=tk.rt(tile, dtype), ds=tk.rt(tile, dtype), kept=tk.rt(tile, dtype),
            dk=tk.rt_fl(dim), dv=tk.rt_fl(dim), ring=s.q_pipe.ring(), before=s.q_pipe.ring(),
            ds_ring=s.ds_pipe.ring(), turns=tk.Turns(2, wg, self.config.turns, TURNS_BARRIER), wg=wg,
            kv=self.ring_of_keys())
        c.turns.start()
        self.each_task(g, s, lambda t, again: self.keys_task(g, s, t, again, c, c.kv))

    @cute.jit
    def keys_task(self, g, s, t, again: Constexpr, c, kv):
        tk.zero(c.dk)
        tk.zero(c.dv)
        if const_expr(self.config.late):
            tk.zero(c.kept)
            c.before.count[0] = c.ring.count[0]
        here = self.of_task(s, kv)
        tk.wait(here.kv_full[0], kv.phase)
        self.visit(g, here, t, c, self.step)
        self.done_with(self.of_task(s, kv), 0)
        tk.arrive(s.kv_empty[V])
        kv.advance()
        if const_expr(self.config.late):
            self.last_keys(s, c)
        self.finish(g, s, again(), c)

    # ---- for the dQ warpgroup ----------------------------------------------------------------------

    @cute.jit
    def queries(self, g, s):
        dq, ring, kv = tk.rt_fl(self.config.dq_cols), s.ds_pipe.ring(), self.ring_of_keys()
        cute.arch.griddepcontrol_wait()  # the counters are zero
        self.each_task(g, s, lambda t, again: self.add_task(g, self.of_task(s, kv), t, again, dq, ring, kv))
        tk.store_wait()

    # ---- producer ------------------------------------------------------------------------------

    def ring_of_keys(self):
        return tk.ring(2)

    def load_first_keys(self, g, s, t, kv):
        """K: its memory was free before this task began."""
        tk.wait(s.kv_empty[kv.stage], kv.phase ^ 1)
        tk.expect_bytes(s.kv_full[kv.stage], self.halves * self.kv_tile.bytes)
        self.load_halves(g, t, s.k, kv.stage * self.halves, g.k, s.kv_full[kv.stage])

    def load_halves(self, g, t, tiles, first, src, sem):
        for i in range(self.halves):
            tk.load_async(tiles[first + i], piece(g.places, src, t.rows_k),
                          (t.batch_k, t.head, self.halves * t.block + i, 0), sem)

    @cute.jit
    def load_queries(self, g, s, t, ring, kv=None):
        """All tiles of Q and dO, and V with the first dO."""
        q, do = piece(g.places, g.q, t.rows_q), piece(g.places, g.do, t.rows_q)

        def load(i, h, m):
            head, sem = self.query_head(g, t, h), s.q_pipe.acquire(ring)
            tk.load_async(s.q[ring.stage], q, (t.batch_q, head, m, 0), sem)
            self.load_stats(g, s, self.tile_number(g, t, head, m), ring.stage, sem)
            sem = s.do_pipe.acquire(ring)
            self.load_values_if(g, s, t, kv, sem, i == 0)
            tk.load_async(s.do[ring.stage], do, (t.batch_q, head, m, 0), sem)
            ring.advance()

        self.each_tile(g, t, load)

    @cute.jit
    def load_values_if(self, g, s, t, kv, sem, condition):
        """Before anything comes into the stage, which is not full before its own bytes are there."""
        if condition:
            tk.wait(s.kv_empty[V], Int32(kv.count[0] & 1) ^ 1)
            with cute.arch.elect_one():
                cute.arch.mbarrier_expect_tx(sem.ptr, self.halves * self.kv_tile.bytes)
            self.load_halves(g, t, s.v, 0, g.v, sem)


def build(spec: BackwardSpec, config: SeamlessConfig):
    """As ``backward.build``."""
    return TwoKeys(spec, config), backward.build(spec, config)[1]
