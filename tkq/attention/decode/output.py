"""What a segment of a task comes to: the task's result, or a part of it, and the merge of the parts."""
import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32, Int64, const_expr

import tkq.tile as tk
from tkq.attention.decode import words
from tkq.attention.decode.plan import ROWS
from tkq.attention.decode.walk import Walk

INF = Float32.inf
TOGETHER = 16  # splits whose parts are on their way at a time
NORM, TOP = 4, 5


class Output:
    """threads: that call it together, from a multiple of their number on."""

    def __init__(self, spec, threads=tk.WARPGROUP):
        self.spec, self.dtype, self.dv, self.walk = spec, tk.element_type(spec.dtype), spec.head_dim_v, Walk(spec)
        self.threads = threads

    def thread(self):
        return cute.arch.thread_idx()[0] % self.threads

    @cute.jit
    def write(self, g, smem, regs, s):
        """O and the log-sum-exp of a segment; norm is the sum over the row."""
        lse = tk.rv()
        whole = s.splits == 1
        for r in cutlass.range_constexpr(2):
            norm, top = regs.norm.tensor[r], regs.max.tensor[r]
            if regs.fault[0] != 0:
                norm = Float32.nan
            found = Float32(-INF) if norm == Float32(0.0) else top + cute.math.log2(norm, fastmath=True)
            inverse = Float32(0.0) if norm == Float32(0.0) else cute.arch.rcp_approx(norm)
            if const_expr(self.spec.sinks is not None):
                weight, both = self.with_sink(g, s, tk.first_row() + 8 * r, found)
                inverse = cutlass.select_(whole, inverse * weight, inverse)
                found = cutlass.select_(whole, both, found)
            regs.norm.tensor[r] = inverse
            lse.tensor[r] = found
        tk.mul_row(regs.o, regs.o, regs.norm)
        if const_expr(regs.of_v is not None):
            tk.mul(regs.o, regs.o, regs.of_v[0])  # by itself: its product with one over norm may be too small for fp32
        if whole:
            self.whole(g, regs, lse, s)
        else:
            self.part(g, regs, lse, s, self.walk.slot(g, s, s.split))
            self.leave(g, smem, s)

    @cute.jit
    def leave(self, g, smem, s):
        """After a part: who is last merges all, or the first one says that the result lies in parts."""
        if const_expr(self.spec.in_parts):
            if s.split == 0:
                apart = tk.rv()
                tk.fill(apart, INF)
                self.store_lse(g, apart, s)
        else:
            if self.arrive(g, smem.ticket, s) == s.splits - 1:
                self.merge(g, s)

    @cute.jit
    def arrive(self, g, shared, s):
        """How many splits of the task came before; who is last sees their results."""
        tk.sync(1, self.threads)
        if self.thread() == 0:
            counter = g.plan.iterator.toint() + Int64(words.counters(g.batch) + s.task) * 4
            shared[0, 0] = Int32(tk.grid_ticket(counter, s.splits))
        tk.sync(1, self.threads)
        return shared[0, 0]

    def with_sink(self, g, s, row, lse):
        """(factor of O, log-sum-exp) with one more logit; all base 2. row: of the tile."""
        row = cutlass.max(cutlass.min(s.tile * ROWS + row, s.queries * g.group - 1), 0)
        sink = Float32(g.sinks[s.head * g.group + row % g.group]) * tk.LOG2E
        top = cute.arch.fmax(lse, sink)
        top = cutlass.select_(top == -INF, Float32(0.0), top)
        total = cute.math.exp2(lse - top, fastmath=True) + cute.math.exp2(sink - top, fastmath=True)
        both = cutlass.select_(total == Float32(0.0), Float32(-INF), top + cute.math.log2(total, fastmath=True))
        weight = cutlass.select_(lse == -INF, Float32(0.0), cute.math.exp2(lse - both, fastmath=True))
        return weight, both

    @cute.jit
    def whole(self, g, regs, lse, s):
        tk.store_narrow(rows_of(g.o, g, s), regs.o, s.tile * ROWS, s.queries * g.group)
        if const_expr(self.spec.lse):
            tk.mul(lse, lse, tk.LN2)
            self.store_lse(g, lse, s)

    def store_lse(self, g, lse, s):
        batch, head, query = g.lse.stride
        at = g.lse.iterator + Int64(s.place) * batch + Int64(s.head * g.group) * head + Int64(s.row) * query
        rows = cute.make_tensor(at, cute.make_layout(((g.group, g.queries),), stride=((head, query),)))
        tk.store_rows(rows, lse, s.tile * ROWS, s.queries * g.group)

    @cute.jit
    def part(self, g, regs, lse, s, slot):
        """A split's result into its slot, in fp32."""
        rows = g.partial.shape[1]
        view = regs.o.rows_view
        here = cutlass.min(rows, s.queries * g.group - s.tile * ROWS)
        for r in cutlass.range_constexpr(2):
            row = tk.first_row() + 8 * r
            if row < here:
                at = g.partial.iterator + (Int64(slot) * rows + row) * self.dv
                for j in cutlass.range_constexpr(self.dv // 8):
                    two = cute.make_rmem_tensor((2,), Float32)
                    two[0] = view[r, 2 * j]
                    two[1] = view[r, 2 * j + 1]
                    to = (at + (8 * j + tk.first_col())).align(8)
                    cute.autovec_copy(two, cute.make_tensor(to, cute.make_layout(2)))
        tk.store_rows(cute.make_tensor(g.partial_lse.iterator + Int64(slot) * rows, cute.make_layout(rows)), lse, 0,
                      here)

    @cute.jit
    def merge(self, g, s):
        """All splits of a task, in the order of the keys: four columns of a row to a thread."""
        rows, fours, out = g.partial.shape[1], self.dv // 4, g.lse
        here = cutlass.min(rows, s.queries * g.group - s.tile * ROWS)
        for item in cutlass.range(self.thread(), here * fours, self.threads, unroll=1):
            row, column = item // fours, item % fours * 4
            sums = cute.make_rmem_tensor((6,), Float32)  # of four columns, the norm, the largest log-sum-exp
            sums.fill(0.0)
            sums[TOP] = Float32(-INF)
            for first in cutlass.range(0, s.splits, TOGETHER, unroll=1):
                self.add(g, s, first, (row, column), sums)
            norm, top = sums[NORM], cutlass.select_(sums[TOP] == -INF, Float32(0.0), sums[TOP])
            lse = Float32(-INF) if norm == Float32(0.0) else top + cute.math.log2(norm, fastmath=True)
            inverse = Float32(0.0) if norm == Float32(0.0) else cute.arch.rcp_approx(norm)
            if const_expr(self.spec.sinks is not None):
                weight, lse = self.with_sink(g, s, row, lse)
                inverse = inverse * weight
            self.row(g, s, (row, column), sums, inverse)
            if const_expr(self.spec.lse):
                if column == 0:
                    at = s.tile * ROWS + row
                    out[s.place, s.head * g.group + at % g.group, s.row + at // g.group] = lse * tk.LN2

    def add(self, g, s, first, place, sums):
        """Some splits' parts of four columns: all loads first. Behind the last split its part counts for nothing."""
        (row, column), rows, parts = place, g.partial.shape[1], []
        for j in range(TOGETHER):
            slot = self.walk.slot(g, s, cutlass.min(first + j, s.splits - 1))
            four = cute.make_rmem_tensor((4,), Float32)
            at = (g.partial.iterator + ((Int64(slot) * rows + row) * self.dv + column)).align(16)
            cute.autovec_copy(cute.make_tensor(at, cute.make_layout(4)), four)
            lse = cutlass.select_(first + j < s.splits, self.lse_of(g, slot, row), Float32(-INF))
            parts.append((lse, four))
        top = sums[TOP]
        for lse, _ in parts:
            top = cute.arch.fmax(top, lse)
        base = cutlass.select_(top == -INF, Float32(0.0), top)
        before = cute.math.exp2(sums[TOP] - base, fastmath=True)
        sums[TOP] = top
        for e in range(5):
            sums[e] = sums[e] * before
        for lse, four in parts:
            weight = cute.math.exp2(lse - base, fastmath=True)
            sums[NORM] = sums[NORM] + weight
            for e in range(4):
                sums[e] = cute.math.fma(weight, four[e], sums[e])

    def lse_of(self, g, slot, row):
        return cute.make_tensor(g.partial_lse.iterator + (Int64(slot) * g.partial.shape[1] + row),
                                cute.make_layout(1))[0]

    def row(self, g, s, place, total, factor):
        """Four columns of O."""
        (row, column), o = place, rows_of(g.o, g, s)
        narrow = cute.make_rmem_tensor((4,), self.dtype)
        for e in range(4):
            narrow[e] = self.dtype(total[e] * factor)
        at = (o.iterator + (cute.crd2idx((s.tile * ROWS + row, 0), o.layout) + column)).align(8)
        cute.autovec_copy(narrow, cute.make_tensor(at, cute.make_layout(4)))

    @cute.jit
    def refuse_others(self, g):
        """`refuse` a plan of another call."""
        if self.walk.matches(g):
            pass
        else:
            self.refuse(g)

    @cute.jit
    def refuse(self, g):
        """A plan of another call: all results are NaN, and the plan says so."""
        me, blocks = cute.arch.block_idx()[0], cute.arch.grid_dim()[0]
        o, lse, plan = g.o, g.lse, g.plan
        batch, queries, heads, _ = o.shape
        for row in cutlass.range(me, batch * queries * heads, blocks, unroll=1):
            b, q, h = row // (queries * heads), row // heads % queries, row % heads
            for column in cutlass.range(self.thread(), self.dv, self.threads, unroll=1):
                o[b, q, h, column] = self.dtype(Float32.nan)
            if const_expr(self.spec.lse):
                lse[b, h, q] = Float32.nan
        if me == 0 and self.thread() == 0:
            plan[words.OTHER_CALL] = Int32(1)


def rows_of(x, g, s):
    """(packed rows, columns) of a sequence and a K/V head of x (B, Sq, H, D)."""
    batch, query, head, _ = x.stride
    at = (x.iterator + (Int64(s.place) * batch + Int64(s.row) * query + Int64(s.head * g.group) * head)).align(16)
    return cute.make_tensor(at, cute.make_layout(((g.group, g.queries), x.shape[3]), stride=((head, query), 1)))


@cute.jit
def tell(plan, fine, thread):
    """That a length is none that the cache has, or not the one that was planned for. thread: number 0 tells it."""
    if thread == 0:
        if fine:
            pass
        else:
            plan[words.BEYOND_CACHE] = Int32(1)
