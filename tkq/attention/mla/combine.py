"""The merge of the parts of each task that several blocks share, in the order of its keys: the same bits always."""
from typing import NamedTuple

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32, Int64, const_expr

import tkq.tile as tk
from tkq.attention.decode import words
from tkq.attention.decode.plan import ROWS
from tkq.attention.decode.walk import Walk
from tkq.attention.mla.spec import HEAD_DIM_V
from tkq.attention.mla.state import Globals
from tkq.attention.mla.tiles import place_of, rows_of

INF = Float32.inf
THREADS, WARPS, WARP = 256, 8, 32
LAYERS = 4  # blocks of threads for each part of the plan
COLUMNS = 128  # of a row, four to a lane, that a block merges at a time; each warp has some of the splits
TOGETHER = 8  # parts that a thread has on their way
FEW = 16  # splits up to which a warp merges them alone
FEW_PANELS, FEW_TOGETHER = 2, 4  # times COLUMNS that it merges at a time; parts
NORM, TOP, SUMS = 0, 1, 2  # of what a lane sums up: the norm, the largest log-sum-exp; from there on columns
SUMMED = (NORM, *range(SUMS, SUMS + 4))  # of one panel: what is rescaled


class Shared(NamedTuple):
    """owners: tasks of many splits, of few, found by the parts in which they begin. counts: their number, by warps.
    sums: of each warp, what each lane sums up."""

    owners: cute.Tensor
    counts: cute.Tensor
    sums: cute.Tensor


class Task(NamedTuple):
    """What `decode.walk.Walk.slot` and `rows_of` look at; ``splits`` of it are to be merged. row: its tile; then one of
    its packed rows."""

    batch: Int32
    head: Int32
    row: Int32
    begin: Int32
    others: Int32
    splits: Int32


