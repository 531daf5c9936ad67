"""Two partial results of attention, over keys apart from each other, become one."""
from typing import NamedTuple, Optional

import cuda.bindings.driver as cuda
import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32, const_expr

import tkq.tile as tk
from tkq.attention.decode import words
from tkq.attention.decode.copies import load16
from tkq.attention.decode.plan import ROWS
from tkq.runtime.compile import fake
from tkq.tile import vectors

INF = Float32.inf
VECTOR, NARROW = 8, 4  # columns of a thread; where a result may lie in parts: so the loads of many fit in registers
TOGETHER = 8  # parts whose loads are on their way at a time


class Operands(NamedTuple):
    """Beside o_a (B, S, H, D): o_b; lse_a, lse_b (B, H, S); o as o_a, lse as lse_a, the results. Of a result a that may
    lie in parts, the decode kernel's partial (slots, rows, D), partial_lse (slots, rows), and the plan it had."""

    o_b: cute.Tensor
    lse_a: cute.Tensor
    lse_b: cute.Tensor
    o: cute.Tensor
    lse: cute.Tensor
    partial: Optional[cute.Tensor]
    partial_lse: Optional[cute.Tensor]
    plan: Optional[cute.Tensor]


class MergeState:
    """A thread has 8 or 4 columns of a row. A part that saw no key, of lse -inf, counts for nothing, whatever its o is.

    Where a's lse is inf, the row's result lies in parts, in fp32: the queries of the whole batch were one sequence of a
    plan, whose tasks several blocks of the decode kernel shared. They are added up here, in the order of the keys, by
    all SMs and not by the last block of each task. What the plan says is kept inside of the parts' memory.

    Blocks may begin under the end of the kernel before, which they wait for."""

    def __init__(self, spec):
        self.spec, self.dtype = spec, tk.element_type(spec.dtype)
        self.threads = 64 if spec.parts else 256  # few rows have many parts: so more SMs read them
        self.vector = NARROW if spec.parts else VECTOR

    def fake_arguments(self):
        """Any sizes and strides of whole vectors."""
        B, S, H, D = (*(fake.sym() for _ in range(3)), fake.sym(divisibility=VECTOR))
        strides = lambda unit: tuple(fake.sym64(divisibility=unit) for _ in range(3))
        o = lambda: fake.tensor(self.spec.dtype, (B, S, H, D), (*strides(VECTOR), 1), align=16)
        lse = lambda: fake.tensor("fp32", (B, H, S), strides(1), align=4)
        parts = [None] * 3
        if self.spec.parts:
            slots, rows = fake.sym(), fake.sym()
            parts = [fake.tensor("fp32", (slots, rows, D), align=16), fake.tensor("fp32", (slots, rows), align=4),
                     fake.tensor("int32", (fake.sym(),), align=4)]
        return o(), Operands(o(), lse(), lse(), o(), lse(), *parts)

    @cute.jit
    def __call__(self, o_a: cute.Tensor, operands: Operands, stream: cuda.CUstream):
        B, S, H, D = o_a.shape
        self.kernel(o_a, operands).launch(grid=[cute.ceil_div(B * S * H * (D // self.vector), self.threads), 1, 1],
                                          block=[self.threads, 1, 1], stream=stream, use_pdl=True)

    @cute.kernel
    def kernel(self, o_a: cute.Tensor, x: Operands):
        cute.arch.griddepcontrol_wait()
        self.thread(cute.arch.block_idx()[0] * self.threads + cute.arch.thread_idx()[0], o_a, x)

    @cute.jit
    def thread(self, unit: Int32, o_a: cute.Tensor, x: Operands):
        """What one thread does: the tests run it on a CPU, one after the other."""
        B, S, H, D = o_a.shape
        chunks = D // self.vector
        if unit < B * S * H * chunks:
            row, chunk = unit // chunks, unit % chunks
            b, s, h = row // (S * H), row // H % S, row % H
            place = b, s, h, chunk * self.vector
            lse_a, lse_b = x.lse_a[b, h, s], x.lse_b[b, h, s]
            a, b_ = (vectors.wide(vectors.load(vectors.run_at(m, place, self.vector))) for m in (o_a, x.o_b))
            if const_expr(self.spec.parts):
                a, lse_a = self.added(x, (b * S + s, h, B * S), chunk, (a, lse_a))
            top = cutlass.max(lse_a, lse_b)
            base = cutlass.select_(top == -Float32.inf, Float32(0.0), top)
            # where a sum is infinite, as a sink's may be, all weight is there
            of_a, of_b = (cutlass.select_(lse == Float32.inf, Float32(1.0), cute.math.exp2((lse - base) * tk.LOG2E))
                          for lse in (lse_a, lse_b))
            total = of_a + of_b
            nothing = total == Float32(0.0)
            inverse = cutlass.select_(nothing, Float32(0.0), Float32(1.0) / total)
            a = [cutlass.select_(of_a == Float32(0.0), Float32(0.0), e * of_a) for e in a]
            b_ = [cutlass.select_(of_b == Float32(0.0), Float32(0.0), e * of_b) for e in b_]
            found = vectors.packed([(p + q) * inverse for p, q in zip(a, b_)], self.dtype)
            vectors.store(found, vectors.run_at(x.o, place, self.vector))
            if chunk == 0:
                lse = base + cute.math.log2(total) * tk.LN2
                x.lse[b, h, s] = cutlass.select_(nothing, -Float32.inf, lse)

    # ---- a result in parts -----------------------------------------------------------------------

    def added(self, x, query, chunk, a):
        """(columns of O, lse): of the parts where a's lse says so, else as they are. query: which of all, its head, and
        how many there are."""
        held = cute.make_rmem_tensor((NARROW + 1,), Float32)
        for e, value in enumerate((*a[0], a[1])):
            held[e] = value
        self.add_parts(x, self.parts_of(x, *query), chunk, held)  # the plan's words come beside a's lse
        return [held[e] for e in range(NARROW)], held[NARROW]

    @cute.jit
    def add_parts(self, x, parts, chunk, held):
        begin, others, step, splits, row = parts
        if held[NARROW] == INF:
            sums = cute.make_rmem_tensor((NARROW + 2,), Float32)  # of the columns, the norm, the largest lse
            sums.fill(0.0)
            sums[NARROW + 1] = -INF
            for first in cutlass.range(0, splits, TOGETHER, unroll=1):
                self.add(x, (begin, others, step, splits), first, (row, chunk), sums)
            norm, top = sums[NARROW], sums[NARROW + 1]
            base = cutlass.select_(top == -INF, Float32(0.0), top)
            empty = norm == Float32(0.0)
            inverse = cutlass.select_(empty, Float32(0.0), Float32(1.0) / norm)
            for e in cutlass.range_constexpr(NARROW):
                held[e] = sums[e] * inverse
            held[NARROW] = cutlass.select_(empty, -INF, (base + cute.math.log2(norm)) * tk.LN2)

    def parts_of(self, x, query, head, queries):
        """(slot of the first part, of the second, steps from it on, how many parts, row of them) of a query's head: as
        `walk.Walk` has them, of a batch of one sequence."""
        plan, (slots, rows, _) = x.plan, x.partial.shape
        one = lambda word: cutlass.max(plan[word], 1)
        group, heads_kv, part, overhead = one(words.GROUP), one(words.HEADS_KV), one(words.PART), plan[words.OVERHEAD]
        tiles = (queries * group + ROWS - 1) // ROWS
        tasks, packed = heads_kv * tiles, query * group + head % group
        task, weight, fixed = head // group * tiles + packed // ROWS, plan[words.TOTAL] // tasks, plan[words.FIXED] > 0
        start, most = task * weight, slots // tasks
        first = (start + overhead) // part
        splits = cutlass.select_(fixed, weight, (start + weight - 1) // part - first + 1)
        begin = cutlass.select_(fixed, task * most, 2 * first + 1)
        return (begin, begin + 1, cutlass.select_(fixed, Int32(1), Int32(2)),
                cutlass.min(splits, slots), cutlass.min(packed % ROWS, rows - 1))

    def columns(self, partial, place, there):
        """Of a part that is there; else 0, without a load."""
        at = vectors.run_at(partial, place, NARROW).iterator.toint()
        return [word.bitcast(Float32) for word in load16(at, Int32(there))]

    def add(self, x, parts, first, place, sums):
        """Some parts of a row's columns: all loads first. Behind the last one its part counts for nothing."""
        begin, others, step, splits = parts
        row, chunk = place
        last, found = x.partial.shape[0] - 1, []
        for j in range(TOGETHER):
            split = cutlass.min(first + j, splits - 1)
            slot = cutlass.select_(split == 0, begin, others + (split - 1) * step)
            slot = cutlass.max(cutlass.min(slot, last), 0)
            lse = cutlass.select_(first + j < splits, x.partial_lse[slot, row], -INF)
            found.append((lse, self.columns(x.partial, (slot, row, chunk * NARROW), first + j < splits)))
        before = sums[NARROW + 1]
        top = before
        for lse, _ in found:
            top = cutlass.max(top, lse)
        base = cutlass.select_(top == -INF, Float32(0.0), top)
        factor = cute.math.exp2(before - base)
        sums[NARROW + 1] = top
        for e in range(NARROW + 1):
            sums[e] = sums[e] * factor
        for lse, columns in found:
            weight = cute.math.exp2(lse - base)
            sums[NARROW] = sums[NARROW] + weight
            for e in range(NARROW):
                sums[e] = cute.math.fma(weight, columns[e], sums[e])
