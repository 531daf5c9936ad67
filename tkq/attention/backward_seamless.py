"""Flash attention backward without seams: no task waits for all rows' statistics, or for K behind the one before."""
from dataclasses import dataclass, fields, replace
from typing import Any, Optional

import cuda.bindings.driver as cuda
import cutlass
import cutlass.cute as cute
from cutlass import Constexpr, Int32, const_expr

import tkq.tile as tk
from tkq.attention import backward
from tkq.attention.backward import TURNS_BARRIER, AttentionBackward
from tkq.attention.backward_background import Counters
from tkq.attention.backward_math import Scores
from tkq.attention.backward_pre import Rows
from tkq.attention.backward_seamless_background import FIRST_TILES, FirstTiles, PreparesTiles, StatisticsToo
from tkq.attention.backward_seamless_config import SeamlessConfig
from tkq.attention.backward_sequences import Equal, Ragged, loads, piece, with_batch
from tkq.attention.backward_spec import BackwardSpec
from tkq.attention.backward_state import Globals, Numbers, Shared, State, Task
from tkq.attention.backward_tasks import claim, values_of
from tkq.attention.launch import BackwardOperands, Gradients, Sequences
from tkq.attention.query_ranges import lead_of, section_of
from tkq.attention.ranges import ceil_div
from tkq.tile import WARPGROUP

V = 2  # of Shared.kv_empty


@dataclass(frozen=True)
class Keys:
    """One task's tiles of K: those from tile ``first`` on."""

    tiles: tk.SharedTile
    first: Any

    def __getitem__(self, i):
        return self.tiles[self.first + i]


@dataclass(frozen=True)
class SeamlessState(State):
    """kv: of K's memories; its count is that of the tasks."""

    kv: tk.Ring


class Seamless(AttentionBackward):
    """``AttentionBackward`` with background.

    A task ends when its last dQ has been made, and only then is K's memory free; until the next K was there nobody had
    anything to do. So the next K has memory of its own, for which dS has one stage only, and V, which is not needed
    before P is made, comes with the first dO: as bytes of that stage.

      semaphores  full (arrivals)           empty (arrivals)
      K, 2        producer's bytes (1)      every warp with keys, the dQ warpgroup's warps (12)
      V           (the first dO's)          every warp with keys (8)

    The background makes statistics (``PreparesTiles``): the producer waits for them as the dQ warps do for zeroes."""

    def __init__(self, spec: BackwardSpec, config: SeamlessConfig):
        super().__init__(spec, config)
        self.background = PreparesTiles(spec, config)

    @cute.jit
    def __call__(self, operands: BackwardOperands, gradients: Gradients, workspace: cute.Tensor,
                 sequences: Optional[Sequences], numbers: Numbers, stream: cuda.CUstream):
        """As ``BackwardBase``'s."""
        spec, c, ragged = self.spec, self.config, self.spec.varlen
        do, q, k, v, o, lse, dlse = operands
        dq, dk, dv = gradients
        places = (Ragged(sequences, q.shape[0], k.shape[0]) if const_expr(ragged) else
                  Equal(q.shape[1], k.shape[1], q.shape[0]))
        heads, kv_heads, batches = q.shape[-2], k.shape[-2], 1 if const_expr(ragged) else q.shape[0]
        tiles, blocks = places.slots(False, c.tile), places.slots(True, c.block)
        # of a K/V head: Q, dO and the accumulator of its query heads; bounded, to stay in 32 bits
        row_bytes = 8 * spec.width * cutlass.min(heads // kv_heads, Int32(16))
        section = row_bytes if const_expr(ragged) else section_of(
            q.shape[1], row_bytes, c.section_bytes, kv_heads * batches)
        tail = Int32(0) if const_expr(ragged) else ceil_div(numbers.processors, blocks)
        parts = self.parts_of(workspace, tiles * heads * batches, kv_heads * places.sequences, 0)
        rows = Rows(*[None if const_expr(x is None) else with_batch(x, ragged) for x in (do, o, lse, dlse)])
        known = cutlass.min(tiles * heads * batches, FIRST_TILES * numbers.processors)
        FirstTiles(spec, c)(rows, parts, places, known, stream)
        lead = (2 * numbers.processors * ceil_div(c.block, c.tile) if const_expr(ragged) else
                lead_of(section, tail, heads // kv_heads * tiles))
        g = Globals(
            q=loads(q, self.q_tile, ragged), do=loads(do, self.q_tile, ragged),
            k=loads(k, self.kv_tile, ragged), v=loads(v, self.kv_tile, ragged),
            dk=self.output(dk), dv=self.output(dv), stats=parts.stats, acc=parts.acc, handed=None, chain=None,
            next=parts.counters, tasks=blocks * kv_heads * batches, places=places, left=numbers.left,
            right=numbers.right, heads=heads, kv_heads=kv_heads, heads_per_kv=heads // kv_heads, share=None,
            tiles=tiles, scale=numbers.scale, section=section, tail=tail,
            background=StatisticsToo(with_batch(dq, ragged), Counters.of(parts.counters), lead, rows, known),
            scores=Scores.of(numbers.scale, numbers.softcap, spec.softcap))
        grid = tk.blocks_for("dynamic", g.tasks, numbers.processors)
        self.kernel(g).launch(grid=[grid, 1, 1], block=[self.warpgroups * WARPGROUP, 1, 1], stream=stream,
                              min_blocks_per_mp=1, use_pdl=True)

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
        c = SeamlessState(
            s=scores, dp=scores, p=tk.rt(tile, dtype), ds=tk.rt(tile, dtype), kept=tk.rt(tile, dtype),
            dk=tk.rt_fl(dim), dv=tk.rt_fl(dim), ring=s.q_pipe.ring(), before=s.q_pipe.ring(),
            ds_ring=s.ds_pipe.ring(), turns=tk.Turns(2, wg, self.config.turns, TURNS_BARRIER), wg=wg, kv=tk.ring(2))
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
        dq, ring, kv = tk.rt_fl(self.config.dq_cols), s.ds_pipe.ring(), tk.ring(2)
        cute.arch.griddepcontrol_wait()  # the counters are zero
        self.each_task(g, s, lambda t, again: self.add_task(g, self.of_task(s, kv), t, again, dq, ring, kv))
        tk.store_wait()

    # ---- producer ------------------------------------------------------------------------------

    @cute.jit
    def one_after_the_other(self, g, s, ring):
        """K, then queries, V with the first."""
        kv, box = tk.ring(2), s.tasks.ring()
        cute.arch.griddepcontrol_wait()  # the counters are zero
        number = claim(g.next, 0)
        while number < g.tasks:
            t = self.find_task(g, number)
            if self.first_key(t) < t.rows_k:  # else the slot has no key
                s.tasks.post(box, *values_of(t))
                tk.wait(s.kv_empty[kv.stage], kv.phase ^ 1)
                tk.expect_bytes(s.kv_full[kv.stage], self.halves * self.kv_tile.bytes)
                self.load_halves(g, t, s.k, kv.stage * self.halves, g.k, s.kv_full[kv.stage])
                self.background.await_ready(g, t)
                self.load_queries(g, s, t, ring, kv)
                kv.advance()
            number = claim(g.next, 0)
        s.tasks.post(box, *[Int32(0) for _ in fields(Task)])

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
    return Seamless(spec, config), backward.build(spec, config)[1]
