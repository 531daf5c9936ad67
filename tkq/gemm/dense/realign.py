"""dst = src, row by row, where the source's rows begin anywhere: what TMA does not take, into rows that it takes."""
from typing import NamedTuple, Optional

import cuda.bindings.driver as cuda
import cutlass
import cutlass.cute as cute
from cutlass import Int32, Int64, Uint32, const_expr

from ... import tile as tk
from .realign_config import UNIT, RealignSpec


class Work(NamedTuple):
    """Units in all; dividers by those of a row, and by the rows of a matrix."""

    units: Int32
    per_row: cute.FastDivmodDivisorV2
    rows: cute.FastDivmodDivisorV2


class Realign:
    """The destination's rows begin and end at multiples of 16 bytes; they are counted in units of 16. A thread makes
    ``units`` of them, ``threads`` apart:

        block b, thread t:   units  b * threads * units + j * threads + t

    One is a single store, of the source's two units that it lies across, shifted: its neighbour's first is in L1. At
    the ends of a row, where one of the two is not wholly in it, elements come one by one: nothing outside a row is
    read. What is past the source's row is zero. Two matrices are two ranges of blocks.
    """

    def __init__(self, spec: RealignSpec):
        self.spec = spec
        self.dtype = tk.element_type(spec.dtype)
        self.size = self.dtype.width // 8
        self.each = UNIT // self.size  # elements of a unit

    @cute.jit
    def __call__(self, src: cute.Tensor, dst: cute.Tensor, src2: Optional[cute.Tensor], dst2: Optional[cute.Tensor],
                 stream: cuda.CUstream):
        """src (B, rows, columns), dst the same, its columns rounded up to whole units; a second pair, or None."""
        work, work2 = self._work(dst), self._work(dst) if const_expr(dst2 is None) else self._work(dst2)
        blocks = self._blocks(work)
        more = Int32(0) if const_expr(dst2 is None) else self._blocks(work2)
        self.kernel(src, dst, work, src2, dst2, work2, blocks).launch(
            grid=[blocks + more, 1, 1], block=[self.spec.threads, 1, 1], stream=stream)

    def fake_arguments(self) -> tuple:
        """What it is compiled for: src, dst, three dimensions each; and another pair, None without ``both``."""
        from ...runtime.compile import fake

        dtype, found = self.spec.dtype, []
        for _ in range(1 + self.spec.both):
            shape, unit = (fake.sym(), fake.sym()), self.each
            found.append(fake.tensor(dtype, (*shape, fake.sym()), (fake.sym64(), fake.sym64(), 1), align=self.size))
            found.append(fake.tensor(dtype, (*shape, fake.sym(unit)), (fake.sym64(unit), fake.sym64(unit), 1)))
        return *found, *(None,) * (4 - len(found))

    def _work(self, dst):
        batches, rows, cols = dst.shape
        per_row = cols // self.each
        return Work(per_row * rows * batches, cute.fast_divmod_create_divisor_v2(per_row),
                    cute.fast_divmod_create_divisor_v2(rows))

    def _blocks(self, work):
        return cute.ceil_div(work.units, self.spec.threads * self.spec.units)

    @cute.kernel
    def kernel(self, src: cute.Tensor, dst: cute.Tensor, work: Work, src2: Optional[cute.Tensor],
               dst2: Optional[cute.Tensor], work2: Work, blocks: Int32):
        block, thread = cute.arch.block_idx()[0], cute.arch.thread_idx()[0]
        if const_expr(dst2 is None):
            self.thread(block, thread, src, dst, work)
        else:
            if block < blocks:
                self.thread(block, thread, src, dst, work)
            else:
                self.thread(block - blocks, thread, src2, dst2, work2)

    @cute.jit
    def thread(self, block: Int32, thread: Int32, src: cute.Tensor, dst: cute.Tensor, work: Work):
        """What one thread does: the tests run it on a CPU, one after the other."""
        spec = self.spec
        first = block * (spec.threads * spec.units) + thread
        made = [self._unit(first + j * spec.threads, src, dst, work) for j in range(spec.units)]
        for j in cutlass.range_constexpr(spec.units):
            self._load(made[j])
        for j in cutlass.range_constexpr(spec.units):
            self._store(made[j], src)

    def _unit(self, number, src, dst, work):
        """Where a unit and what it is made of lie, and whether it is there."""
        line, unit = divmod(cutlass.min(number, work.units - 1), work.per_row)
        batch, row = divmod(Int32(line), work.rows)
        from_, to = self._row(src, batch, row), self._row(dst, batch, row)
        column = Int32(unit) * self.each  # the first
        at = from_ + Int64(column) * self.size
        shift = Int32(at & (UNIT - 1))
        first, length = at - Int64(shift), Int64(src.shape[2]) * self.size
        last = first + cutlass.select_(shift == 0, Int64(UNIT), Int64(2 * UNIT))
        whole = (number < work.units) & (first >= from_) & (last <= from_ + length)
        words = cute.make_rmem_tensor((2 * UNIT // 4,), Uint32)
        there = number < work.units
        return Unit(words, first, shift, to + Int64(column) * self.size, whole, there, from_, column)

    def _row(self, x, batch, row):
        """The address of a row."""
        return x.iterator.toint() + (Int64(batch) * Int64(x.stride[0]) + Int64(row) * Int64(x.stride[1])) * self.size

    @cute.jit
    def _load(self, u: cutlass.Constexpr):
        if u.whole:
            for half in cutlass.range_constexpr(2):
                if const_expr(half == 0):
                    cute.autovec_copy(self._at(u.first), self._half(u.words, 0))
                else:
                    if u.shift != 0:
                        cute.autovec_copy(self._at(u.first + UNIT), self._half(u.words, 1))

    def _half(self, words, half):
        n = UNIT // 4
        return cute.make_tensor(words.iterator + half * n, cute.make_layout(n))

    def _at(self, address):
        pointer = cute.make_ptr(Uint32, address, self.space, assumed_align=UNIT)
        return cute.make_tensor(pointer, cute.make_layout(UNIT // 4))

    space = cute.AddressSpace.gmem

    @cute.jit
    def _store(self, u: cutlass.Constexpr, src: cute.Tensor):
        if u.whole:
            cute.autovec_copy(self._shifted(u), self._at(u.to))
        else:
            if u.there:
                cute.autovec_copy(self._one_by_one(u, src), self._at(u.to))

    def _shifted(self, u):
        """The unit that begins ``shift`` bytes into the first of the two."""
        n = UNIT // 4
        w = [u.words[i] for i in range(2 * n)]
        w = [cutlass.select_((u.shift & 8) != 0, w[i + 2], w[i]) for i in range(n + 2)]
        w = [cutlass.select_((u.shift & 4) != 0, w[i + 1], w[i]) for i in range(n + 1)]
        made = cute.make_rmem_tensor((n,), Uint32)
        for i in range(n):
            if self.size == 4:
                made[i] = w[i]
            else:
                both = (w[i] >> Uint32(16)) | (w[i + 1] << Uint32(16))
                made[i] = cutlass.select_((u.shift & 2) != 0, both, w[i])
        return made

    @cute.jit
    def _one_by_one(self, u: cutlass.Constexpr, src: cute.Tensor):
        pointer = cute.make_ptr(self.dtype, u.source, self.space, assumed_align=self.size)
        line = cute.make_tensor(pointer, cute.make_layout(src.shape[2]))
        made = cute.make_rmem_tensor((self.each,), self.dtype)
        made.fill(0.0)
        for i in cutlass.range_constexpr(self.each):
            if u.column + i < src.shape[2]:
                made[i] = line[u.column + i]
        return cute.recast_tensor(made, Uint32)


class Unit(NamedTuple):
    """words: of the source's two units from address ``first`` on; shift: bytes of them that come before; to: its
    address. whole: those two lie in their row. source: the row's address; column: the unit's first one."""

    words: cute.Tensor
    first: Int64
    shift: Int32
    to: Int64
    whole: object
    there: object
    source: Int64
    column: Int32