class Combine:
    """Of all (task, row, 128 columns). Where a task has many splits, a block takes some: its eight warps a share of the
    splits each, and their sums are added up in order. Where it has few, each warp takes some, and no warp waits."""

    def __init__(self, spec, config):
        self.spec, self.config, self.walk, self.dtype = spec, config, Walk(spec), tk.element_type(spec.dtype)

    def launch(self, g, parts, stream):
        self.kernel(g).launch(grid=[parts, LAYERS * g.together, 1], block=[THREADS, 1, 1], stream=stream,
                              use_pdl=self.config.pdl)

    @cute.kernel
    def kernel(self, g: Globals):
        al = tk.SharedAllocator()
        smem = Shared(al.vector(words.MOST_PARTS, 2, Int32), al.vector(WARPS, 2, Int32), al.vector(6 * WARP, WARPS))
        matches, found = self.walk.matches(g), [Int32(0), Int32(0)]
        if matches:
            found = self.tasks(g, smem)
        if const_expr(self.config.pdl):  # the plan was there before the blocks before launched this kernel
            me = cute.arch.block_idx()
            cute.arch.griddepcontrol_launch_dependents()
            # Without an item a block leaves at once; one that stays lets this kernel end behind the one before.
            if (me[0] + me[1] == 0) | self.begins(g, found[0], 0) | self.begins(g, found[1], 1):
                cute.arch.griddepcontrol_wait()
        for few in cutlass.range_constexpr(2):
            self.merge_all(g, smem, found[few], few)

    def begins(self, g, found, few):
        """Has this block an item?"""
        me, blocks = cute.arch.block_idx(), cute.arch.grid_dim()
        return (me[1] * blocks[0] + me[0]) * (WARPS if few else 1) < found * self.each(g, few)

    def each(self, g, few):
        """Items of a task."""
        return g.partial.shape[1] * (HEAD_DIM_V // self.columns(few))

    def columns(self, few):
        return COLUMNS * FEW_PANELS if few else COLUMNS

    @cute.jit
    def tasks(self, g, smem):
        """How many tasks of many splits there are, how many of few; none of a plan of another call."""
        if const_expr(self.spec.fixed_splits):
            tasks = g.batch * g.tiles
            found = [cutlass.select_(self.walk.most_splits(g) > FEW, tasks, Int32(0)), tasks]
        else:
            found = self.find(g, smem, cute.arch.grid_dim()[0])
        return found

    @cute.jit
    def merge_all(self, g, smem, found, few: cutlass.Constexpr):
        """few: a warp has an item, else a block."""
        me, blocks, warps = cute.arch.block_idx(), cute.arch.grid_dim(), WARPS if few else 1
        columns, each = self.columns(few), self.each(g, few)
        items = HEAD_DIM_V // columns
        rows = g.partial.shape[1] // g.together
        first = (me[1] * blocks[0] + me[0]) * warps + (tk.warp_id() if few else 0)
        for item in cutlass.range(first, found * each, blocks[0] * blocks[1] * warps, unroll=1):
            t = self.fixed(g, item // each) if const_expr(self.spec.fixed_splits) else self.begun(
                g, smem.owners[item // each, few])
            row, column = item % each // items, item % items * columns
            t = t._replace(row=(t.row * g.together + row // rows) * ROWS + row % rows)
            if self.kinds(t.splits)[few] and t.row < g.queries * g.group:
                place = row, column + tk.lane_id() * 4
                if const_expr(few):
                    self.merge_few(g, t, place)
                else:
                    self.merge_many(g, smem, t, place)

    @cute.jit
    def find(self, g, smem, parts):
        """How many parts begin a task of many splits, how many one of few; which, in order, in ``smem.owners``."""
        total, thread, warp = [Int32(0), Int32(0)], cute.arch.thread_idx()[0], tk.warp_id()
        for first in cutlass.range(0, parts, THREADS, unroll=1):
            part, splits = first + thread, Int32(1)
            if part < parts:
                splits = self.begun(g, part).splits
            kinds = self.kinds(splits)
            votes = [cute.arch.vote_ballot_sync(kind) for kind in kinds]
            if tk.lane_id() == 0:
                for i in cutlass.range_constexpr(2):
                    smem.counts[warp, i] = Int32(cute.arch.popc(votes[i]))
            tk.sync_block()
            for i in cutlass.range_constexpr(2):
                before = total[i]
                for w in cutlass.range_constexpr(WARPS):
                    count = smem.counts[w, i]
                    before = cutlass.select_(w < warp, before + count, before)
                    total[i] += count
                below = Int32(votes[i]) & ((Int32(1) << tk.lane_id()) - 1)
                if kinds[i]:
                    smem.owners[before + cute.arch.popc(below), i] = part
            tk.sync_block()
        return total

    def kinds(self, splits):
        """Are they many, are they few? By the task's own alone: with fixed splits no other task changes its bits."""
        return splits > FEW, (splits > 1) & (splits <= FEW)

    def begun(self, g, part):
        """The task that begins in the part and ends behind it; one split where there is none. With its keys it begins:
        the positions before them, the task's own, may lie in the part before."""
        size, total, parts = g.plan[words.PART], g.plan[words.TOTAL], cute.arch.grid_dim()[0]
        x = (part + 1) * size
        some = (part + 1 < parts) & (x < total)
        record = [g.plan[words.STARTS + words.RECORD * cutlass.select_(some, part + 1, Int32(0)) + i] for i in range(4)]
        batch, length, prefix, weight = record
        task = (x - prefix) // cutlass.max(weight, 1)
        start, overhead = prefix + task * weight, g.plan[words.OVERHEAD]
        head = (start + overhead) // cutlass.max(size, 1)
        some = some & (head == part) & (start < x) & (length >= 0) & (length <= g.capacity)
        splits = cutlass.select_(some, (start + weight - 1) // cutlass.max(size, 1) - head + 1, Int32(1))
        return Task(batch, Int32(0), task % g.tiles, 2 * head + 1, 2 * (head + 1), splits)

    def fixed(self, g, number):
        """Each task, with fixed splits."""
        batch = number // g.tiles
        length, prefix = g.plan[words.LENGTHS + batch], words.prefix(g.batch) + batch
        weight = (g.plan[prefix + 1] - g.plan[prefix]) // g.tiles
        begin = number * self.walk.most_splits(g)
        splits = cutlass.select_((length >= 0) & (length <= g.capacity), weight, Int32(1))
        return Task(batch, Int32(0), number % g.tiles, begin, begin + 1, splits)

    @cute.jit
    def merge_many(self, g, smem, t, place):
        """A block: four columns of a row to a lane, of a share of the splits to a warp."""
        warp, lane, sums = tk.warp_id(), tk.lane_id(), self.empty(1)
        share = (t.splits + WARPS - 1) // WARPS
        end = cutlass.min((warp + 1) * share, t.splits)
        for first in cutlass.range(warp * share, end, TOGETHER, unroll=1):
            self.add(g, t, (first, end), place, sums, TOGETHER)
        for e in cutlass.range_constexpr(6):
            smem.sums[e * WARP + lane, warp] = sums[e]
        tk.sync_block()
        if warp == 0:
            sums.fill(0.0)
            sums[TOP] = Float32(-INF)
            for w in cutlass.range_constexpr(WARPS):
                sums[TOP] = cute.arch.fmax(sums[TOP], smem.sums[TOP * WARP + lane, w])
            base = cutlass.select_(sums[TOP] == -INF, Float32(0.0), sums[TOP])
            for w in cutlass.range_constexpr(WARPS):
                weight = cute.math.exp2(smem.sums[TOP * WARP + lane, w] - base, fastmath=True)
                for e in SUMMED:
                    sums[e] = cute.math.fma(weight, smem.sums[e * WARP + lane, w], sums[e])
            self.end(g, t, place, sums)
        tk.sync_block()

    @cute.jit
    def merge_few(self, g, t, place):
        """A warp: some columns of a row to a lane, of all splits."""
        sums = self.empty(FEW_PANELS)
        for first in cutlass.range(0, t.splits, FEW_TOGETHER, unroll=1):
            self.add(g, t, (first, t.splits), place, sums, FEW_TOGETHER)
        self.end(g, t, place, sums)

    def empty(self, panels):
        """Of four columns of each panel."""
        sums = cute.make_rmem_tensor((SUMS + 4 * panels,), Float32)
        sums.fill(0.0)
        sums[TOP] = Float32(-INF)
        return sums

    @cute.jit
    def end(self, g, t, place, sums):
        """What was summed up, divided by the norm; and the log-sum-exp."""
        lse_out, norm = g.lse, sums[NORM]
        base = cutlass.select_(sums[TOP] == -INF, Float32(0.0), sums[TOP])
        lse = Float32(-INF) if norm == Float32(0.0) else base + cute.math.log2(norm, fastmath=True)
        inverse = Float32(0.0) if norm == Float32(0.0) else cute.arch.rcp_approx(norm)
        self.row(g, t, place, sums, inverse)
        if const_expr(self.spec.lse):
            if place[1] == 0:
                sequence, query = place_of(g, t)
                lse_out[sequence, t.row % g.group, query + t.row // g.group] = lse * tk.LN2

    def add(self, g, t, span, place, sums, together):
        """``together`` splits' parts: all loads first. Behind the last split its part counts for nothing."""
        (first, end), (row, column), rows, parts = span, place, g.partial.shape[1], []
        columns = cute.size(sums) - SUMS
        for j in range(together):
            slot = Int64(self.walk.slot(g, t, cutlass.min(first + j, end - 1))) * rows + row
            found = cute.make_rmem_tensor((4, columns // 4), Float32)
            for panel in range(columns // 4):
                at = (g.partial.iterator + (slot * HEAD_DIM_V + column + panel * COLUMNS)).align(16)
                cute.autovec_copy(cute.make_tensor(at, cute.make_layout(4)), found[None, panel])
            lse = cute.make_tensor(g.partial_lse.iterator + slot, cute.make_layout(1))[0]
            parts.append((cutlass.select_(first + j < end, lse, Float32(-INF)), found))
        top = sums[TOP]
        for lse, _ in parts:
            top = cute.arch.fmax(top, lse)
        base = cutlass.select_(top == -INF, Float32(0.0), top)
        before = cute.math.exp2(sums[TOP] - base, fastmath=True)
        sums[TOP] = top
        for e in (NORM, *range(SUMS, SUMS + columns)):
            sums[e] = sums[e] * before
        for lse, found in parts:
            weight = cute.math.exp2(lse - base, fastmath=True)
            sums[NORM] = sums[NORM] + weight
            for e in range(columns):
                sums[SUMS + e] = cute.math.fma(weight, found[e % 4, e // 4], sums[SUMS + e])

    def row(self, g, t, place, sums, factor):
        """Four columns of each panel of O: beside each other, or, as fragments have them, two and the two 8 behind."""
        o, lane = rows_of(g.o, g, t), place[1] % COLUMNS // 4
        first = place[1] - 4 * lane + (lane // 4 * 16 + lane % 4 * 2 if self.config.partials_in_fragments else 4 * lane)
        each, step = (2, 8) if self.config.partials_in_fragments else (4, 4)
        for panel in range((cute.size(sums) - SUMS) // 4):
            for part in range(4 // each):
                narrow = cute.make_rmem_tensor((each,), self.dtype)
                for e in range(each):
                    narrow[e] = self.dtype(sums[SUMS + 4 * panel + each * part + e] * factor)
                at = o.iterator + (cute.crd2idx((t.row, 0), o.layout) + first + panel * COLUMNS + part * step)
                cute.autovec_copy(narrow, cute.make_tensor(at.align(2 * each), cute.make_layout(each)))
