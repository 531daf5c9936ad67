"""The largest numbers of sequences, which they are divided by before they are transformed."""
from typing import NamedTuple, Optional

import cuda.bindings.driver as cuda
import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32

import tkq.tile as tk
from tkq.convolution.fft.long.spec import SEGMENT
from tkq.convolution.fft.long.steps import EACH, load_run
from tkq.convolution.fft.sequences import Sequences
from tkq.convolution.fft.tables import magnitude
from tkq.runtime.compile import fake

THREADS = 256
TOGETHER = 4  # loads


class Given(NamedTuple):
    """x and a gate (B, H, L); largest (H, B, segments), magnitudes as ints."""

    x: cute.Tensor
    gate: Optional[cute.Tensor]
    largest: cute.Tensor


class Largest:
    """largest = the largest magnitude of x times a gate, of each segment of a sequence. A block, a segment."""

    def __init__(self, spec):
        self.spec, self.dtype = spec, tk.element_type(spec.dtype)
        self.sequences = Sequences(spec, self.dtype)

    # ---- host ----------------------------------------------------------------------------------

    def fake_arguments(self):
        """Compiled for any sizes and strides, but of neighbouring tokens."""
        B, H, L = fake.sym(), fake.sym(), fake.sym(divisibility=self.spec.vector)

        def operand():
            steps = [fake.sym64(divisibility=128 // self.dtype.width) for _ in range(2)]
            return fake.tensor(self.spec.dtype, (B, H, L), (*steps, 1))

        return operand(), (operand() if self.spec.gate else None, fake.tensor("int32", (H, B, fake.sym()), align=4))

    @cute.jit
    def __call__(self, x: cute.Tensor, others, stream: cuda.CUstream):
        """others: those of `Given` behind x."""
        H, B, segments = others[1].shape
        self.kernel(Given(x, *others)).launch(grid=[H * B * segments, 1, 1], block=[THREADS, 1, 1], stream=stream)

    # ---- device --------------------------------------------------------------------------------

    @cute.kernel
    def kernel(self, g: Given):
        of_warps = tk.SharedAllocator().allocate_tensor(Int32, cute.make_layout(THREADS // 32), 16)
        _, B, segments = g.largest.shape
        me, item = cute.arch.thread_idx()[0], cute.arch.block_idx()[0]
        head, batch, first = item // segments // B, item // segments % B, item % segments * SEGMENT
        most = Int32(0)
        for i in cutlass.range(SEGMENT // (THREADS * EACH * TOGETHER), unroll=1):
            values = cute.make_rmem_tensor((EACH, TOGETHER), Float32)
            for j in cutlass.range_constexpr(TOGETHER):
                token = first + ((i * TOGETHER + j) * THREADS + me) * EACH
                load_run(values[None, j], self.sequences, g, (head, batch, token))
            for j in cutlass.range_constexpr(TOGETHER):
                for e in cutlass.range_constexpr(EACH):
                    most = cutlass.max(most, magnitude(values[e, j]))
        most, warp = cute.arch.warp_redux_sync(most, "max"), tk.warp_id()  # which all lanes of a warp ask together
        if tk.lane_id() == 0:
            of_warps[warp] = most
        tk.sync_block()
        if me == 0:
            for w in cutlass.range_constexpr(THREADS // 32):
                most = cutlass.max(most, of_warps[w])
            g.largest[head, batch, item % segments] = most
