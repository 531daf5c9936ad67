"""Gradients of captured tensors of a score function."""
from dataclasses import dataclass
from typing import Any, Optional

import cuda.bindings.driver as cuda
import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32, const_expr

import tkq.tile as tk
from tkq.attention.backward.config import BackwardConfig
from tkq.attention.backward.ds import stats_of
from tkq.attention.backward.math import Scores
from tkq.attention.backward.preprocess import BackwardPreprocess, Rows
from tkq.attention.backward.producer import Producer
from tkq.attention.backward.state import Shared, Tiles
from tkq.attention.backward.workspace import lay_out
from tkq.attention.common.integers import ceil_div
from tkq.attention.common.operands import BackwardOperands
from tkq.attention.common.sequences import DenseBatch, loads
from tkq.attention.common.tile_order import l2_section_of
from tkq.attention.flex.backward.kernel import FlexBackward
from tkq.attention.flex.backward.scheduler import FlexScheduler
from tkq.attention.flex.backward.scores import LARGEST, FlexScores, Place
from tkq.attention.flex.backward.spec import CaptureSpec
from tkq.attention.flex.backward.state import FlexGlobals
from tkq.attention.flex.backward.sums import PITCH, ROWS, Diagonals, Sums
from tkq.attention.flex.emit import Emitted, select
from tkq.attention.flex.fakes import captured, gradient
from tkq.attention.flex.look import chosen
from tkq.attention.flex.operands import BackwardLists, CaptureOperands, FlexScalars, Functions
from tkq.attention.flex.state import KeyTiles

REGISTERS = {1: (40, 240), 2: (24, 240)}  # of the producer, of the others: by how many these are


@dataclass(frozen=True)
class CaptureState:
    """Registers of a warpgroup. sums: of each load, see ``Sums``."""

    s: tk.RegTile  # scores, transposed: 64 keys x the tile's queries; as is dp
    dp: tk.RegTile
    ring: tk.Ring
    wg: Int32
    buffer: Any  # see ``Diagonals``
    sums: tuple


