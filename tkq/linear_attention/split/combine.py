"""The states that segments of a sequence begin with, of what each of them adds and makes of a state."""
from dataclasses import dataclass
from typing import Optional

import cuda.bindings.driver as cuda
import cutlass
import cutlass.cute as cute
from cutlass import Float32, const_expr

import tkq.tile as tk
from tkq.linear_attention.config import ALL
from tkq.linear_attention.engine.segmented import is_needed
from tkq.linear_attention.split.spec import WIDEST, CombineSpec
from tkq.runtime.compile import fake

THREADS, FOUR = WIDEST, 4
AHEAD = 8  # segments whose loads are under way
ROWS = 16  # columns of V that a block has, with a matrix


@dataclass(frozen=True)
class Operands:
    """states: (B, N, HO, V, K) fp32, contiguous: of N segments. decays: None, (B, N, HO) or (B, N, HO, K) fp32, or
    matrices (B, N, HO, K, K), contiguous. initial, final: (B, HO, V, K) or None, of any strides. reach: None, or (1, B,
    N, HO) int32, as `reach.Reach` makes it, reversed (2, ..), of both ways: below `ALL` a matrix is nothing that way,
    and where it is below in the order of the tokens none was stored."""

    states: cute.Tensor
    decays: Optional[cute.Tensor]
    initial: Optional[cute.Tensor]
    final: Optional[cute.Tensor]
    reach: Optional[cute.Tensor]


