"""Scans of tensors whose channels are contiguous: forward, and the gradients in one pass."""
from typing import Any, NamedTuple, Optional

import cuda.bindings.driver as cuda
import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32, Int64, const_expr
from cutlass.cute.nvgpu import CopyG2ROp, L2PrefetchSize

import tkq.tile as tk
from tkq.recurrence.carry import Run, WarpCarry
from tkq.recurrence.config import WARP
from tkq.runtime.compile import fake
from tkq.tile import vectors

LARGEST = 3.4028234e38


class Operands(NamedTuple):
    """Beside a (B, T, C): b of a forward, dh of a backward; h, which the one writes and the other reads where it has da
    to make; da, db. state (B, C), the initial one; final (B, C) fp32, or its gradient; dstate (B, C) fp32; product (B,
    C) fp32, of all factors."""

    b: cute.Tensor
    h: Optional[cute.Tensor]
    da: Optional[cute.Tensor]
    db: Optional[cute.Tensor]
    state: Optional[cute.Tensor]
    final: Optional[cute.Tensor]
    dstate: Optional[cute.Tensor]
    product: Optional[cute.Tensor]


class Given(NamedTuple):
    """a, `Operands`, and 1 or -1: which way from token to token."""

    a: cute.Tensor
    b: cute.Tensor
    h: Optional[cute.Tensor]
    da: Optional[cute.Tensor]
    db: Optional[cute.Tensor]
    state: Optional[cute.Tensor]
    final: Optional[cute.Tensor]
    dstate: Optional[cute.Tensor]
    product: Optional[cute.Tensor]
    way: Int32


class Place(NamedTuple):
    """A thread's columns: their sequence, the first one's channel, and is it one of them?"""

    batch: Any
    channel: Any
    inside: Any


