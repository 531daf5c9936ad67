"""Flash attention backward of packed sequences, with the statistics of most rows made under the products too."""
from dataclasses import fields
from typing import Any, NamedTuple, Optional

import cuda.bindings.driver as cuda
import cutlass
import cutlass.cute as cute
from cutlass import Constexpr, Float32, Int32, Int64, const_expr
from cutlass._mlir.dialects import llvm
from cutlass.cutlass_dsl import dsl_user_op

import tkq.tile as tk
from tkq.attention import backward
from tkq.attention.backward import AttentionBackward
from tkq.attention.backward_background import FINISHED, ZEROED, BackwardBackground, Counters
from tkq.attention.backward_math import Scores
from tkq.attention.backward_packed_config import PackedConfig
from tkq.attention.backward_pre import THREADS, VECTOR, BackwardPre, Rows, Workspace
from tkq.attention.backward_sequences import Ragged, in_sequences, loads, piece, with_batch
from tkq.attention.backward_spec import BackwardSpec
from tkq.attention.backward_split import load_acquire
from tkq.attention.backward_state import Globals, Numbers, Task
from tkq.attention.backward_tasks import claim, values_of
from tkq.attention.launch import BackwardOperands, Gradients, Sequences
from tkq.attention.ranges import ceil_div
from tkq.tile import WARPGROUP

WARP = 32


@dsl_user_op
def rest(nanoseconds: int, *, loc=None, ip=None):
    """Let a warp do nothing for about so long."""
    llvm.inline_asm(None, [], f"nanosleep.u32 {nanoseconds};", "", has_side_effects=True, is_align_stack=False,
                    asm_dialect=llvm.AsmDialect.AD_ATT, loc=loc, ip=ip)


class PackedBackground(NamedTuple):
    """As ``Background``. rows: of which the statistics are. known: tiles in order whose statistics are there."""

    dq: cute.Tensor
    counters: Counters
    lead: Int32
    rows: Rows
    known: Int32


