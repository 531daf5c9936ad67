"""Causal convolution of tensors whose tokens are contiguous: forward, and the gradients in one pass."""
from typing import NamedTuple, Optional

import cuda.bindings.driver as cuda
import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32, const_expr

import tkq.tile as tk
from tkq.convolution.config import WARP
from tkq.convolution.taps import fma, line, load_rows, row
from tkq.pointwise import activations
from tkq.runtime.compile import fake
from tkq.tile import vectors


class Operands(NamedTuple):
    """Beside x: y, dy, dx (B, S, C), neighbouring tokens contiguous; weight (C, W); bias (C,); parts (B, runs, W + 1,
    C) fp32, of each run. Of a forward dy, dx and parts are None, of a backward y."""

    weight: cute.Tensor
    bias: Optional[cute.Tensor]
    y: Optional[cute.Tensor]
    dy: Optional[cute.Tensor]
    dx: Optional[cute.Tensor]
    parts: Optional[cute.Tensor]


class Given(NamedTuple):
    """x, `Operands`, and the tokens of a run."""

    x: cute.Tensor
    weight: cute.Tensor
    bias: Optional[cute.Tensor]
    y: Optional[cute.Tensor]
    dy: Optional[cute.Tensor]
    dx: Optional[cute.Tensor]
    parts: Optional[cute.Tensor]
    run: Int32


