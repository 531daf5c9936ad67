"""act(gate) * up and its gradients: one pass over memory."""
from typing import NamedTuple, Optional

import cuda.bindings.driver as cuda
import cutlass
import cutlass.cute as cute
from cutlass import Int32, const_expr

from .. import tile as tk
from ..runtime.compile import fake
from ..tile import vectors as access
from . import plan
from .activations import VALUE, VALUE_AND_SLOPE


class Given(NamedTuple):
    """What came in: see `Gated.__call__`."""

    mX: cute.Tensor
    mU: Optional[cute.Tensor]
    mDY: Optional[cute.Tensor]
    mO: Optional[cute.Tensor]
    mDU: Optional[cute.Tensor]


class Work(NamedTuple):
    """Vectors in all; columns of the result; dividers by the vectors of a row and by the rows (of three dimensions)."""

    vectors: Int32
    N: Int32
    per_row: cute.FastDivmodDivisorV2
    rows: cute.FastDivmodDivisorV2


class Gated:
    """The result's M x N elements are counted in vectors, row after row, and every thread takes `vectors` of them:

        block b, thread t:   vectors  b * threads * vectors + j * threads + t,   j = 0 .. vectors - 1

    so a warp's accesses are neighbours, N need not fit any tile, and a thread's loads are all in flight before the
    first is used. A thread past the end loads the last vector again and stores nothing. No shared memory, no barrier.
    """

    def __init__(self, spec, config):
        self.spec, self.config = spec, config
        self.dtype = tk.element_type(spec.dtype)

    def fake_arguments(self):
        """Compiled for what `__call__` has: tensors of any strides but the last."""
        spec = self.spec
        bytes_, packed, v = tk.element_type(spec.dtype).width // 8, spec.packing != "apart", spec.vector
        leading = tuple(fake.sym() for _ in range(spec.rank - 1))
        columns = fake.sym(divisibility=v)
        both = fake.sym(divisibility=2 * v) if packed else None

        def tensor(wide=False):
            n, divides = (both, 2 * v if spec.packing == "interleaved" else v) if wide else (columns, v)
            strides = tuple(fake.sym64(divisibility=divides) for _ in leading)
            return fake.tensor(spec.dtype, (*leading, n), (*strides, 1), align=divides * bytes_)

        up = None if packed else tensor()
        if not spec.backward:
            return (tensor(packed), up, None, tensor(), None)
        dgate = None if spec.gradients == "up" else tensor(packed)
        dup = None if packed or spec.gradients == "gate" else tensor()
        return (tensor(packed), up, tensor(), dgate, dup)

    @cute.jit
    def __call__(self, mX: cute.Tensor, mU: Optional[cute.Tensor], mDY: Optional[cute.Tensor],
                 mO: Optional[cute.Tensor], mDU: Optional[cute.Tensor], stream: cuda.CUstream):
        """Forward: mX gate, mU up, mO the result. Backward: mDY too; mO dgate and mDU dup, None where not wanted.
        All are (M, N) or (L, M, N); packed, mX (and in the backward mO) has 2 N columns, and mU and mDU are None."""
        given, config = Given(mX, mU, mDY, mO, mDU), self.config
        work = self._work(mX)
        self.kernel(given, work).launch(grid=[cute.ceil_div(work.vectors, config.threads * config.vectors), 1, 1],
                                        block=[config.threads, 1, 1], stream=stream)

    def _work(self, mX):
        N, rows = mX.shape[-1] if self.spec.packing == "apart" else mX.shape[-1] // 2, mX.shape[-2]
        per_row = N // self.spec.vector
        vectors = per_row * (rows * mX.shape[0] if self.spec.rank == 3 else rows)
        return Work(vectors, N, cute.fast_divmod_create_divisor_v2(per_row), cute.fast_divmod_create_divisor_v2(rows))

    @cute.kernel
    def kernel(self, g: Given, work: Work):
        self.thread(cute.arch.block_idx()[0], cute.arch.thread_idx()[0], g, work)

    @cute.jit
    def thread(self, block: Int32, thread: Int32, g: Given, work: Work):
        """What one thread does: the tests run it on a CPU, one after the other."""
        mine = [plan.vector_of(self.config, block, thread, j) for j in range(self.config.vectors)]
        places, held = [], []
        for j in cutlass.range_constexpr(self.config.vectors):
            row, vector = divmod(cutlass.min(mine[j], work.vectors - 1), work.per_row)
            row = (row,) if const_expr(self.spec.rank == 2) else divmod(row, work.rows)
            at = [Int32(i) for i in row], Int32(vector) * self.spec.vector
            places.append(at)
            held.append((*self._load_pair(g, at, work.N), self._load(g.mDY, at)))
        for j in cutlass.range_constexpr(self.config.vectors):
            if mine[j] < work.vectors:  # all the work, not only the store: or the compiler moves loads down past work
                self._finish(held[j], g, places[j], work.N)

    def _finish(self, held, g, at, N):
        gate, up, dy = held
        if self.spec.backward:
            self._store_pair(*self._gradients(gate, up, dy), g, at, N)
        else:
            self._store(self._value(gate, up), g.mO, at)

    # ---- arithmetic: register tensors in, lists of fp32 out -------------------------------------------

    def _pairs(self, gate, up):
        """(gate, up) of each element, as fp32."""
        if self.spec.packing == "interleaved":
            values = access.wide(gate)
            return list(zip(values[::2], values[1::2], strict=True))
        return list(zip(access.wide(gate), access.wide(up), strict=True))

    def _value(self, gate, up):
        act = VALUE[self.spec.kind]
        return [act(g) * u for g, u in self._pairs(gate, up)]

    def _gradients(self, gate, up, dy):
        """(dgate, dup), either None where it is not wanted."""
        dgate, dup = [], []
        for (g, u), d in zip(self._pairs(gate, up), access.wide(dy), strict=True):
            value, slope = VALUE_AND_SLOPE[self.spec.kind](g)
            dgate.append(d * u * slope)
            dup.append(d * value)
        wanted = self.spec.gradients
        return dgate if wanted != "up" else None, dup if wanted != "gate" else None

    # ---- memory: a place is (row, column), a row one index or two -------------------------------------

    def _load(self, m, at, shift=0, times=1):
        """The elements from column `times` * column + shift on, as many times more."""
        if m is None:
            return None
        row, col = at
        return access.load(access.run_at(m, (*row, times * col + shift), times * self.spec.vector))

    def _load_pair(self, g, at, N):
        """(gate, up) of a vector; (both by turns, None) where they interleave."""
        if self.spec.packing == "interleaved":
            return self._load(g.mX, at, times=2), None
        if self.spec.packing == "split":
            return self._load(g.mX, at), self._load(g.mX, at, shift=N)
        return self._load(g.mX, at), self._load(g.mU, at)

    def _store(self, values, m, at, shift=0, times=1):
        row, col = at
        run = access.run_at(m, (*row, times * col + shift), times * self.spec.vector)
        access.store(access.packed(values, self.dtype), run)

    def _store_pair(self, dgate, dup, g, at, N):
        if self.spec.packing == "interleaved":
            self._store([value for pair in zip(dgate, dup, strict=True) for value in pair], g.mO, at, times=2)
        elif self.spec.packing == "split":
            self._store(dgate, g.mO, at)
            self._store(dup, g.mO, at, shift=N)
        else:
            if dgate is not None:
                self._store(dgate, g.mO, at)
            if dup is not None:
                self._store(dup, g.mDU, at)
