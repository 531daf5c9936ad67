"""Sums of the parts that runs of tokens have of the gradients of weight and bias."""
from typing import Optional

import cuda.bindings.driver as cuda
import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32, const_expr

import tkq.tile as tk
from tkq.runtime.compile import fake


class Sums:
    """dweight[c, i] = the sum over runs of parts[run, i, c], dbias[c] that of parts[run, W, c], in fp32 and in the
    order of the runs, rounded once. Of many runs the sums of groups come first: groups[n, i, c], of `each` runs.

    A thread has one sum; 8 loads are in flight. No shared memory, no barrier."""

    THREADS, AT_ONCE = 128, 8

    def __init__(self, spec):
        self.spec = spec
        self.weight, self.bias = (kind and tk.element_type(kind) for kind in (spec.weight, spec.bias))
        self.taps = spec.width + int(spec.groups or spec.bias is not None)  # the last is the bias

    def fake_arguments(self):
        """Compiled for any runs and channels."""
        spec, C = self.spec, fake.sym()
        parts = lambda: fake.tensor("fp32", (fake.sym(), spec.width + 1, C), align=4)
        if spec.groups:
            return parts(), parts(), None, Int32(0)
        bias = spec.bias and fake.tensor(spec.bias, (C,), align=self.bias.width // 8)
        return parts(), fake.tensor(spec.weight, (C, spec.width), align=self.weight.width // 8), bias, Int32(0)

    @cute.jit
    def __call__(self, parts: cute.Tensor, to: cute.Tensor, dbias: Optional[cute.Tensor], each: Int32,
                 stream: cuda.CUstream):
        """to: dweight, or groups."""
        groups = to.shape[0] if const_expr(self.spec.groups) else 1
        grid = [cute.ceil_div(parts.shape[2], self.THREADS), self.taps, groups]
        self.kernel(parts, to, dbias, each).launch(grid=grid, block=[self.THREADS, 1, 1], stream=stream)

    @cute.kernel
    def kernel(self, parts: cute.Tensor, to: cute.Tensor, dbias: Optional[cute.Tensor], each: Int32):
        block, i, group = cute.arch.block_idx()
        self.thread((block * self.THREADS + cute.arch.thread_idx()[0], i, group), parts, to, dbias, each)

    @cute.jit
    def thread(self, place, parts: cute.Tensor, to: cute.Tensor, dbias: Optional[cute.Tensor], each: Int32):
        """What one thread does. place: (channel, tap, group)."""
        channel, i, group = place
        first = group * each
        runs = cutlass.min(parts.shape[0], first + each)
        if channel < parts.shape[2]:
            total = Float32(0.0)
            for base in cutlass.range(first, runs, self.AT_ONCE, unroll=1):
                held = [parts[cutlass.min(base + j, runs - 1), i, channel] for j in range(self.AT_ONCE)]
                for j in cutlass.range_constexpr(self.AT_ONCE):
                    total = total + cutlass.select_(base + j < runs, held[j], Float32(0.0))
            if const_expr(self.spec.groups):
                to[group, i, channel] = total
            else:
                if i < self.spec.width:
                    to[channel, i] = self.weight(total)
                else:
                    if const_expr(dbias is not None):
                        dbias[channel] = self.bias(total)