class AlongTime:
    """A warp has a run of tokens of one channel, `vector` neighbours a lane at a time. Tokens that a lane needs of
    vectors before its own it loads itself: they come from L1. What is before the first token or behind the last counts
    as zeros. A backward goes from the run's end to its beginning: the dz behind a lane's own tokens come from its
    neighbours by shuffles, those behind the last lane's from the step before, and its next vectors are loaded before it
    computes. The sums for the weights are those of a lane's tokens in the order that they come in, then of the lanes,
    by shuffles."""

    lanes = WARP

    def __init__(self, spec, config):
        self.spec, self.config, self.dtype = spec, config, tk.element_type(spec.dtype)
        self.ahead = spec.width - 1
        self.halo = -(-self.ahead // spec.vector)  # vectors that W - 1 tokens lie in

    def fake_arguments(self):
        """Compiled for any sizes, and any strides but that of tokens."""
        spec, v = self.spec, self.spec.vector
        B, S, C = fake.sym(), fake.sym(divisibility=v), fake.sym()
        size = lambda kind: tk.element_type(kind).width // 8

        def rows():
            strides = fake.sym64(divisibility=v), 1, fake.sym64(divisibility=v)
            return fake.tensor(spec.dtype, (B, S, C), strides, align=v * size(spec.dtype))

        weight = fake.tensor(spec.weight, (C, spec.width), align=size(spec.weight))
        bias = spec.bias and fake.tensor(spec.bias, (C,), align=size(spec.bias))
        if not spec.backward:
            return rows(), Operands(weight, bias, rows(), None, None, None), Int32(0)
        parts = fake.tensor("fp32", (B, fake.sym(), spec.width + 1, C), align=4) if spec.of_weights else None
        return rows(), Operands(weight, bias, None, rows(), rows() if spec.of_x else None, parts), Int32(0)

    @cute.jit
    def __call__(self, x: cute.Tensor, operands: Operands, run: Int32, stream: cuda.CUstream):
        config, (B, S, C) = self.config, x.shape
        self.kernel(Given(x, *operands, run)).launch(
            grid=[cute.ceil_div(C, config.warps), cute.ceil_div(S, run), B], block=[config.threads, 1, 1],
            stream=stream)

    @cute.kernel
    def kernel(self, g: Given):
        block, part, batch = cute.arch.block_idx()
        warp = cute.arch.make_warp_uniform(cute.arch.thread_idx()[0] // WARP)
        self.thread(tk.lane_id(), block * self.config.warps + warp, part, batch, g)

    @cute.jit
    def thread(self, lane, channel, part, batch, g: Given):
        """What one thread does: the tests run it on a CPU, one after the other."""
        _, S, C = g.x.shape
        if channel < C:
            first = part * g.run
            if const_expr(self.spec.backward):
                self.gradients((lane, part), (batch, channel), (first, cutlass.min(first + g.run, S)), g)
            else:
                self.values(lane, (batch, channel), (first, cutlass.min(first + g.run, S)), g)

    def weights(self, channel, g):
        weights = [Float32(g.weight[channel, i]) for i in range(self.spec.width)]
        return weights, Float32(0.0 if g.bias is None else g.bias[channel])

    def load(self, x, at, t, vectors_):
        """Vectors t + h * vector for h in `vectors_`, in registers. What lies outside is the nearest one inside."""
        V = self.spec.vector
        inside = [cutlass.max(cutlass.min(t + h * V, x.shape[1] - V), 0) for h in vectors_]
        return load_rows(x, at, inside, V)

    def wide(self, held, t, vectors_):
        """Their numbers one after the other; zeros for what lies before the first token."""
        found = []
        for h, x in zip(vectors_, held, strict=True):
            at, numbers = t + h * self.spec.vector, vectors.wide(x)
            if h < 0:
                numbers = [cutlass.select_(at >= 0, a, Float32(0.0)) for a in numbers]
            found += numbers
        return found

    def store(self, values, m, at, t):
        vectors.store(vectors.packed(values, self.dtype), row(m, at, t, self.spec.vector))

    def z(self, numbers, e, weights, bias):
        """What the activation is of, of the token e behind the vector's first. numbers: from `halo` vectors before."""
        found, first = bias, self.halo * self.spec.vector + e - self.ahead
        for i, w in enumerate(weights):
            found = fma(w, numbers[first + i], found)
        return found

    @cute.jit
    def values(self, lane, at, run, g: Given):
        """Forward."""
        weights, bias = self.weights(at[1], g)
        of_x, of_y = line(g.x, *at), line(g.y, *at)
        first, end = run
        V, n, before = self.spec.vector, self.config.rows, range(-self.halo, 1)
        step = self.lanes * V
        for base in cutlass.range(first + lane * V, end, step * n, unroll=1):
            held = [self.load(g.x, of_x, base + j * step, before) for j in range(n)]
            for j in cutlass.range_constexpr(n):
                t = base + j * step
                if t < end:
                    numbers = self.wide(held[j], t, before)
                    found = [self.z(numbers, e, weights, bias) for e in range(V)]
                    found = [activations.silu(x) for x in found] if self.spec.silu else found
                    self.store(found, g.y, of_y, t)

    @cute.jit
    def gradients(self, place, at, run, g: Given):
        """Backward, from the run's end to its beginning. place: (lane, part)."""
        taps = self.weights(at[1], g)
        of = line(g.x, *at), line(g.dy, *at)
        to = of[0] if const_expr(g.dx is None) else line(g.dx, *at)
        first, end = run
        sums, behind = (cute.make_rmem_tensor((n,), Float32) for n in (self.spec.width + 1, self.ahead))
        sums.fill(0.0)
        behind.fill(0.0)
        step, lane = self.lanes * self.spec.vector, place[0]
        steps, mine = cute.ceil_div(end - first, step), first + lane * self.spec.vector
        if end < g.x.shape[1]:  # the tokens behind the run have their dz from its neighbours alone
            t = mine + steps * step
            dz = self.slopes(t, of[0], taps, self.own(g, of, t), g)[0]
            self.from_behind(dz, behind, lane)
        here = self.own(g, of, mine + (steps - 1) * step)
        for i in cutlass.range(steps, unroll=1):
            t = mine + (steps - 1 - i) * step
            there = self.own(g, of, t - step)
            dz, numbers = self.slopes(t, of[0], taps, here, g)
            self.from_behind(dz, behind, lane)
            if t < end:
                self.add(sums, (t, to), taps[0], dz, numbers, g)
            for x, y in zip(here, there):
                x.store(y.load())
        if const_expr(g.parts is not None):
            for i in cutlass.range_constexpr(self.spec.width + 1):
                for shift in cutlass.range_constexpr(self.lanes.bit_length() - 1):
                    sums[i] = sums[i] + cute.arch.shuffle_sync_bfly(sums[i], offset=1 << shift)
                if lane == 0:
                    g.parts[at[0], place[1], i, at[1]] = sums[i]

    def own(self, g, at, t):
        """A lane's vectors of x and of dy."""
        return self.load(g.x, at[0], t, (0,)) + self.load(g.dy, at[1], t, (0,))

    @cute.jit
    def slopes(self, t, at, taps, here, g: Given):
        """(dz of a lane's tokens from t on and room for W - 1 more, zeros behind the last token; x of these tokens and
        of `halo` vectors before)."""
        V, before = self.spec.vector, range(-self.halo, 0)
        x = self.load(g.x, at, t, before) + here[:1]
        numbers, dy = self.wide(x, t, (*before, 0)), vectors.wide(here[1])
        dz = cute.make_rmem_tensor((V + self.ahead,), Float32)
        for e in cutlass.range_constexpr(V):
            found = dy[e]
            if const_expr(self.spec.silu):
                found = found * activations.silu_and_slope(self.z(numbers, e, *taps))[1]
            dz[e] = cutlass.select_(t < g.x.shape[1], found, Float32(0.0))
        return dz, numbers

    def from_behind(self, dz, behind, lane):
        """The W - 1 dz behind a lane's own, of the lanes next to it. Those of the last lanes have been computed by the
        first ones in the step before, of the tokens behind: each lane has them in `behind` since then."""
        V, lanes = self.spec.vector, self.lanes
        for k in range(self.ahead):
            away, e = 1 + k // V, k % V
            found = cute.arch.shuffle_sync(dz[e], (lane + away) % lanes)
            dz[V + k] = cutlass.select_(lane + away >= lanes, behind[k], found)
            behind[k] = found

    def add(self, sums, place, weights, dz, numbers, g):
        """dx of a lane's tokens, and what they add to the sums. place: (the first, dx's line)."""
        V, ahead, (t, to) = self.spec.vector, self.ahead, place
        if self.spec.of_x:
            found = []
            for e in range(V):
                total = weights[ahead] * dz[e]
                for d in range(1, self.spec.width):
                    total = fma(weights[ahead - d], dz[e + d], total)
                found.append(total)
            self.store(found, g.dx, to, t)
        if self.spec.of_weights:
            first = self.halo * V - ahead
            for i in range(self.spec.width):
                for e in range(V):
                    sums[i] = fma(dz[e], numbers[first + e + i], sums[i])
            for e in range(V):
                sums[self.spec.width] = sums[self.spec.width] + dz[e]
