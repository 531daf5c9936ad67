"""Gradients of a causal convolution, channels contiguous: dx, and sums for dweight and dbias, in one pass."""
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
from tkq.convolution.taps import Taps, column, fma, load_rows, row, state_column
from tkq.pointwise import activations
from tkq.runtime.compile import fake
from tkq.tile import vectors


class Operands(NamedTuple):
    """As the forward's; dy, dx (B, S, C), parts (B, runs, W + 1, C) fp32: of a run, sums for each tap and the bias."""

    weight: cute.Tensor
    bias: Optional[cute.Tensor]
    state: Optional[cute.Tensor]
    cu: Optional[cute.Tensor]
    dy: cute.Tensor
    dx: Optional[cute.Tensor]
    parts: Optional[cute.Tensor]
    normed: Optional[Int32] = None


class Given(NamedTuple):
    """x, `Operands`, and the tokens of a run."""

    x: cute.Tensor
    weight: cute.Tensor
    bias: Optional[cute.Tensor]
    state: Optional[cute.Tensor]
    cu: Optional[cute.Tensor]
    dy: cute.Tensor
    dx: Optional[cute.Tensor]
    parts: Optional[cute.Tensor]
    normed: Optional[Int32]
    run: Int32


class ChannelBackward:
    """With z what the activation is of, and dz[t] = dy[t] act'(z[t]):

        dx[t] = sum of weight[i] dz[t + W - 1 - i],   dweight[i] = sum of dz[t] x[t - W + 1 + i],   dbias = sum of dz

    A thread goes over a run of tokens as the forward's does, computes z again, and goes on for the W - 1 tokens behind
    the run, whose dz its last dx need. It has in registers the W - 1 inputs before, the W - 1 sums of dx that are not
    whole yet, and its channels' sums for the weights, which it writes at the end of the run: no atomics, the order of
    all sums is that of the tokens. Warps need nothing of each other."""

    lanes = WARP

    def __init__(self, spec, config):
        self.spec, self.config = spec, config
        self.dtype, self.taps = tk.element_type(spec.dtype), Taps(spec)
        self.sequences = of_spec(spec, self.lanes)
        self.runs = Runs(spec, self.sequences, self.walk)

    def fake_arguments(self):
        """Compiled for any sizes, x, dy and dx of any strides but the last."""
        spec, B, S, N = self.spec, fake.sym(), fake.sym(), fake.sym()
        C = fake.sym(divisibility=spec.vector)
        x, dy, dx = (rows_of(spec, B, S, C) for _ in range(3))
        align = min(16, 4 * spec.vector)
        parts = fake.tensor("fp32", (B, fake.sym(), spec.width + 1, C), align=align) if spec.of_weights else None
        operands = Operands(*vectors_of(spec, C), *packed_of(spec, (B, S, C), N), dy, dx if spec.of_x else None, parts,
                            normed_of(spec))
        return x, operands, Int32(0)

    @cute.jit
    def __call__(self, x: cute.Tensor, operands: Operands, run: Int32, stream: cuda.CUstream):
        self.kernel(Given(x, *operands, run)).launch(grid=blocks(self, x, run), stream=stream,
                                                     **self.config.launch)

    @cute.kernel
    def kernel(self, g: Given):
        self.thread(*place_of(self.config), g)

    def thread(self, column, part, batch, g: Given):
        """What one thread does: the tests run it on a CPU, one after the other. column: of vectors; part: of runs."""
        self.runs.visit(column, part, batch, g)

    @cute.jit
    def walk(self, channel, part, batch, of, g: Given, normed: cutlass.Constexpr = False):
        n, ahead, V, S = self.config.rows, self.taps.ahead, self.spec.vector, g.x.shape[1]
        first = part * g.run
        end = cutlass.min(first + g.run, S)
        last = cutlass.min(end + ahead, S)  # the tokens behind the run whose dz its dx need
        taps = self.taps.of(g, channel, normed)
        at = column(g.x, batch, channel), column(g.dy, batch, channel)
        to = at[0] if const_expr(g.dx is None) else column(g.dx, batch, channel)
        window = cute.make_rmem_tensor((ahead * V,), Float32)
        for i in cutlass.range_constexpr(ahead):
            before(self, window, i, (batch, first - ahead + i, channel), at[0], g)
        sums = cute.make_rmem_tensor(((self.taps.width + 1) * V,), Float32)
        pending = cute.make_rmem_tensor(((ahead + n) * V,), Float32)
        sums.fill(0.0)
        pending.fill(0.0)
        whole = first + (end - first) // n * n
        here = self.load(batch, at, [cutlass.min(first + j, last - 1) for j in range(n)], g)
        held = window, sums, pending
        for base in cutlass.range(first, whole, n, unroll=1):
            next_ = cutlass.min(base + n, whole - n)
            there = self.load(batch, at, [next_ + j for j in range(n)], g)
            of = self.group(here, held, (base, first, end, last, channel), taps, to, of, g)
            for x, y in zip(here, there):
                x.store(y.load())
        for base in cutlass.range(whole, end + ahead, n, unroll=1):
            here = self.load(batch, at, [cutlass.min(base + j, last - 1) for j in range(n)], g)
            of = self.group(here, held, (base, first, end, last, channel), taps, to, of, g, True)
        if const_expr(g.parts is not None):
            self.store(sums, (batch, part, channel), g)

    def load(self, batch, at, tokens, g):
        """Rows of x, then those of dy, then what says which sequences they are of."""
        rows = [x for m, of in zip((g.x, g.dy), at, strict=True) for x in load_rows(m, of, tokens, self.spec.vector)]
        return rows + ([] if g.cu is None else self.sequences.load(g.cu, batch, tokens))

    @cute.jit
    def group(self, here, held, place, taps, to, of, g: Given, rest: cutlass.Constexpr = False):
        """n tokens from `base` on. held: the window, the sums, what is pending. place: (base, the run's first token and
        its end, the end of those that its dx need, channel). rest: some may be behind these ends. Returns the last
        one's sequence."""
        n, ahead, V, (window, sums, pending) = self.config.rows, self.taps.ahead, self.spec.vector, held
        base, first, end, last, channel = place
        rows = unpacked(window, ahead, V) + [vectors.wide(x) for x in here[:n]]
        for j in cutlass.range_constexpr(n):
            t = base + j
            inside = (t < end, t < last) if const_expr(rest) else (None, None)
            token = *inside, rows[j:j + self.taps.width], vectors.wide(here[n + j])
            if const_expr(g.cu is None):
                self.add((sums, pending), j, token, taps)
            elif const_expr(self.spec.numbers):
                of = self.sequences.follow(g.cu, t, of, g.x.shape[1], here[2 * n][j])
                self.add_numbered((sums, pending), j, token, taps, t - of.begin)
            else:
                put(pending, ahead + j, [Float32(0.0)] * V)
                of = self.sequences.follow(g.cu, t, of, g.x.shape[1])
                self.in_sequence((sums, pending), j, (channel, t - of.begin, *token), taps, of, g)
        if const_expr(g.dx is not None):
            self.emit(pending, base - ahead, (first, end), to, g)
        for i in cutlass.range_constexpr(ahead):
            put(window, i, rows[n + i])
        return of

    def add_numbered(self, held, j, token, taps, age):
        """Adds what a token of a sequence that begins with 0 adds, at whatever place in it: of two ways, for the first
        tokens and for others, the compiler would compute both, and have registers for both."""
        counts, live, rows, dy = token
        seen = self.taps.seen(rows, age, lambda column: [Float32(0.0)] * self.spec.vector)
        self.add(held, j, (counts, live, seen, dy), taps, age)

    @cute.jit
    def in_sequence(self, held, j: cutlass.Constexpr, token, taps, of, g: Given):
        """Adds what a token of a sequence adds: its first tokens have its state before them. token: (channel, its place
        in its sequence, and what `add` has)."""
        channel, age, counts, live, rows, dy = token
        there = self.sequences.there(g.cu, of)
        if const_expr(live is not None):
            there = there & live
        if there:
            if age >= self.taps.ahead:
                self.add(held, j, (counts, None, rows, dy), taps)
            else:
                seen = self.taps.seen(rows, age, state_column(g.state, (of.number, channel), self.spec.vector))
                self.add(held, j, (counts, None, seen, dy), taps, age)

    def slopes(self, rows, dy, live, weights, bias, norm):
        """dz of a token; 0 where it is not live, of which None says nothing."""
        if self.spec.silu or norm is not None:
            z = self.taps.sums(rows, weights, bias)
        if norm is not None:
            dy = norm.backward([activations.silu(x) for x in z] if self.spec.silu else z, dy)
        if self.spec.silu:
            dy = [d * activations.silu_and_slope(x)[1] for d, x in zip(dy, z, strict=True)]
        return dy if live is None else [cutlass.select_(live, d, Float32(0.0)) for d in dy]

    def add(self, held, j, token, taps, age=None):
        """What token j of a group adds. token: (is it of the run? is it at all? its rows, its dy); None: it is. age:
        its place in its sequence, where that is below W - 1: tokens before its sequence have nothing of it."""
        (sums, pending), (counts, live, rows, dy), weights = held, token, taps[0]
        V, ahead, dz = self.spec.vector, self.taps.ahead, self.slopes(rows, dy, live, *taps)
        if self.spec.of_x:
            for d in range(self.taps.width):
                at = (ahead + j - d) * V
                for e in range(V):
                    if d == 0:  # the first to be added
                        pending[at + e] = weights[ahead][e] * dz[e]
                    else:
                        found = fma(weights[ahead - d][e], dz[e], pending[at + e])
                        pending[at + e] = found if age is None else cutlass.select_(age >= d, found, pending[at + e])
        if self.spec.of_weights:
            mine = dz if counts is None else [cutlass.select_(counts, x, Float32(0.0)) for x in dz]
            for i, row in enumerate(rows):
                for e in range(V):
                    sums[i * V + e] = fma(mine[e], row[e], sums[i * V + e])
            for e in range(V):
                sums[self.taps.width * V + e] = sums[self.taps.width * V + e] + mine[e]

    @cute.jit
    def emit(self, pending: cute.Tensor, t, run, to, g: Given):
        """dx of the tokens from t on that nothing more is added to, and what is pending of the others."""
        n, ahead, V = self.config.rows, self.taps.ahead, self.spec.vector
        found = unpacked(pending, n + ahead, V)
        for j in cutlass.range_constexpr(n):
            if t + j >= run[0] and t + j < run[1]:
                vectors.store(vectors.packed(found[j], self.dtype), row(g.dx, to, t + j, V))
        for j in cutlass.range_constexpr(ahead):
            put(pending, j, found[n + j])

    def store(self, sums, at, g):
        """The run's sums."""
        (batch, part, channel), V = at, self.spec.vector
        for i in range(self.taps.width + 1):
            row = vectors.run_at(g.parts, (batch, part, i, channel), V)
            vectors.store(vectors.packed([sums[i * V + e] for e in range(V)], Float32), row)