class CaptureBackward:
    """d captured[at] += P * (dO V' - rowsum(o * do) + dlse) * d score / d captured[at], of all scores that read it.

    Apart from the kernel of dQ, dK and dV, which has no registers left: S and dP are computed again. Tasks, lists and
    the producer are ``FlexBackward``'s; of the pipes there are q_pipe and do_pipe.

      warpgroup 0   the producer, 1 warp
      1, 2          S' = K Q', dP' = V dO' of 64 keys each, the derivatives' graph, ``Sums``; above 128 columns there is
                    room for the keys of warpgroup 1 alone"""

    def __init__(self, spec: CaptureSpec, config: BackwardConfig):
        self.spec, self.config = spec, config
        self.tiles, self.scheduler = Tiles.of(spec.of.attention, config), FlexScheduler(spec.of, config)
        self.producer = Producer(config, self.tiles, self.scheduler, None)
        self.functions, self.warpgroups = FlexScores(spec.of, config), self.tiles.of_keys  # those with keys
        self.sums = [Sums(spec.derivatives.graph, load) for load in spec.derivatives.loads]
        self.along = any(sums.kind == "diagonal" for sums in self.sums)

    @cute.jit
    def __call__(self, operands: BackwardOperands, workspace: cute.Tensor, lists: Optional[BackwardLists],
                 captures: CaptureOperands, scalars: FlexScalars, stream: cuda.CUstream):
        """As ``FlexBackward``."""
        spec, c, tiles_of = self.spec.of, self.config, self.tiles
        do, q, k, v, o, lse, dlse = operands
        layout = DenseBatch(q.shape[1], k.shape[1], q.shape[0], spec.q_per)
        heads, kv_heads, batches = q.shape[2], k.shape[2], q.shape[0]
        heads_per_kv = heads // kv_heads
        tiles, blocks = layout.slots(False, c.tile), layout.slots(True, c.block)
        tasks = blocks * kv_heads * batches
        row_bytes = spec.width * (2 * tiles_of.q.dtype.width // 8) * cutlass.min(heads_per_kv, Int32(16))
        parts = lay_out(spec.attention, c, workspace, tiles * heads * batches, kv_heads * batches)
        BackwardPreprocess(spec.attention, c)(Rows(do, o, lse, dlse), parts, layout, stream)
        listed, states = None, None
        if const_expr(lists is not None):
            listed, states = lists.queries, lists.states
        score, mask = captures.functions
        g = FlexGlobals(
            q=loads(q, tiles_of.q, False), do=loads(do, tiles_of.q, False), k=loads(k, tiles_of.kv, False),
            v=loads(v, tiles_of.kv, False), dk=None, dv=None, stats=parts.stats, acc=None, dkv_partials=None,
            dq_serial=None, next=None, tasks=tasks, layout=layout, left=Int32(0), right=Int32(0), heads=heads,
            kv_heads=kv_heads, heads_per_kv=heads_per_kv, splits_per_kv_head=None, tiles=tiles, scale=scalars.scale,
            l2_section=l2_section_of(q.shape[1], row_bytes, c.l2_section_bytes, kv_heads * batches),
            tail_heads=ceil_div(2 * scalars.num_sms, blocks), helper_warps=None,
            scores=Scores.of(scalars.scale, Float32(0.0), False),
            queries=KeyTiles(listed, spec.mask is not None, spec.full, spec.kv_per, spec.q_per, tiles),
            score=score, mask=mask, states=states, q_per=spec.q_per, slopes=captures.slopes,
            gradients=captures.gradients)
        self.kernel(g).launch(grid=[tasks, 1, 1], block=[(1 + self.warpgroups) * tk.WARPGROUP, 1, 1], stream=stream,
                              min_blocks_per_mp=1, use_pdl=True)

    def fake_arguments(self) -> tuple:
        """As ``FlexBackward.fake_arguments``."""
        spec = self.spec
        operands, _, workspace, lists, _, scalars = FlexBackward(spec.of, self.config).fake_arguments()
        functions = Functions(captured(spec.of.score), captured(spec.of.mask))
        return (operands, workspace, lists, CaptureOperands(
            functions, captured(spec.derivatives.graph), tuple(map(gradient, spec.ranks))), scalars)

    @cute.kernel
    def kernel(self, g: FlexGlobals):
        c, tiles, al, warps = self.config, self.tiles, tk.SharedAllocator(), 4 * self.warpgroups
        s = Shared(
            k=al.tile(tiles.kv, tiles.of_keys), v=al.tile(tiles.kv, tiles.of_keys), q=al.tile(tiles.q, c.stages),
            do=al.tile(tiles.q, c.stages), ds=None, stats=al.vector(2 * c.tile, c.stages), p=None, dq=None,
            dq_full=None, task=None, tasks=None, kv_full=al.semaphores(2), kv_empty=al.semaphores(2),
            q_pipe=al.pipe(c.stages, tiles.q.bytes + tiles.stats_bytes, warps),
            do_pipe=al.pipe(c.stages, tiles.q.bytes, warps), ds_pipe=None, p_pipe=None)

        buffers = al.vector(ROWS * PITCH, warps) if self.along else None

        def initialise():
            s.q_pipe.init()
            s.do_pipe.init()
            for i in range(2):
                tk.init(s.kv_full[i], 1)

        tk.init_block(initialise)
        few, many = REGISTERS[self.warpgroups]
        tk.assign((tk.Role(lambda _: self.producer.run(g, s), few, warps=1),
                   tk.Role(lambda wg: self.run(g, s, wg, buffers), many, warpgroups=self.warpgroups)))

    @cute.jit
    def run(self, g, s, wg, buffers):
        tile, buffer = self.config.tile, None
        if const_expr(self.along):
            buffer = buffers[None, tk.warp_id() % 4 + 4 * wg]
            Diagonals.clear(buffer)
        c = CaptureState(s=tk.rt_fl(tile), dp=tk.rt_fl(tile), ring=s.q_pipe.ring(), wg=wg, buffer=buffer,
                         sums=tuple([x.registers() for x in self.sums]))
        t = self.scheduler.task(g, s)
        for i in cutlass.range_constexpr(2):
            tk.wait(s.kv_full[i], 0)
        for h in cutlass.range(g.heads_per_kv, unroll=1):
            self.of_head(g, s, t, c, h)

    @cute.jit
    def of_head(self, g, s, t, c, h):
        for i in cutlass.range_constexpr(len(self.sums)):
            self.sums[i].begin(c.sums[i])
        self.scheduler.visit_head(g, s, t, c, h, self.step)
        self.finish(g, t, c, self.scheduler.query_head(g, t, h))

    def finish(self, g, t, c, head):
        places = self.functions.places(Place(t, c.wg, head, Int32(0)))
        for i, load in enumerate(self.spec.derivatives.loads):
            self.sums[i].end(c.sums[i], g.gradients[load.gradient], g.slopes, lambda r: places(r, 0))

    @cute.jit
    def step(self, g, s, t, c, m, masked: cutlass.Constexpr):
        s.q_pipe.wait(c.ring)
        tk.mm_ABt(c.s, s.k[c.wg], s.q[c.ring.stage])
        s.do_pipe.wait(c.ring)
        tk.mm_ABt(c.dp, s.v[c.wg], s.do[c.ring.stage])
        tk.mma_wait(0)
        self.add(g, s, t, c, m, masked)
        s.q_pipe.release(c.ring)
        s.do_pipe.release(c.ring)
        c.ring.advance()

    def add(self, g, s, t, c, m, masked):
        joint, sums = Emitted(self.spec.derivatives.graph, g.slopes), []
        of_warp = Diagonals(c.buffer, lambda d: self.on_diagonal(t, c, m, d))
        for i, load in enumerate(self.spec.derivatives.loads):
            sums.append(self.sums[i].tile(c.sums[i], g.gradients[load.gradient], joint, of_warp))
        for r, j, inputs, ds in self.elements(g, s, t, c, m, masked):
            for load, into in zip(self.spec.derivatives.loads, sums):
                product = ds * joint.node_at(load.factor, **inputs)  # of a dS of 0 it is 0, whatever the factor
                into.take(r, j, inputs, select(ds == Float32(0.0), Float32(0.0), product))
        for into in sums:
            into.close()

    def on_diagonal(self, t, c, m, d):
        """Inputs of the graphs at the warp's first key, and d queries behind the tile's first."""
        found = self.functions.places(Place(t, c.wg, *m))(0, 0)
        key, query = found["kv"][0] - tk.lane_id() // 4, found["q"][0] - tk.first_col()
        return {**found, "kv": (key, 0), "q": (query + d, 0)}

    def elements(self, g, s, t, c, m, masked):
        """(r, j, inputs of the graphs, dS), along the diagonals of the tile."""
        of, at = self.spec.of, Place(t, c.wg, *m)
        places, score = self.functions.places(at), Emitted(of.score, g.score)
        lse, delta = (stats_of(s, c.ring, which, self.config.tile) for which in range(2))
        seen = self.functions.look(g, at) if masked else None
        alive = t.rows_k - self.functions.first_key(t, c.wg)
        there = [tk.first_row() + 8 * r < alive for r in range(2)]
        for r, j, column in along_diagonals(self.config.tile):
            inputs = {**places(r, column), "score": (c.s.rows_view[r, j] * g.scale, (r, column))}
            x = score.at(**inputs)
            x = select(x < Float32(LARGEST), x, Float32(LARGEST))
            e = cute.math.exp2(cute.math.fma(x, Float32(tk.LOG2E), lse.tensor[j]), fastmath=True)
            e = chosen(seen, r, j, e, 0.0) if masked else e
            ds = e * (c.dp.rows_view[r, j] + delta.tensor[j])
            yield r, j, inputs, select(there[r] & (e != Float32(0.0)), ds, Float32(0.0))


def along_diagonals(columns):
    """(r, j, column beside the thread's first) of a thread's elements in a tile: those of equal query - key behind each
    other."""
    found = ((r, j, 8 * (j // 2) + j % 2) for r in range(2) for j in range(columns // 4))
    return sorted(found, key=lambda at: (at[2] - 8 * at[0], at[0]))
