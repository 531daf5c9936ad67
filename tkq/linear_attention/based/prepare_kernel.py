"""What Based's gradients take of that of its outputs."""
from typing import Any, NamedTuple

import cuda.bindings.driver as cuda
import cutlass
import cutlass.cute as cute
from cutlass import Float32

from tkq.linear_attention.based.spec import GradientSpec
from tkq.runtime.compile import fake
from tkq.tile.dtypes import element_type

THREADS, LANES = 256, 16  # of a block, of a row: each has 8 columns
VECTOR = 8


class PrepareOperands(NamedTuple):
    """do: (B, S, H, V), of any strides that are multiples of 16 bytes. o, to: as do, contiguous. sums, delta: (B, S, H)
    fp32, contiguous."""

    do: cute.Tensor
    o: cute.Tensor
    sums: cute.Tensor
    to: cute.Tensor
    delta: cute.Tensor


class PrepareGradients:
    """to = do * times / sums, rounded, and delta = the sum of to * o over a row's columns: half a warp has a row."""

    def __init__(self, spec: GradientSpec):
        self.spec, self.dtype = spec, element_type(spec.dtype)

    def fake_arguments(self):
        """Compiled for any B, S and H."""
        spec, (B, S, H) = self.spec, (fake.sym() for _ in range(3))
        shape = B, S, H, spec.value_dim
        do = fake.tensor(spec.dtype, shape, (*(fake.sym64(divisibility=8) for _ in range(3)), 1))
        o, to = (fake.tensor(spec.dtype, shape) for _ in range(2))
        sums, delta = (fake.tensor("fp32", (B, S, H), align=4) for _ in range(2))
        return do, (o, sums, to, delta), Float32(1.0)

    @cute.jit
    def __call__(self, do: cute.Tensor, others: Any, times: Float32, stream: cuda.CUstream):
        """others: those of `PrepareOperands` behind do."""
        operands = PrepareOperands(do, *others)
        B, S, H = operands.sums.shape
        rows = THREADS // LANES
        self.kernel(operands, times).launch(grid=[cute.ceil_div(S * H, rows), B, 1], block=[THREADS, 1, 1],
                                            stream=stream)

    @cute.kernel
    def kernel(self, x: PrepareOperands, times: Float32):
        thread, heads = cute.arch.thread_idx()[0], x.sums.shape[2]
        row, batch = cute.arch.block_idx()[0] * (THREADS // LANES) + thread // LANES, cute.arch.block_idx()[1]
        token, head, first = row // heads, row % heads, thread % LANES * VECTOR
        total, there = Float32(0.0), token < x.sums.shape[1]
        if there and first < self.spec.value_dim:
            do, o, to = [cute.make_rmem_tensor((VECTOR,), self.dtype) for _ in range(3)]
            factor = times / x.sums[batch, token, head]
            self.move(do, x.do, batch, token, head, first)
            self.move(o, x.o, batch, token, head, first)
            for i in cutlass.range_constexpr(VECTOR):
                to[i] = self.dtype(Float32(do[i]) * factor)
                total = cute.math.fma(Float32(to[i]), Float32(o[i]), total)
            self.move(to, x.to, batch, token, head, first, True)
        for offset in (8, 4, 2, 1):
            total = total + cute.arch.shuffle_sync_bfly(total, offset=offset)
        if there and first == 0:
            x.delta[batch, token, head] = total

    def move(self, held, x, batch, token, head, first, store=False):
        row = x[batch, token, head, None]
        there = cute.make_tensor((row.iterator + first).align(16), cute.make_layout(VECTOR))
        cute.autovec_copy(*((held, there) if store else (there, held)))
