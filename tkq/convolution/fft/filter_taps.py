"""The filters' gradients, of the sums that `filter_gradient.FilterGradient` leaves: transformed back."""
from typing import NamedTuple

import cuda.bindings.driver as cuda
import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32, const_expr

import tkq.tile as tk
from tkq.convolution.fft.radix import EACH, Radix, Room
from tkq.convolution.fft.spec import COLS, COLUMN_SCALE, row_scale
from tkq.convolution.fft.tables import halved_place, root
from tkq.runtime.compile import fake
from tkq.tile import vectors

THREADS = 512


class Given(NamedTuple):
    """sums as `filter_gradient.Given` has them; taps (H, taps) fp32, up to as many as tokens."""

    sums: cute.Tensor
    taps: cute.Tensor


class FilterTaps:
    """A transform in fp32 (`Radix`) of each head and each 4096 taps of it; of short ones several in a block. Sums of
    splits and of a tile's transforms are added up first, in order. Of two blocks, taps before those of the second one
    are the first one's: of i times the second spectrum the real part."""

    def __init__(self, spec):
        self.spec, self.radix = spec, Radix(spec.points, inverse=True)
        self.items = THREADS // self.radix.threads  # of a block

    # ---- host ----------------------------------------------------------------------------------

    def fake_arguments(self):
        H = fake.sym()
        return (fake.tensor("fp32", (H, self.spec.blocks, fake.sym(), 16, self.spec.summed_threads, 4)),
                fake.tensor("fp32", (H, fake.sym()), (fake.sym64(), 1), align=4))

    @cute.jit
    def __call__(self, sums: cute.Tensor, taps: cute.Tensor, stream: cuda.CUstream):
        grid = cute.ceil_div(sums.shape[0] * self.spec.blocks, self.items)
        self.kernel(Given(sums, taps)).launch(grid=[grid, 1, 1], block=[THREADS, 1, 1], stream=stream,
                                           use_pdl=True)

    # ---- device --------------------------------------------------------------------------------

    @cute.kernel
    def kernel(self, g: Given):
        cute.arch.griddepcontrol_wait()
        size, spec, (H, taps) = Room.padded(self.spec.points), self.spec, g.taps.shape
        numbers = tk.SharedAllocator().allocate_tensor(Float32, cute.make_layout((2, self.items * size)), 16)
        thread = cute.arch.thread_idx()[0]
        me, of = thread % self.radix.threads, thread // self.radix.threads
        item = cute.arch.block_idx()[0] * self.items + of
        head, block = cutlass.min(item // spec.blocks, H - 1), item % spec.blocks
        total = cute.make_rmem_tensor((2, EACH), Float32)
        total.fill(0.0)
        count = g.sums.shape[2] * spec.summed_transforms
        for i in cutlass.range(count, unroll=1):
            for n in cutlass.range_constexpr(EACH):
                x, y = self.read(g.sums, (head, block), i, me + n * self.radix.threads)
                total[0, n], total[1, n] = total[0, n] + x, total[1, n] + y
        if const_expr(spec.blocks > 1):
            for i in cutlass.range(cutlass.select_(block == 0, count, Int32(0)), unroll=1):
                for n in cutlass.range_constexpr(EACH):
                    x, y = self.read(g.sums, (head, 1), i, me + n * self.radix.threads)
                    total[0, n], total[1, n] = total[0, n] - y, total[1, n] + x
        held = self.radix.run([(total[0, n], total[1, n]) for n in range(EACH)], Room(numbers, of * size), me)
        scale = 1.0 / (row_scale(spec.rows) * COLUMN_SCALE) ** 2 / spec.points
        for n in cutlass.range_constexpr(EACH):
            at = me + n * self.radix.threads
            found, tap = self.real(held[n], at) * scale, block * spec.points + at
            if item // spec.blocks < H and tap < taps:
                vectors.run_at(g.taps, (head, tap), 1)[0] = found

    def real(self, x, n):
        """The real part of a tap; causal ones were at frequencies k - 1/4."""
        if not self.spec.causal:
            return x[0]
        c, s = root(n, 4 * self.spec.points)
        return x[0] * c + x[1] * s

    def read(self, sums: cute.Tensor, place, i, k):
        """A number of a spectrum, of the i-th of a head's splits and transforms in a tile."""
        transforms, rows = self.spec.summed_transforms, self.spec.rows
        (head, block), split, transform = place, i // transforms, i % transforms
        k1, k2 = k % rows, k // rows
        row, col = transform * rows + k1, k2 // 2 + COLS // 2 * (k2 % 2)
        if self.spec.halved_rows:
            row = halved_place(transform, k1 // 2, k1 % 2, rows)
        thread, word = row // 16 * 32 + row % 8 * 4 + col % 8 // 2, col // 8 * 2 + row // 8 % 2
        two = cute.make_rmem_tensor((2,), Float32)
        cute.autovec_copy(vectors.run_at(sums, (head, block, split, word, thread, col % 2 * 2), 2), two)
        return two[0], two[1]