class CombineStates:
    """states[b, n] becomes the state that segment n begins with: S[0] is the initial state, or zeros, and

        S[n + 1] = T[n] S[n] + states[b, n],   T a factor of heads, of heads and rows of K, or a matrix

    behind the last one the final state. Reversed, from the last segment to the first. In fp32, in the order of the
    segments: what one segment would do to its state as it decays.

    A thread has four elements of a state, and asks for those of eight segments at once. Where segments are halves of
    others, the states in their middle are not made. With a matrix a block has 16 columns of V, a thread one row of K of
    them: the state before is in shared memory, K x 16, and each thread goes through the column of T's transpose that it
    needs, which its neighbours' lie beside. Transposed, as the delta rule's gradients have them, T is the transpose of
    another sequence of states': a thread goes through a row."""

    def __init__(self, spec: CombineSpec):
        self.spec, self.transposed = spec, spec.transfer == "transposed"
        self.matrix = self.transposed or spec.transfer == "matrix"

    def fake_arguments(self):
        """Compiled for any B, N, heads and V."""
        spec, K, (B, N, HO, V) = self.spec, self.spec.head_dim, (fake.sym() for _ in range(4))
        matrix = B, N, HO, K, K
        decays = {"none": None, "heads": (B, N, HO), "columns": (B, N, HO, K)}.get(spec.transfer, matrix)

        def of_call(dtype):
            strides = tuple(fake.sym64() for _ in range(4))
            return dtype and fake.tensor(dtype, (B, HO, V, K), strides, align=4 if dtype == "fp32" else 2)

        return (fake.tensor("fp32", (B, N, HO, V, K)), decays and fake.tensor("fp32", decays, align=4),
                of_call(spec.initial), of_call(spec.final), cutlass.Int32(0),
                fake.tensor("int32", (fake.sym(), B, N, HO), align=4) if spec.reach else None)

    @cute.jit
    def __call__(self, states: cute.Tensor, decays: Optional[cute.Tensor], initial: Optional[cute.Tensor],
                 final: Optional[cute.Tensor], columns: cutlass.Int32, reach: Optional[cute.Tensor],
                 stream: cuda.CUstream):
        """columns: V."""
        B, _, HO, _, K = states.shape
        if const_expr(self.matrix):
            across = cute.ceil_div(columns, ROWS)
        else:
            across = cute.ceil_div(columns * K, FOUR * THREADS)
        self.kernel(Operands(states, decays, initial, final, reach), columns).launch(
            grid=[across, HO, B], block=[THREADS, 1, 1], stream=stream)

    @cute.kernel
    def kernel(self, x: Operands, columns: cutlass.Int32):
        block, head, batch = cute.arch.block_idx()
        if const_expr(self.matrix):
            self.by_matrices(x, (batch, head), block * ROWS, columns)
        else:
            self.by_factors(x, (batch, head), block, columns)

    def segment(self, x, i):
        """The i-th that is visited."""
        return x.states.shape[1] - 1 - i if self.spec.reverse else i

    # ---- factors -------------------------------------------------------------------------------

    @cute.jit
    def by_factors(self, x, where, block, columns):
        batch, head = where
        thread, _, _ = cute.arch.thread_idx()
        K, count = self.spec.head_dim, x.states.shape[1]
        element = (block * THREADS + thread) * FOUR
        column, row = element // K, element % K
        if column < columns:
            s, four = cute.make_rmem_tensor((FOUR,), Float32), cute.make_layout(FOUR)
            added = cute.make_rmem_tensor((FOUR, AHEAD), Float32)
            factors = cute.make_rmem_tensor((FOUR, AHEAD), Float32)
            factors.fill(1.0)
            self.first(x, (batch, head, column, row), s)
            for base in cutlass.range(0, count, AHEAD, unroll=1):
                for i in cutlass.range_constexpr(AHEAD):
                    if base + i < count:
                        n = self.segment(x, base + i)
                        at = x.states.iterator + cute.crd2idx((batch, n, head, column, row), x.states.layout)
                        cute.autovec_copy(cute.make_tensor(at.align(16), four), added[None, i])
                        self.read_factors(x, (batch, n, head, row), factors[None, i])
                for i in cutlass.range_constexpr(AHEAD):
                    if base + i < count:
                        n = self.segment(x, base + i)
                        at = x.states.iterator + cute.crd2idx((batch, n, head, column, row), x.states.layout)
                        cute.autovec_copy(s, cute.make_tensor(at.align(16), four))
                        for e in cutlass.range_constexpr(FOUR):
                            # nothing stays nothing, also where gates above 0 make a segment's factor infinite
                            before = Float32(0.0) if s[e] == Float32(0.0) else s[e] * factors[e, i]
                            s[e] = before + added[e, i]
            self.last(x, (batch, head, column, row), s)

    @cute.jit
    def read_factors(self, x, where, factors: cute.Tensor):
        batch, n, head, row = where
        for e in cutlass.range_constexpr(FOUR):
            if const_expr(self.spec.transfer == "heads"):
                factors[e] = x.decays[batch, n, head]
            if const_expr(self.spec.transfer == "columns"):
                factors[e] = x.decays[batch, n, head, row + e]

    @cute.jit
    def first(self, x, where, s: cute.Tensor):
        batch, head, column, row = where
        for e in cutlass.range_constexpr(FOUR):
            s[e] = Float32(0.0)
            if const_expr(self.spec.initial is not None):
                s[e] = Float32(x.initial[batch, head, column, row + e])

    @cute.jit
    def last(self, x, where, s: cute.Tensor):
        batch, head, column, row = where
        if const_expr(self.spec.final is not None):
            for e in cutlass.range_constexpr(FOUR):
                x.final[batch, head, column, row + e] = x.final.element_type(s[e])

    # ---- matrices ------------------------------------------------------------------------------

    @cute.jit
    def by_matrices(self, x, where, column0, columns):
        """s[j]: the state's row of this thread, column0 + j of V."""
        batch, head = where
        row, _, _ = cute.arch.thread_idx()
        K, count = self.spec.head_dim, x.states.shape[1]
        needed = count if self.spec.final is not None else count - 1  # nothing is made of the last one's
        before = tk.SharedAllocator().vector(THREADS * ROWS)[None, 0]
        s, added = (cute.make_rmem_tensor((ROWS,), Float32) for _ in range(2))
        s.fill(0.0)
        here = column0, row, cutlass.select_(row < K, cutlass.min(columns - column0, ROWS), 0)
        if const_expr(self.spec.initial is not None):
            self.get(s, x.initial[batch, head, None, None], here)
        self.ask(added, x, where, 0, here)
        for i in cutlass.range(count, unroll=1):
            n = self.segment(x, i)
            at = batch, n, head, None, None
            if not self.spec.halves or n % 2 == int(self.spec.reverse):
                self.put(x.states[at], s, here)
            there = (i < needed) & self.leaves(x, (batch, n, head))
            if there:
                for j in cutlass.range_constexpr(ROWS):
                    before[row * ROWS + j] = s[j]
                tk.sync_block()
            for j in cutlass.range_constexpr(ROWS):
                s[j] = added[j]
            self.ask(added, x, where, i + 1, here)
            if there:
                if row < K:
                    self.multiply(x.decays[at], before, row, s)
                tk.sync_block()
        if const_expr(self.spec.final is not None):
            self.put(x.final[batch, head, None, None], s, here)

    def leaves(self, x, at):
        """Is anything left of the state before a segment? at: (batch, segment, head)."""
        ways = range(1 + self.spec.reverse) if self.spec.reach else ()
        found = cutlass.Boolean(True)
        for way in ways:
            found = found & (x.reach[(way, *at)] == ALL)
        return found

    @cute.jit
    def ask(self, added: cute.Tensor, x, where, i, here):
        """What the i-th segment adds is on its way; 0 where it was left out, or is none."""
        batch, head = where
        added.fill(0.0)
        if i < x.states.shape[1]:
            n = self.segment(x, i)
            there = cutlass.Boolean(True)
            if const_expr(self.spec.halves):
                way = int(self.spec.reverse)
                reaches = [x.reach[way, batch, m, head] for m in (n, n ^ 1)]
                there = is_needed(reaches, n, self.spec.reverse)
            if there:
                self.get(added, x.states[batch, n, head, None, None], here)

    @cute.jit
    def get(self, s: cute.Tensor, of_head: cute.Tensor, here):
        """A thread's elements. here: its first column of V, its row of K, how many there are of them."""
        column0, row, count = here
        for j in cutlass.range_constexpr(ROWS):
            if j < count:
                s[j] = Float32(of_head[column0 + j, row])

    @cute.jit
    def put(self, of_head: cute.Tensor, s: cute.Tensor, here):
        column0, row, count = here
        for j in cutlass.range_constexpr(ROWS):
            if j < count:
                of_head[column0 + j, row] = of_head.element_type(s[j])

    @cute.jit
    def multiply(self, matrix: cute.Tensor, before: cute.Tensor, row, s: cute.Tensor):
        """s += T[row] times the state before. matrix: the transpose of T, or T."""
        ahead = 32 if self.spec.head_dim % 32 == 0 else 16  # elements of a row of T whose loads are under way
        factors, four = cute.make_rmem_tensor((ahead,), Float32), cute.make_rmem_tensor((FOUR,), Float32)
        for base in cutlass.range(0, self.spec.head_dim, ahead, unroll=1):
            if const_expr(self.transposed):
                for i in cutlass.range_constexpr(0, ahead, FOUR):
                    at = matrix.iterator + cute.crd2idx((row, base + i), matrix.layout)
                    cute.autovec_copy(cute.make_tensor(at.align(16), cute.make_layout(FOUR)), four)
                    for e in cutlass.range_constexpr(FOUR):
                        factors[i + e] = four[e]
            else:
                for i in cutlass.range_constexpr(ahead):
                    factors[i] = matrix[base + i, row]
            for i in cutlass.range_constexpr(ahead):
                for j in cutlass.range_constexpr(0, ROWS, FOUR):
                    at = before.iterator + ((base + i) * ROWS + j)
                    cute.autovec_copy(cute.make_tensor(at.align(16), cute.make_layout(FOUR)), four)
                    for e in cutlass.range_constexpr(FOUR):
                        s[j + e] = s[j + e] + factors[i] * four[e]
