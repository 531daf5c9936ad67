"""The filters' spectra as `in_registers.InRegisters` reads them: of each head a table, in one copy."""
from typing import NamedTuple

import cuda.bindings.driver as cuda
import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32, const_expr

import tkq.tile as tk
from tkq.convolution.fft.radix import EACH, Radix, Room
from tkq.convolution.fft.tables import Tables, magnitude, power, root
from tkq.convolution.fft.tokens import store16
from tkq.runtime.compile import fake
from tkq.tile import vectors

THREADS = 512
WORDS = 4  # of an access


class Given(NamedTuple):
    """taps (H, taps) fp32, up to as many as tokens, of one at least; spectra (H, `FftSpec.head_words`) int32."""

    taps: cute.Tensor
    spectra: cute.Tensor


class FilterSpectra:
    """Transforms in fp32 (`Radix`), of several short filters in a block. Causal ones at frequencies k - 1/4; of two
    parts f and g, 4096 taps each, the second one's is that of g - i f: what is around the circle once. All of a head
    are divided by a power of 2 near the largest number, and in the order of tables (`tkq.tile.woven.woven_factors`).
    """

    def __init__(self, spec):
        self.spec, self.tables, self.radix = spec, Tables(spec, THREADS, halves=True), Radix(spec.points)
        self.heads = THREADS // self.radix.threads  # of a block
        self.lanes = min(32, self.radix.threads)  # of a warp that have one head
        self.table = spec.table_words // WORDS

    # ---- host ----------------------------------------------------------------------------------

    def fake_arguments(self):
        H = fake.sym()
        return (fake.tensor("fp32", (H, fake.sym()), (fake.sym64(), 1), align=4),
                fake.tensor("int32", (H, self.spec.head_words), (fake.sym64(WORDS), 1)))

    @cute.jit
    def __call__(self, taps: cute.Tensor, spectra: cute.Tensor, stream: cuda.CUstream):
        self.kernel(Given(taps, spectra)).launch(grid=[cute.ceil_div(taps.shape[0], self.heads), 1, 1],
                                                 block=[THREADS, 1, 1], stream=stream)

    # ---- device --------------------------------------------------------------------------------

    @cute.kernel
    def kernel(self, g: Given):
        cute.arch.griddepcontrol_launch_dependents()  # which wait with what they read of this
        al, spec, size = tk.SharedAllocator(), self.spec, Room.padded(self.spec.points)
        numbers = al.allocate_tensor(Float32, cute.make_layout((2, self.heads * size, spec.blocks)), 16)
        largest = al.allocate_tensor(Int32, cute.make_layout(THREADS // self.lanes), 16)
        thread, first = cute.arch.thread_idx()[0], cute.arch.block_idx()[0] * self.heads
        me, of = thread % self.radix.threads, thread // self.radix.threads
        head, most = cutlass.min(first + of, g.taps.shape[0] - 1), Int32(0)
        for part in cutlass.range_constexpr(spec.blocks):
            room = Room(numbers[None, None, part], of * size)
            held = [self.number(g.taps, head, part, me + n * self.radix.threads) for n in range(EACH)]
            held = self.radix.run(held, room, me)
            room.meet()
            for n in cutlass.range_constexpr(EACH):
                x, y = held[n]
                most = cutlass.max(most, cutlass.max(magnitude(x), magnitude(y)))
                room.put(me + n * self.radix.threads, (x, -y if spec.conjugate else y))
        for shift in cutlass.range_constexpr(self.lanes.bit_length() - 1):
            most = cutlass.max(most, cute.arch.shuffle_sync_bfly(most, offset=1 << shift))
        if thread % self.lanes == 0:
            largest[thread // self.lanes] = most
        tk.sync_block()
        each = self.table * spec.blocks
        for item in cutlass.range(thread, self.heads * each, THREADS, unroll=1):
            self.leave(g.spectra, (numbers, largest), first, (item // each, item % each))

    def number(self, taps: cute.Tensor, head, part: int, n):
        """The n-th that is transformed, of a part."""
        x = self.tap(taps, head, part * self.spec.points + n)
        if not self.spec.causal:
            return x, Float32(0.0)
        c, s = root(n, 4 * self.spec.points)
        if part == 0:
            return x * c, x * s
        before = self.tap(taps, head, n)
        return x * c + before * s, x * s - before * c

    def tap(self, taps: cute.Tensor, head, n):
        """A filter's, 0 behind the last."""
        last = taps.shape[1] - 1
        found = vectors.run_at(taps, (head, cutlass.min(n, last)), 1)[0]
        return cutlass.select_(n <= last, found, Float32(0.0))

    @cute.jit
    def leave(self, spectra: cute.Tensor, found, first, item):
        """Four words of a head's tables, and of the first one's thread what products are multiplied by."""
        (numbers, largest), (of, at) = found, item
        most, warps = Int32(0), self.radix.threads // self.lanes
        for w in cutlass.range_constexpr(warps):
            most = cutlass.max(most, largest[of * warps + w])
        down, up = power(most, 0)
        room = Room(numbers[None, None, at // self.table], of * Room.padded(self.spec.points))
        place, words = at % self.table, cute.make_rmem_tensor((WORDS,), Int32)
        thread, i = place % tk.WARPGROUP, place // tk.WARPGROUP  # of fp16, two of `tkq.tile.factor_place`'s
        rows = [thread // 32 * 16 + thread % 32 // 4 + 8 * r for r in range(2)]
        if const_expr(self.spec.exact):
            row = cutlass.select_(i % 2 == 0, rows[0], rows[1])
            for j, x in enumerate(self.two(room, row, thread % 4 * 2 + i // 2 * 8)):
                words[j] = (x * down).bitcast(Int32)
        else:
            for r in cutlass.range_constexpr(2):
                four = [x * down for x in self.two(room, rows[r], thread % 4 * 2 + i * 8)]
                narrow = cute.recast_tensor(tk.narrow_four(four, cutlass.Float16), Int32)
                words[2 * r], words[2 * r + 1] = narrow[0], narrow[1]
        head = first + of
        there, behind = head < spectra.shape[0], self.spec.blocks * self.table * WORDS
        run = vectors.run_at(spectra, (head, at * WORDS), WORDS).iterator.toint()
        store16(run, *[words[j] for j in range(WORDS)], there)
        run = vectors.run_at(spectra, (head, behind), WORDS).iterator.toint()
        store16(run, up.bitcast(Int32), Int32(0), Int32(0), Int32(0), there & (at == 0))

    def two(self, room, row, col):
        """Two neighbours' real and imaginary parts."""
        k1, found = self.tables.row_frequency(row), []
        for e in range(2):
            found += room.get(k1 + self.spec.rows * self.tables.frequency(col + e))
        return found
