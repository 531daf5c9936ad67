"""The backward of attention with a score function and a mask of the user's own."""
from typing import Optional

import cuda.bindings.driver as cuda
import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32, const_expr

import tkq.tile as tk
from tkq.attention.backward.config import BackwardConfig
from tkq.attention.backward.kernel import WARPGROUPS, BackwardKernel
from tkq.attention.backward.math import Scores
from tkq.attention.backward.postprocess import BackwardPostprocess
from tkq.attention.backward.preprocess import BackwardPreprocess, Rows
from tkq.attention.backward.workspace import lay_out
from tkq.attention.common.integers import ceil_div
from tkq.attention.common.operands import BackwardOperands, Gradients
from tkq.attention.common.sequences import DenseBatch, loads
from tkq.attention.common.tile_order import l2_section_of
from tkq.attention.flex.backward.dkv import FlexDkv
from tkq.attention.flex.backward.dkv_hdim256 import FlexDkvHdim256
from tkq.attention.flex.backward.scheduler import FlexScheduler
from tkq.attention.flex.backward.spec import FlexBackwardSpec
from tkq.attention.flex.backward.state import FlexGlobals
from tkq.attention.flex.fakes import captured, ints
from tkq.attention.flex.operands import BackwardLists, BlockLists, FlexScalars, Functions
from tkq.attention.flex.state import KeyTiles
from tkq.runtime.compile import fake


class FlexBackward:
    """dV = P' dO, dK = scale * dS' Q, dQ = scale * dS K, with P = exp(score(scale * Q K') - lse) where the mask holds
    and dS = P * score'(scale * Q K') * (dO V' - rowsum(o * do) + dlse).

    Roles, pipes and the kernels before and after are ``BackwardKernel``'s, of whose parts this kernel is made. Two
    differ: ``FlexScheduler``, by which a task's tiles of queries come from the block lists, and ``FlexDkv``, above 128
    columns ``FlexDkvHdim256``, which evaluate the functions' graphs on transposed scores in registers."""

    def __init__(self, spec: FlexBackwardSpec, config: BackwardConfig):
        self.spec, self.config = spec, config
        dkv = FlexDkvHdim256 if spec.width > 128 else FlexDkv
        self.base = BackwardKernel(spec.attention, config, FlexScheduler(spec, config),
                                   lambda _, *parts: dkv(spec, *parts))

    @cute.jit
    def __call__(self, operands: BackwardOperands, gradients: Gradients, workspace: cute.Tensor,
                 lists: Optional[BackwardLists], functions: Optional[Functions], scalars: FlexScalars,
                 stream: cuda.CUstream):
        """As ``BackwardKernel``, with lists of the blocks of queries of each block of keys."""
        spec, c, base, tiles_of = self.spec, self.config, self.base, self.base.tiles
        do, q, k, v, o, lse, dlse = operands
        dq, dk, dv = gradients
        layout = DenseBatch(q.shape[1], k.shape[1], q.shape[0], spec.q_per)
        heads, kv_heads, batches = q.shape[2], k.shape[2], q.shape[0]
        heads_per_kv = heads // kv_heads
        tiles, blocks = layout.slots(False, c.tile), layout.slots(True, c.block)
        all_tiles, tasks = tiles * heads * batches, blocks * kv_heads * batches
        row_bytes = spec.width * (2 * tiles_of.q.dtype.width // 8 + 4) * cutlass.min(heads_per_kv, Int32(16))
        l2_section = l2_section_of(q.shape[1], row_bytes, c.l2_section_bytes, kv_heads * batches)
        waves = cutlass.select_(heads == kv_heads, Int32(2), Int32(1))
        tail_heads = ceil_div(waves * scalars.num_sms, blocks)
        parts = lay_out(spec.attention, c, workspace, all_tiles, kv_heads * batches)
        BackwardPreprocess(spec.attention, c)(Rows(do, o, lse, dlse), parts, layout, stream)
        listed, states = None, None
        if const_expr(lists is not None):
            listed, states = lists.queries, lists.states
        score, mask = None, None
        if const_expr(functions is not None):
            score, mask = functions
        g = FlexGlobals(
            q=loads(q, tiles_of.q, False), do=loads(do, tiles_of.q, False), k=loads(k, tiles_of.kv, False),
            v=loads(v, tiles_of.kv, False), dk=base.dkv.output.globals(dk), dv=base.dkv.output.globals(dv),
            stats=parts.stats, acc=parts.acc, dkv_partials=None, dq_serial=None,
            next=parts.counters if c.persistent else None, tasks=tasks,
            layout=layout, left=Int32(0), right=Int32(0), heads=heads, kv_heads=kv_heads, heads_per_kv=heads_per_kv,
            splits_per_kv_head=None, tiles=tiles, scale=scalars.scale, l2_section=l2_section, tail_heads=tail_heads,
            helper_warps=None, scores=Scores.of(scalars.scale, Float32(0.0), False),
            queries=KeyTiles(listed, spec.mask is not None, spec.full, spec.kv_per, spec.q_per, tiles),
            score=score, mask=mask, states=states, q_per=spec.q_per)
        grid = tk.blocks_for("dynamic" if c.persistent else "single", tasks, scalars.num_sms)
        base.kernel(g).launch(grid=[grid, 1, 1], block=[WARPGROUPS * tk.WARPGROUP, 1, 1], stream=stream,
                              min_blocks_per_mp=1, use_pdl=True)
        if const_expr(spec.dq):
            BackwardPostprocess(spec.attention, c)(parts.acc, dq, layout, scalars.scale, 0, stream)

    def fake_arguments(self) -> tuple:
        """As ``BackwardKernel.fake_arguments``, with what the functions take."""
        spec = self.spec
        operands, gradients, workspace, _, _ = self.base.fake_arguments()
        lists = None
        if spec.blocks:
            B, H, R = (fake.sym() for _ in range(3))
            full = (ints(B, H, R), ints(B, H, R, fake.sym())) if spec.full else (None, None)
            lists = BackwardLists(BlockLists(ints(B, H, R), ints(B, H, R, fake.sym()), *full),
                                  ints(B, H, fake.sym(), fake.sym()) if spec.states else None)
        found = [captured(x) for x in (spec.graph, spec.mask)]
        functions = None if all(x is None for x in found) else Functions(*found)
        return (operands, gradients, workspace, lists, functions,
                FlexScalars(Float32(1.0), Int32(1)))