class PreparesTiles(BackwardBackground):
    """Zeroes a tile's accumulator and makes its statistics. ``ready`` counts tiles for which both are there."""

    def __init__(self, spec: BackwardSpec, config: PackedConfig):
        super().__init__(spec, config)
        self.pre = BackwardPre(spec, config)

    @cute.jit
    def run(self, g):
        counters = g.background.counters
        tiles, zeroed = cute.size(g.acc, mode=[0]), Int32(0)
        cute.arch.griddepcontrol_wait()  # the counters are zero
        n = claim(counters.next, FINISHED)
        while n < tiles:
            goal = cutlass.min(n + self.lead(g, self.tile(g, n)), tiles)
            while zeroed < goal:
                zeroed = claim(counters.next, ZEROED)
                if zeroed < tiles:
                    self.prepare(g, zeroed)
                zeroed = zeroed + 1
            at = self.tile(g, n)  # again: it would take registers meanwhile
            head = self.head(g, at)
            self.await_patiently(counters.ready, head, self.tiles_of(g, at.rows_q))
            self.await_patiently(counters.added, head, 4 * self.blocks(at.rows_k))
            self.convert(g, at)
            n = claim(counters.next, FINISHED)

    @cute.jit
    def await_patiently(self, counts, i, wanted):
        """A whole warp, which is not in a hurry."""
        found = load_acquire(counts, i)
        while found < wanted:
            if const_expr(self.config.sleep):
                rest(self.config.sleep)
            found = load_acquire(counts, i)

    @cute.jit
    def prepare(self, g, n):
        if n >= g.background.known:
            self.statistics(g, self.tile(g, n))
        self.zero(g, self.tile(g, n))

    @cute.jit
    def statistics(self, g, at):
        """As ``BackwardPre``. Lane j of those that share a row writes the j'th of 32 rows' that they go through."""
        tile, lanes, rows = self.config.tile, self.pre.lanes, g.background.rows
        stats, together, lane = g.stats[self.number(g, at), None], WARP // lanes, tk.lane_id() % lanes
        mine = tk.lane_id() // lanes  # of the rows that are read together
        first, end = at.start_q + at.number * tile, at.start_q + in_sequences(g.places, at)
        shares = rows.o.shape[3] // VECTOR
        for k in cutlass.range(tile // WARP, unroll=1):
            row = k * WARP + lane * together + mine
            total = Float32(0.0)
            for i in cutlass.range(lanes, unroll=2):
                source = cutlass.max(cutlass.min(first + k * WARP + i * together + mine, end - 1), 0)
                x, y = [self.share(z, at, source, cutlass.min(lane, shares - 1)) for z in (rows.o, rows.do)]
                found = self.pre.row_sum(x, y, lane < shares)
                total = cutlass.select_(i == lane, found, total)
            self.pre.write(rows, stats, (at.batch, at.head, first, end), row, total)

    def share(self, x, at, row, i):
        to = cute.make_rmem_tensor((VECTOR,), x.element_type)
        cute.autovec_copy(cute.local_tile(x[at.batch, row, at.head, None], (VECTOR,), (i,)), to)
        return to


class FirstTiles(BackwardPre):
    """The statistics of the first tiles in the order of ``BackwardBackground``; counters = 0."""

    def __init__(self, spec: BackwardSpec, config: PackedConfig):
        super().__init__(spec, config)
        self.longest_first = config.longest_first

    @cute.jit
    def __call__(self, rows: Rows, workspace: Workspace, places, known: Int32, stream: cuda.CUstream):
        self.kernel(rows, workspace, places).launch(grid=[known, 1, 1], block=[THREADS, 1, 1], stream=stream)

    @cute.kernel
    def kernel(self, rows: Rows, workspace: Workspace, places: Any):
        cute.arch.griddepcontrol_launch_dependents()
        n, t = Int32(cute.arch.block_idx()[0]), Int32(cute.arch.thread_idx()[0])
        counters, heads = workspace.counters, rows.lse.shape[1]
        for i in cutlass.range(n * THREADS + t, cute.size(counters), Int32(cute.arch.grid_dim()[0]) * THREADS):
            counters[i] = Int32(0)
        at = places.at(False, self.tile, n, heads, lambda index, slots, *_: (index // slots, index % slots),
                       self.longest_first)
        tiles = places.slots(False, self.tile)
        number = Int64(places.first_tile(at, self.tile, heads, tiles)) + Int64(at.head) * tiles + at.number
        place = at.batch, at.head, at.start_q + at.number * self.tile, at.start_q + in_sequences(places, at)
        stats, sums = workspace.stats[number, None], self.row_sums(rows, place, t)
        for i in cutlass.range_constexpr(self.tile // self.together):
            if t % self.lanes == 0:
                self.write(rows, stats, place, i * self.together + t // self.lanes, sums[i])


class PackedBackward(AttentionBackward):
    """``AttentionBackward`` of packed sequences with background, which makes statistics too. So the producer waits for
    them, as the dQ warps do for zeroes."""

    def __init__(self, spec: BackwardSpec, config: PackedConfig):
        super().__init__(spec, config)
        if not spec.varlen:
            raise NotImplementedError("attention backward: a PackedConfig without varlen")
        self.background = PreparesTiles(spec, config)

    @cute.jit
    def __call__(self, operands: BackwardOperands, gradients: Gradients, workspace: cute.Tensor,
                 sequences: Optional[Sequences], numbers: Numbers, stream: cuda.CUstream):
        """As ``BackwardBase``'s."""
        spec, c = self.spec, self.config
        do, q, k, v, o, lse, dlse = operands
        dq, dk, dv = gradients
        places = Ragged(sequences, q.shape[0], k.shape[0])
        heads, kv_heads = q.shape[-2], k.shape[-2]
        tiles, tasks = places.slots(False, c.tile), places.slots(True, c.block) * kv_heads
        parts = self.parts_of(workspace, tiles * heads, kv_heads * places.sequences, 0)
        rows = Rows(*[None if const_expr(x is None) else with_batch(x, True) for x in (do, o, lse, dlse)])
        known = cutlass.min(tiles * heads, c.known * numbers.processors)
        FirstTiles(spec, c)(rows, parts, places, known, stream)
        background = PackedBackground(with_batch(dq, True), Counters.of(parts.counters),
                                      2 * numbers.processors * ceil_div(c.block, c.tile), rows, known)
        g = Globals(
            q=loads(q, self.q_tile, True), do=loads(do, self.q_tile, True),
            k=loads(k, self.kv_tile, True), v=loads(v, self.kv_tile, True),
            dk=self.output(dk), dv=self.output(dv), stats=parts.stats, acc=parts.acc, handed=None, chain=None,
            next=parts.counters, tasks=tasks, places=places, left=numbers.left, right=numbers.right, heads=heads,
            kv_heads=kv_heads, heads_per_kv=heads // kv_heads, share=None, tiles=tiles, scale=numbers.scale,
            section=spec.width * 8 * cutlass.min(heads // kv_heads, Int32(16)), tail=Int32(0), background=background,
            scores=Scores.of(numbers.scale, numbers.softcap, spec.softcap))
        grid = tk.blocks_for("dynamic", tasks, numbers.processors)
        self.kernel(g).launch(grid=[grid, 1, 1], block=[self.warpgroups * WARPGROUP, 1, 1], stream=stream,
                              min_blocks_per_mp=1, use_pdl=True)

    # ---- dQ on its way out -----------------------------------------------------------------------

    def dq_staging(self, al):
        quads, rooms = self.config.dq_cols // 8, self.config.rooms
        return al.allocate_tensor(Float32, cute.make_layout((4, WARP, quads, 4, rooms)), 128)

    @cute.jit
    def add_task(self, g, s, t, again: Constexpr, dq, ring, kv):
        """As ``BackwardAdding``'s. K is free when the last product is done, before that has been added."""
        tk.wait(s.kv_full[0], kv.phase)
        self.background.await_ready(g, t)
        last = g.heads_per_kv * (t.end - t.first) - 1

        def add(i, h, m):
            s.ds_pipe.wait(ring)
            self.add_dq(g, s, dq, ring, self.tile_number(g, t, self.query_head(g, t, h), m), i == last)
            ring.advance()

        self.each_tile(g, t, add)
        self.done_if(s, last < 0)
        self.next_keys(kv)
        self.background.sign_off(g, again())

    @cute.jit
    def add_dq(self, g, s, dq, ring, number, last):
        """The accumulator's tile ``number`` += dS K. last: of the task's."""
        rows, cols = self.config.dq_parts(self.spec.width)
        part_bytes = 64 * self.config.dq_cols * 4
        address = g.acc.iterator.toint() + number * (rows * cols * part_bytes)
        for i in cutlass.range_constexpr(rows * cols):
            self.make_dq(s, dq, ring, a_part=i // cols, b_part=i % cols)
            if const_expr(i == rows * cols - 1):
                s.ds_pipe.release(ring)
                self.done_if(s, last)
            self.add_from_room(s, dq, address + i * part_bytes, i % self.config.rooms)

    @cute.jit
    def done_if(self, s, condition):
        """With K."""
        if condition:
            self.done_with(s, 0)

    @cute.jit
    def add_from_room(self, s, dq, address, number: Constexpr[int]):
        """By way of room ``number``, each warp by itself. The rooms are used one after the other."""
        warp, lane, quads = tk.warp_id() % 4, tk.lane_id(), self.config.dq_cols // 8
        tk.store_wait(self.config.rooms - 1)  # what was there has left
        cute.arch.sync_warp()
        room = s.dq[None, None, None, warp, number]
        mine = cute.make_tensor(dq.tensor.iterator, cute.make_layout((4, quads)))
        for j in cutlass.range_constexpr(quads):
            cute.autovec_copy(mine[None, j], room[None, lane, j])
        tk.publish()
        cute.arch.sync_warp()
        if lane == 0:
            tk.bulk_add(address + warp * (quads * 512), room.iterator.toint(), quads * 512)
            tk.bulk_commit()

    # ---- producer ------------------------------------------------------------------------------

    @cute.jit
    def one_after_the_other(self, g, s, ring):
        """V, which is free first, then the first queries, then K."""
        kv, box = tk.ring(1), s.tasks.ring()
        cute.arch.griddepcontrol_wait()  # the counters are zero
        number = claim(g.next, 0)
        while number < g.tasks:
            t = self.find_task(g, number)
            if self.first_key(t) < t.rows_k:  # else the slot has no key
                if const_expr(self.config.ahead):
                    self.bring_keys(g, s, t)
                s.tasks.post(box, *values_of(t))
                tk.wait(s.kv_empty[1], kv.phase ^ 1)
                self.load_keys(g, s, t, 1)
                self.background.await_ready(g, t)
                self.load_queries(g, s, t, ring, kv)
                kv.advance()
            number = claim(g.next, 0)
        s.tasks.post(box, *[Int32(0) for _ in fields(Task)])

    def bring_keys(self, g, s, t):
        """K and V, into L2."""
        for tile, src in ((s.v, g.v), (s.k, g.k)):
            src = piece(g.places, src, t.rows_k)
            for i in range(self.halves):
                coord = t.batch_k, self.kv_head(g, t), self.halves * t.block + i, 0
                cute.prefetch(src.atom, src._partition("load_async", tile[i], coord)[1])

    @cute.jit
    def each_tile(self, g, t, work: Constexpr):
        """As ``BackwardBase``'s, i counts. Blocks side by side ``apart`` do not ask for the same rows, or add to them,
        at once."""
        tiles, begin = t.end - t.first, Int32(0)
        if const_expr(self.config.apart and not (self.spec.right or self.spec.left)):
            begin = t.block * (self.config.block // self.config.tile) % cutlass.max(tiles, 1)
        for h in cutlass.range(g.heads_per_kv, unroll=1):
            for i in cutlass.range(tiles, unroll=1):
                m = begin + i
                work(h * tiles + i, h, t.first + cutlass.select_(m < tiles, m, m - tiles))


def build(spec: BackwardSpec, config: PackedConfig):
    """As ``backward.build``."""
    return PackedBackward(spec, config), backward.build(spec, config)[1]