class ColumnScan:
    """Tokens are counted in the order in which the scan takes them, s = 0 .. T - 1:

        forward   h[s] = a[s] h[s - 1] + b[s]
        backward  g[s] = a[s - 1] g[s - 1] + dh[s],  db[s] = g[s],  da[s] = g[s] h[s + 1],  a dot behind the ends being
                  the final state's gradient and the initial state

    A thread has `vector` neighbouring channels, a block those of a warp, whose runs of `tokens_per_thread` tokens its
    warps take in turn (`WarpCarry`). A run: load, wait for the state, the steps, pass the state on, store. All
    steps are in fp32."""

    lanes = WARP

    def __init__(self, spec, config):
        self.spec, self.config, self.dtype = spec, config, tk.element_type(spec.dtype)
        self.carry = WarpCarry(spec.vector * (1 + spec.ends), config.warps)

    def fake_arguments(self):
        """Compiled for any sizes, and any strides but that of channels."""
        spec, v = self.spec, self.spec.vector
        B, T, C = fake.sym(), fake.sym(), fake.sym(divisibility=v)

        def rows(wanted=True):
            strides = fake.sym64(divisibility=v), fake.sym64(divisibility=v), 1
            return fake.tensor(spec.dtype, (B, T, C), strides, align=v * self.dtype.width // 8) if wanted else None

        def states(kind):
            return fake.tensor(kind, (B, C), align=tk.element_type(kind).width // 8) if kind else None

        operands = Operands(rows(), rows(spec.reads_h), rows(spec.of_a), rows(spec.of_b),
                            states(spec.state), states(spec.final and "fp32"), states(spec.of_state and "fp32"),
                            states(spec.ends and "fp32"))
        return rows(), operands, Int32(0)

    @cute.jit
    def __call__(self, a: cute.Tensor, operands: Operands, way: Int32, stream: cuda.CUstream):
        """way: 1, or -1 where the scan starts at the last token."""
        B, _, C = a.shape
        blocks = cute.ceil_div(B * C, WARP * self.spec.vector)
        self.kernel(Given(a, *operands, way)).launch(grid=[blocks, 1, 1], stream=stream, **self.config.launch)

    @cute.kernel
    def kernel(self, g: Given):
        slots = self.carry.slots()
        warp = cute.arch.make_warp_uniform(cute.arch.thread_idx()[0] // WARP)
        self.thread(cute.arch.block_idx()[0], warp, tk.lane_id(), slots, g)

    @cute.jit
    def thread(self, block, warp, lane, slots, g: Given):
        """What one thread does: the tests run it on a CPU, one after the other."""
        (B, T, C), V, n = g.a.shape, self.spec.vector, self.config.tokens_per_thread
        column = (block * self.lanes + lane) * V
        inside = column < B * C
        column = cutlass.min(column, B * C - V)
        of = Place(column // C, column % C, inside)
        state = cute.make_rmem_tensor((self.carry.vector,), Float32)  # and behind it the product of the factors
        state.fill(1.0)
        before = cute.make_rmem_tensor((V,), Float32)  # the initial state
        for e in cutlass.range_constexpr(V):
            before[e] = Float32(0.0 if g.state is None else g.state[of.batch, of.channel + e])
            if const_expr(self.spec.backward):
                state[e] = Float32(0.0 if g.final is None else g.final[of.batch, of.channel + e])
            else:
                state[e] = before[e]
        runs = cute.ceil_div(T, n)
        for k in cutlass.range(warp, runs, self.config.warps, unroll=1):
            run = Run(k, runs, warp, lane)
            if (k + 1) * n <= T:
                self.run((state, before, slots), run, of, g)
            else:
                self.run((state, before, slots), run, of, g, True)

    @cute.jit
    def run(self, held, run, of, g: Given, rest: cutlass.Constexpr = False):
        """rest: some of the run's tokens may be behind the last one."""
        if const_expr(self.spec.backward):
            self.gradients(held, run, of, g, rest)
        else:
            self.values(held, run, of, g, rest)
        if run.k + 1 == run.runs and of.inside:
            self.end(held[0], of, g)

    @cute.jit
    def end(self, state: cute.Tensor, of, g: Given):
        """What is behind the last token: the final state, or the initial one's gradient."""
        if const_expr(not self.spec.backward and g.final is not None):
            for e in cutlass.range_constexpr(self.spec.vector):
                g.final[of.batch, of.channel + e] = state[e]
        if const_expr(g.dstate is not None):
            last = self.wide(g.a, of, [g.a.shape[1] - 1], g)[0]
            for e in cutlass.range_constexpr(self.spec.vector):
                g.dstate[of.batch, of.channel + e] = last[e] * state[e]
                if const_expr(g.product is not None):
                    g.product[of.batch, of.channel + e] = finite(last[e] * state[self.spec.vector + e])
        else:
            if const_expr(g.product is not None):
                for e in cutlass.range_constexpr(self.spec.vector):
                    g.product[of.batch, of.channel + e] = finite(state[self.spec.vector + e])

    def tokens(self, run, g, rest, away=0):
        """The run's tokens, or those `away` of them, each the nearest one that there is."""
        n, last = self.config.tokens_per_thread, g.a.shape[1] - 1
        found = [run.k * n + j + away for j in range(n)]
        if away < 0:
            found[0] = cutlass.max(found[0], 0)
        if rest or away > 0:
            found = [cutlass.min(s, last) if rest or j == n - 1 else s for j, s in enumerate(found)]
        return found

    def row(self, x, of, s, g):
        """Token s of a thread's channels."""
        size, T = x.element_type.width // 8, x.shape[1]
        token = cutlass.select_(g.way > 0, Int32(0), T - 1)
        start = x.iterator.toint() + (Int64(of.batch) * x.stride[0] + Int64(token) * x.stride[1] + of.channel) * size
        step = Int32(x.stride[1]) * size * g.way
        pointer = cute.make_ptr(x.element_type, start + Int64(s) * Int64(step), x.memspace,
                                assumed_align=x.iterator.alignment)
        return cute.make_tensor(pointer, cute.make_layout(self.spec.vector))

    def load(self, x, of, tokens, g):
        return [load(self.row(x, of, s, g)) for s in tokens]

    def converted(self, *held):
        """Rows as lists of fp32 values, before the state comes: the runs behind are not to wait for it."""
        return [[vectors.wide(x) for x in rows] for rows in held] if self.config.convert_early else held

    def numbers(self, row):
        return row if self.config.convert_early else vectors.wide(row)

    def wide(self, x, of, tokens, g):
        return [vectors.wide(row) for row in self.load(x, of, tokens, g)]

    @cute.jit
    def values(self, held, run, of, g: Given, rest: cutlass.Constexpr):
        """Forward."""
        state, _, slots = held
        V, n, T, tokens = self.spec.vector, self.config.tokens_per_thread, g.a.shape[1], self.tokens(run, g, rest)
        a, b = self.load(g.a, of, tokens, g), self.load(g.b, of, tokens, g)
        a, b = self.converted(a, b)
        self.carry.take(state, slots, run)
        h, found = [state[e] for e in range(V)], []
        for j in cutlass.range_constexpr(n):
            there = run.k * n + j < T if rest else None
            factor = self.numbers(a[j])
            h = steps(factor, h, self.numbers(b[j]), there)
            self.multiply(state, factor, there)
            found.append(h)
        put(state, h)
        self.carry.pass_on(state, slots, run)
        if const_expr(g.h is not None):
            self.store(g.h, found, (run, of), g, rest)

    def multiply(self, state, factor, there):
        """The product of the factors, where it is asked for."""
        for e in range(self.carry.vector - self.spec.vector):
            i = self.spec.vector + e
            found = state[i] * factor[e]
            state[i] = found if there is None else cutlass.select_(there, found, state[i])

    @cute.jit
    def gradients(self, held, run, of, g: Given, rest: cutlass.Constexpr):
        """Backward."""
        state, before, slots = held
        V, n, T = self.spec.vector, self.config.tokens_per_thread, g.a.shape[1]
        a = self.load(g.a, of, self.tokens(run, g, rest, -1), g)
        dh = self.load(g.b, of, self.tokens(run, g, rest), g)
        h = self.load(g.h, of, self.tokens(run, g, rest, 1), g) if self.spec.of_a else []
        a, dh = self.converted(a, dh)
        self.carry.take(state, slots, run)
        slope, found = [state[e] for e in range(V)], []
        for j in cutlass.range_constexpr(n):
            s, factor = run.k * n + j, self.numbers(a[j])
            if j == 0:  # what comes into the first token is the final state's gradient itself
                factor = [cutlass.select_(s == 0, Float32(1.0), x) for x in factor]
            there = s < T if rest else None
            slope = steps(factor, slope, self.numbers(dh[j]), there)
            self.multiply(state, factor, there)
            found.append(slope)
        put(state, slope)
        self.carry.pass_on(state, slots, run)
        if const_expr(self.spec.of_b):
            self.store(g.db, found, (run, of), g, rest)
        if const_expr(self.spec.of_a):
            products = []
            for j in cutlass.range_constexpr(n):
                earlier = vectors.wide(h[j])
                if rest or j == n - 1:
                    last = run.k * n + j >= T - 1
                    earlier = [cutlass.select_(last, before[e], x) for e, x in enumerate(earlier)]
                products.append([x * y for x, y in zip(found[j], earlier, strict=True)])
            self.store(g.da, products, (run, of), g, rest)

    @cute.jit
    def store(self, x: cute.Tensor, rows, place, g: Given, rest: cutlass.Constexpr):
        run, of = place
        if of.inside:
            for j in cutlass.range_constexpr(self.config.tokens_per_thread):
                s, held = run.k * self.config.tokens_per_thread + j, vectors.packed(rows[j], self.dtype)
                if const_expr(rest):
                    if s < x.shape[1]:
                        vectors.store(held, self.row(x, of, s, g))
                else:
                    vectors.store(held, self.row(x, of, s, g))


def load(src):
    """src, in registers. Rows of a warp that are half a line of L2 have the other half fetched with them, which another
    block reads at about the same time."""
    dtype, n = src.element_type, cute.size(src)
    if n * dtype.width * WARP >= 1024:
        return vectors.load(src)
    atom = cute.make_copy_atom(CopyG2ROp(), dtype, num_bits_per_copy=n * dtype.width,
                               l2_prefetch_size=L2PrefetchSize.SIZE_128B)
    held = cute.make_rmem_tensor(n, dtype)
    cute.copy(atom, src, held)
    return held


def steps(a, h, b, there=None):
    """a h + b of each channel; h where the token is not there."""
    found = [cute.math.fma(x, y, z) for x, y, z in zip(a, h, b, strict=True)]
    return found if there is None else [cutlass.select_(there, x, y) for x, y in zip(found, h, strict=True)]


def finite(x):
    """A product that is too large counts as the largest number: a state of 0 stays 0 behind it."""
    return cute.arch.fmin(cute.arch.fmax(x, -LARGEST), LARGEST)


def put(held, values):
    for e, value in enumerate(values):
        held[e] = value
