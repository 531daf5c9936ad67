"""Flash attention backward with its preprocess fused: nothing waits for all rows' statistics."""
from dataclasses import fields
from typing import Optional

import cuda.bindings.driver as cuda
import cutlass
import cutlass.cute as cute
from cutlass import Constexpr, Int32, const_expr

import tkq.tile as tk
from tkq.attention.backward import dkv
from tkq.attention.backward.dkv import AttentionBackward
from tkq.attention.backward.fuse_preprocess_config import FusePreprocessConfig
from tkq.attention.backward.fuse_preprocess_warps import PreprocessHelperWarps, PreprocessOperands
from tkq.attention.backward.helper_warps import Counters
from tkq.attention.backward.math import Scores
from tkq.attention.backward.preprocess import TILES_PREPROCESSED_BEFORE, PreprocessFirstTiles, Rows
from tkq.attention.backward.spec import BackwardSpec
from tkq.attention.backward.state import Globals, Scalars, Task
from tkq.attention.backward.tile_scheduler import values_of
from tkq.attention.common.counters import claim
from tkq.attention.common.integers import ceil_div
from tkq.attention.common.operands import BackwardOperands, Gradients, Sequences
from tkq.attention.common.sequences import DenseBatch, VarlenBatch, loads, with_batch
from tkq.attention.common.tile_order import l2_section_of, zero_ahead_of
from tkq.tile import WARPGROUP


