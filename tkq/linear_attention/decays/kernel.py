"""Decays for each column from what a layer's projection gives (Kimi Delta Attention), and gradients through that."""
from typing import Any, NamedTuple, Optional

import cuda.bindings.driver as cuda
import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32, const_expr

import tkq.tile as tk
from tkq.linear_attention.decays.function import parts, sigmoid, slope, softplus
from tkq.linear_attention.decays.spec import DecaySpec
from tkq.runtime.compile import fake
from tkq.tile import vectors

THREADS, VECTOR = 256, 4  # columns of a thread: 16 bytes of fp32
AHEAD = 4  # tokens whose loads are under way
TOKENS, LONG = 8, 64  # of a block; with gradients, whose sums are of so many tokens


class Operands(NamedTuple):
    """g: (N, C), of the spec's dtype, columns contiguous, C those of all heads. A_log: (heads,), bias: (C,), fp32. y:
    (N, C) fp32, what comes out; with gradients what comes in, and dg as g, sums: (ceil(N / LONG), 2, C) fp32 come
    out."""

    g: cute.Tensor
    A_log: cute.Tensor
    bias: cute.Tensor
    y: cute.Tensor
    dg: Optional[cute.Tensor]
    sums: Optional[cute.Tensor]


class ColumnDecays:
    """y = -exp(A_log) * softplus(x), or bound * sigmoid(exp(A_log) * x), x = g + bias, in fp32. With gradients, of a dy
    that is given,

        dg = dy dy/dx, rounded      sums[., 0] = the sum of dg, as it is not rounded      sums[., 1] = of dy dy/dA_log

    over a block's tokens, from the first to the last.

    A thread has 4 columns of each of a block's tokens; loads of 4 tokens are under way. Everything is read once and
    written once: no shared memory, no barrier."""

    def __init__(self, spec: DecaySpec):
        self.spec, self.dtype = spec, tk.element_type(spec.dtype)
        self.tokens = LONG if spec.gradient else TOKENS

    def fake_arguments(self):
        """Compiled for any number of tokens and heads."""
        n, c, heads, blocks = fake.sym(), fake.sym(divisibility=16), fake.sym(), fake.sym()

        def rows(dtype):
            return fake.tensor(dtype, (n, c), (fake.sym64(divisibility=8), 1))

        more = (rows(self.spec.dtype), fake.tensor("fp32", (blocks, 2, c))) if self.spec.gradient else (None, None)
        return rows(self.spec.dtype), (fake.tensor("fp32", (heads,), align=4), fake.tensor("fp32", (c,)), rows("fp32"),
                                       *more), Float32(0.0)

    @cute.jit
    def __call__(self, g: cute.Tensor, others: Any, bound: Float32, stream: cuda.CUstream):
        """others: those of `Operands` behind g."""
        of = Operands(g, *others)
        grid = [cute.ceil_div(g.shape[0], self.tokens), cute.ceil_div(g.shape[1], THREADS * VECTOR), 1]
        self.kernel(of, bound).launch(grid=grid, block=[THREADS, 1, 1], stream=stream)

    @cute.kernel
    def kernel(self, of: Operands, bound: Float32):
        block, part, _ = cute.arch.block_idx()
        self.thread(block, part * THREADS + cute.arch.thread_idx()[0], of, bound)

    @cute.jit
    def thread(self, block: Int32, thread: Int32, of: Operands, bound: Float32):
        """What one thread does."""
        column = thread * VECTOR
        if column < of.g.shape[1]:
            factor = cute.math.exp2(of.A_log[column // self.spec.head_dim] * tk.LOG2E, fastmath=True)
            bias = vectors.load(vectors.run_at(of.bias, (column,), VECTOR))
            first, sums = block * self.tokens, cute.make_rmem_tensor((2, VECTOR), Float32)
            sums.fill(0.0)
            for step in cutlass.range(self.tokens // AHEAD, unroll=1):
                self.add(of, (first + step * AHEAD, column), (factor, bias, bound), sums)
            if const_expr(self.spec.gradient):
                for i in cutlass.range_constexpr(2):
                    found = vectors.packed([sums[i, e] for e in range(VECTOR)], Float32)
                    vectors.store(found, vectors.run_at(of.sums, (block, i, column), VECTOR))

    @cute.jit
    def add(self, of: Operands, at, given, sums: cute.Tensor):
        """A few tokens. Behind the last one it is read again and has no part."""
        (token, column), (factor, bias, bound) = at, given
        last = of.g.shape[0] - 1
        held = [[vectors.load(vectors.run_at(x, (cutlass.min(token + i, last), column), VECTOR))
                 for x in (of.g, of.y)[:1 + self.spec.gradient]] for i in range(AHEAD)]
        for i in cutlass.range_constexpr(AHEAD):
            found, x = [], [a + b for a, b in zip(vectors.wide(held[i][0]), vectors.wide(bias))]
            if const_expr(self.spec.gradient):
                dy, there = vectors.wide(held[i][1]), token + i <= last
                for e in cutlass.range_constexpr(VECTOR):
                    dx, da = self.gradients(x[e], dy[e], factor, bound)
                    sums[0, e] = sums[0, e] + cutlass.select_(there, dx, Float32(0.0))
                    sums[1, e] = sums[1, e] + cutlass.select_(there, da, Float32(0.0))
                    found.append(dx)
            else:
                found = [self.logarithm(z, factor, bound) for z in x]
            if token + i <= last:
                to, dtype = (of.dg, self.dtype) if self.spec.gradient else (of.y, Float32)
                vectors.store(vectors.packed(found, dtype), vectors.run_at(to, (token + i, column), VECTOR))

    def logarithm(self, x, factor, bound):
        if self.spec.bounded:
            z = factor * x
            return bound * sigmoid(z, parts(z))
        return -factor * softplus(x, parts(x))

    def gradients(self, x, dy, factor, bound):
        """(that of x, that of A_log)"""
        if self.spec.bounded:
            dx = dy * (bound * factor) * slope(parts(factor * x))
            return dx, dx * x
        of = parts(x)
        return -factor * sigmoid(x, of) * dy, -factor * softplus(x, of) * dy
