"""y[t] = act(bias + sum of weight[i] x[t - W + 1 + i]), channels contiguous."""
from typing import NamedTuple, Optional

import cuda.bindings.driver as cuda
import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32, const_expr

import tkq.tile as tk
from tkq.convolution.along_channels import (
    Runs,
    before,
    blocks,
    normed_of,
    packed_of,
    place_of,
    put,
    rows_of,
    unpacked,
    vectors_of,
)
from tkq.convolution.config import WARP
from tkq.convolution.sequences import of_spec
from tkq.convolution.taps import Taps, column, load_rows, row, state_column
from tkq.pointwise import activations
from tkq.runtime.compile import fake
from tkq.tile import vectors


class Operands(NamedTuple):
    """Beside x (B, S, C): weight (C, W), bias (C,), state (N, C, W - 1), cu (N + 1,), y as x;
    normed: how many of the channels, of `spec.head` alone."""

    weight: cute.Tensor
    bias: Optional[cute.Tensor]
    state: Optional[cute.Tensor]
    cu: Optional[cute.Tensor]
    y: cute.Tensor
    normed: Optional[Int32] = None


class Given(NamedTuple):
    """x, `Operands`, and the tokens of a run."""

    x: cute.Tensor
    weight: cute.Tensor
    bias: Optional[cute.Tensor]
    state: Optional[cute.Tensor]
    cu: Optional[cute.Tensor]
    y: cute.Tensor
    normed: Optional[Int32]
    run: Int32


class ChannelForward:
    """A thread has `vector` neighbouring channels, its warp 32 times as many, of a run of tokens, from the first to the
    last: up to 16 bytes of x in, as many of y out for each, and the W - 1 inputs before in registers. `rows` tokens are
    loaded together, while other warps compute. Warps need nothing of each other: no shared memory, no barrier.

    Of packed sequences all lanes of a warp have the same token: tokens that are nearer to their sequence's beginning
    than W - 1 take a branch of their own, which all others pass by."""

    lanes = WARP  # that look for a sequence together

    def __init__(self, spec, config):
        self.spec, self.config = spec, config
        self.dtype, self.taps = tk.element_type(spec.dtype), Taps(spec)
        self.sequences = of_spec(spec, self.lanes)
        self.runs = Runs(spec, self.sequences, self.walk)

    def fake_arguments(self):
        """Compiled for any sizes, x and y of any strides but the last."""
        spec, B, S, N = self.spec, fake.sym(), fake.sym(), fake.sym()
        C = fake.sym(divisibility=spec.vector)
        x, y = (rows_of(spec, B, S, C) for _ in range(2))
        return x, Operands(*vectors_of(spec, C), *packed_of(spec, (B, S, C), N), y, normed_of(spec)), Int32(0)

    @cute.jit
    def __call__(self, x: cute.Tensor, operands: Operands, run: Int32, stream: cuda.CUstream):
        self.kernel(Given(x, *operands, run)).launch(grid=blocks(self, x, run), block=[self.config.threads, 1, 1],
                                                     stream=stream)

    @cute.kernel
    def kernel(self, g: Given):
        self.thread(*place_of(self.config), g)

    def thread(self, column, part, batch, g: Given):
        """What one thread does: the tests run it on a CPU, one after the other. column: of vectors; part: of runs."""
        self.runs.visit(column, part, batch, g)

    @cute.jit
    def walk(self, channel, part, batch, of, g: Given, normed: cutlass.Constexpr = False):
        n, ahead, V = self.config.rows, self.taps.ahead, self.spec.vector
        first = part * g.run
        end = cutlass.min(first + g.run, g.x.shape[1])
        taps = self.taps.of(g, channel, normed)
        at = column(g.x, batch, channel), column(g.y, batch, channel)
        window = cute.make_rmem_tensor((ahead * V,), Float32)
        for i in cutlass.range_constexpr(ahead):
            before(self, window, i, (batch, first - ahead + i, channel), at[0], g)
        whole = first + (end - first) // n * n  # groups of n tokens, and what is left
        for base in cutlass.range(first, whole, n, unroll=1):
            here = self.load(batch, at[0], [base + j for j in range(n)], g)
            of = self.group(here, window, (base, end, channel), taps, at, of, g)
        if whole < end:
            here = self.load(batch, at[0], [cutlass.min(whole + j, end - 1) for j in range(n)], g)
            self.group(here, window, (whole, end, channel), taps, at, of, g, True)

    def load(self, batch, at, tokens, g):
        """Rows of x, and what says which sequences they are of."""
        rows = load_rows(g.x, at, tokens, self.spec.vector)
        return rows + ([] if g.cu is None else self.sequences.load(g.cu, batch, tokens))

    @cute.jit
    def group(self, here, window: cute.Tensor, place, taps, at, of, g: Given, rest: cutlass.Constexpr = False):
        """n tokens from the first on. place: (the first, the run's end, channel). rest: some may be behind the end.
        Returns the last one's sequence."""
        n, V, (first, end, channel) = self.config.rows, self.spec.vector, place
        rows = unpacked(window, self.taps.ahead, V) + [vectors.wide(x) for x in here[:n]]
        for j in cutlass.range_constexpr(n):
            t, mine = first + j, rows[j:j + self.taps.width]
            result = cute.make_rmem_tensor((V,), Float32)
            if const_expr(self.spec.numbers):  # all tokens go one way: of two the compiler would compute both
                of = self.sequences.follow(g.cu, t, of, g.x.shape[1], here[n][j])
                mine = self.taps.seen(mine, t - of.begin, lambda column: [Float32(0.0)] * V)
            put(result, 0, self.taps.sums(mine, *taps[:2]))
            if const_expr(g.cu is not None and not self.spec.numbers):
                of = self.sequences.follow(g.cu, t, of, g.x.shape[1])
                self.in_sequence(result, (t - of.begin, channel, mine), taps, of, g)
            if const_expr(rest):
                if t < end:
                    self.finish(result, row(g.y, at[1], t, V), taps[2])
            else:
                self.finish(result, row(g.y, at[1], t, V), taps[2])
        for i in cutlass.range_constexpr(self.taps.ahead):
            put(window, i, rows[n + i])
        return of

    @cute.jit
    def in_sequence(self, result: cute.Tensor, token, taps, of, g: Given):
        """The first tokens of a sequence have its state before them, and not what lies there. token: (its place in its
        sequence, channel, its rows)."""
        age, channel, rows = token
        if age < self.taps.ahead:
            before = state_column(g.state, (of.number, channel), self.spec.vector)
            put(result, 0, self.taps.sums(self.taps.seen(rows, age, before), *taps[:2]))
        if not self.sequences.there(g.cu, of):
            result.fill(0.0)

    def finish(self, result, y, norm):
        found = unpacked(result, 1, self.spec.vector)[0]
        found = [activations.silu(x) for x in found] if self.spec.silu else found
        found = found if norm is None else norm.forward(found)
        vectors.store(vectors.packed(found, self.dtype), y)