class FusePreprocess(AttentionBackward):
    """``AttentionBackward`` whose helper warps make the statistics too (``PreprocessHelperWarps``): the producer waits
    for them as the dQ warps wait for zeroed tiles. K is free for the next task when the last product with it is done,
    before that has been added to dQ."""

    def __init__(self, spec: BackwardSpec, config: FusePreprocessConfig):
        super().__init__(spec, config)
        self.helper_warps = PreprocessHelperWarps(spec, config)

    @cute.jit
    def __call__(self, operands: BackwardOperands, gradients: Gradients, workspace: cute.Tensor,
                 sequences: Optional[Sequences], scalars: Scalars, stream: cuda.CUstream):
        """As ``BackwardBase``'s."""
        spec, c, ragged = self.spec, self.config, self.spec.varlen
        do, q, k, v, o, lse, dlse = operands
        dq, dk, dv = gradients
        layout = (VarlenBatch(sequences, q.shape[0], k.shape[0]) if const_expr(ragged) else
                  DenseBatch(q.shape[1], k.shape[1], q.shape[0]))
        heads, kv_heads, batches = q.shape[-2], k.shape[-2], 1 if const_expr(ragged) else q.shape[0]
        tiles, blocks = layout.slots(False, c.tile), layout.slots(True, c.block)
        # of a K/V head: Q, dO and the accumulator of its query heads; bounded, to stay in 32 bits
        row_bytes = 8 * spec.width * cutlass.min(heads // kv_heads, Int32(16))
        l2_section = row_bytes if const_expr(ragged) else l2_section_of(
            q.shape[1], row_bytes, c.l2_section_bytes, kv_heads * batches)
        tail_heads = Int32(0) if const_expr(ragged) else ceil_div(scalars.num_sms, blocks)
        parts = self.parts_of(workspace, tiles * heads * batches, kv_heads * layout.sequences)
        rows = Rows(*[None if const_expr(x is None) else with_batch(x, ragged) for x in (do, o, lse, dlse)])
        known = cutlass.min(tiles * heads * batches, TILES_PREPROCESSED_BEFORE * scalars.num_sms)
        PreprocessFirstTiles(spec, c)(rows, parts, layout, known, stream)
        zero_ahead = (2 * scalars.num_sms * ceil_div(c.block, c.tile) if const_expr(ragged) else
                      zero_ahead_of(l2_section, tail_heads, heads // kv_heads * tiles))
        g = Globals(
            q=loads(q, self.q_tile, ragged), do=loads(do, self.q_tile, ragged),
            k=loads(k, self.kv_tile, ragged), v=loads(v, self.kv_tile, ragged),
            dk=self.output(dk), dv=self.output(dv), stats=parts.stats, acc=parts.acc, dkv_partials=None, dq_serial=None,
            next=parts.counters, tasks=blocks * kv_heads * batches, layout=layout, left=scalars.left,
            right=scalars.right, heads=heads, kv_heads=kv_heads, heads_per_kv=heads // kv_heads,
            splits_per_kv_head=None,
            tiles=tiles, scale=scalars.scale, l2_section=l2_section, tail_heads=tail_heads,
            helper_warps=PreprocessOperands(with_batch(dq, ragged), Counters.of(parts.counters), zero_ahead, rows,
                                            known),
            scores=Scores.of(scalars.scale, scalars.softcap, spec.softcap))
        grid = tk.blocks_for("dynamic", g.tasks, scalars.num_sms)
        self.kernel(g).launch(grid=[grid, 1, 1], block=[self.warpgroups * WARPGROUP, 1, 1], stream=stream,
                              min_blocks_per_mp=1, use_pdl=True)

    # ---- for the dQ warpgroup ----------------------------------------------------------------------

    @cute.jit
    def add_task(self, g, s, t, reload_task: Constexpr, dq, ring, kv):
        tk.wait(s.kv_full[0], kv.phase)
        self.helper_warps.wait_ready(g, t)
        last = g.heads_per_kv * (t.end - t.first) - 1

        def add(i, h, m):
            s.ds_pipe.wait(ring)
            self.add_dq(g, s, dq, ring, self.tile_number(g, t, self.query_head(g, t, h), m), i == last)
            ring.advance()

        self.each_tile(g, t, add)
        self.release_k_if(s, last < 0)
        self.next_kv(kv)
        self.helper_warps.signal_added(g, reload_task())

    @cute.jit
    def add_dq(self, g, s, dq, ring, number, last):
        """The accumulator's tile ``number`` += dS K. last: of the task's."""
        self.each_part(g, s, dq, ring, number, lambda address: self.add_part(s, dq, address),
                       lambda: self.release_k_if(s, last))

    @cute.jit
    def release_k_if(self, s, condition):
        """With K."""
        if condition:
            self.release_kv(s, 0)

    @cute.jit
    def each_tile(self, g, t, work: Constexpr):
        """As ``BackwardBase``'s; i counts."""
        tiles = t.end - t.first
        for h in cutlass.range(g.heads_per_kv, unroll=1):
            for i in cutlass.range(tiles, unroll=1):
                work(h * tiles + i, h, t.first + i)

    # ---- producer ------------------------------------------------------------------------------

    @cute.jit
    def one_after_the_other(self, g, s, ring):
        kv, box = self.kv_ring(), s.tasks.ring()
        cute.arch.griddepcontrol_wait()  # the counters are zero
        number = claim(g.next, 0)
        while number < g.tasks:
            t = self.find_task(g, number)
            if self.first_key(t) < t.rows_k:  # else the slot has no key
                s.tasks.post(box, *values_of(t))
                self.load_first_kv(g, s, t, kv)
                self.helper_warps.wait_ready(g, t)
                self.load_q_do(g, s, t, ring, kv)
                kv.advance()
            number = claim(g.next, 0)
        s.tasks.post(box, *[Int32(0) for _ in fields(Task)])

    def kv_ring(self):
        return tk.ring(1)

    def load_first_kv(self, g, s, t, kv):
        """V: it is free first."""
        tk.wait(s.kv_empty[1], kv.phase ^ 1)
        self.load_kv(g, s, t, 1)


def build(spec: BackwardSpec, config: FusePreprocessConfig):
    """As ``backward.build``."""
    return FusePreprocess(spec, config), dkv.build(spec, config)[1]
