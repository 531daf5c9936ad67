"""A few tokens of a causal convolution for each of many sequences, states in a pool that is updated in place."""
from typing import NamedTuple, Optional

import cuda.bindings.driver as cuda
import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32, Int64, const_expr

import tkq.tile as tk
from tkq.convolution.taps import fma
from tkq.pointwise import activations
from tkq.runtime.compile import fake
from tkq.tile import vectors


class Operands(NamedTuple):
    """Beside x (N, T, C) or (N, C): the pool (M, C, L), weight (C, W), bias (C,), indices (N,), y as x."""

    pool: cute.Tensor
    weight: cute.Tensor
    bias: Optional[cute.Tensor]
    indices: Optional[cute.Tensor]
    y: cute.Tensor


class Given(NamedTuple):
    """x and `Operands`."""

    x: cute.Tensor
    pool: cute.Tensor
    weight: cute.Tensor
    bias: Optional[cute.Tensor]
    indices: Optional[cute.Tensor]
    y: cute.Tensor


class ConvStep:
    """A thread has a channel of a sequence: its columns of the pool's row are in registers from one token to the next.
    Of longer rows the last W - 1 columns are, and then the columns move one after the other, each T to the left, the
    new inputs at the end. Nobody else reads or writes that row's channel: no shared memory, no barrier, and in
    place."""

    THREADS = 128

    def __init__(self, spec):
        self.spec, self.dtype, self.ahead = spec, tk.element_type(spec.dtype), spec.width - 1
        self.state, self.held = tk.element_type(spec.state), spec.columns or spec.width - 1

    def fake_arguments(self):
        """Compiled for any sizes and any strides but those of the weight and the bias."""
        spec, N, T, C = self.spec, fake.sym(), fake.sym(), fake.sym()
        size = lambda kind: 8 if kind == "int64" else 4 if kind == "int32" else tk.element_type(kind).width // 8
        of = lambda kind, *shape: fake.tensor(kind, shape, tuple(fake.sym64() for _ in shape), align=size(kind))
        weight = fake.tensor(spec.weight, (C, spec.width), align=size(spec.weight))
        bias = spec.bias and fake.tensor(spec.bias, (C,), align=size(spec.bias))
        indices = spec.indices and of(spec.indices, N)
        x, y = (of(spec.dtype, *((N, T, C) if spec.several else (N, C))) for _ in range(2))
        return x, Operands(of(spec.state, fake.sym(), C, spec.columns or fake.sym()), weight, bias, indices, y)

    @cute.jit
    def __call__(self, x: cute.Tensor, operands: Operands, stream: cuda.CUstream):
        self.kernel(self.given(x, operands)).launch(grid=[x.shape[0], cute.ceil_div(x.shape[-1], self.THREADS), 1],
                                                    block=[self.THREADS, 1, 1], stream=stream)

    def given(self, x, operands):
        """With a dimension of tokens, where there is none."""
        if self.spec.several:
            return Given(x, *operands)
        x, y = (cute.make_tensor(t.iterator, cute.make_layout((t.shape[0], 1, t.shape[1]),
                                                              stride=(t.stride[0], 0, t.stride[1])))
                for t in (x, operands.y))
        return Given(x, *operands[:-1], y)

    @cute.kernel
    def kernel(self, g: Given):
        n, block, _ = cute.arch.block_idx()
        self.thread(n, block * self.THREADS + cute.arch.thread_idx()[0], g)

    @cute.jit
    def thread(self, n, channel, g: Given):
        """What one thread does: the tests run it on a CPU, one after the other."""
        rows, C, _ = g.pool.shape
        if channel < C:
            row = Int32(n)
            if const_expr(g.indices is not None):
                row = self.row(g.indices[n])
            if row >= 0 and row < rows:
                self.tokens((row, n, channel), g)
            else:
                for t in cutlass.range(g.x.shape[1], unroll=1):
                    at(g.y, (n, t, channel))[0] = self.dtype(0.0)

    def row(self, index):
        """An index as 32 bits: what is no row stays none."""
        if self.spec.indices == "int64":
            return Int32(cutlass.max(cutlass.min(index, Int64((1 << 31) - 1)), Int64(-1)))
        return Int32(index)

    @cute.jit
    def tokens(self, place, g: Given):
        row, n, channel = place
        L, T = g.pool.shape[2], g.x.shape[1]
        held = self.held
        window = cute.make_rmem_tensor((held,), Float32)
        for i in cutlass.range_constexpr(held):
            window[i] = Float32(at(g.pool, (row, channel, L - held + i))[0])
        weights = [Float32(g.weight[channel, i]) for i in range(self.spec.width)]
        bias = Float32(0.0 if g.bias is None else g.bias[channel])
        for t in cutlass.range(T, unroll=1):
            new = Float32(at(g.x, (n, t, channel))[0])
            found = bias
            for i in cutlass.range_constexpr(self.ahead):
                found = fma(weights[i], window[held - self.ahead + i], found)
            found = fma(weights[self.ahead], new, found)
            at(g.y, (n, t, channel))[0] = self.dtype(activations.silu(found) if self.spec.silu else found)
            for i in cutlass.range_constexpr(held - 1):
                window[i] = window[i + 1]
            window[held - 1] = new
        if const_expr(self.spec.columns):
            for i in cutlass.range_constexpr(held):
                at(g.pool, (row, channel, i))[0] = self.state(window[i])
        else:
            for i in cutlass.range(L, unroll=1):
                if i + T < L:
                    at(g.pool, (row, channel, i))[0] = at(g.pool, (row, channel, i + T))[0]
                else:
                    at(g.pool, (row, channel, i))[0] = self.state(Float32(at(g.x, (n, i + T - L, channel))[0]))


def at(x, coord):
    """The element at a place, its address computed in 64 bits."""
    return cute.make_tensor(vectors.domain_offset_i64(coord, x).iterator, cute.make_layout(1))
