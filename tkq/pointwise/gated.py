"""act(gate) * up and its gradients: one pass over memory."""
from typing import Optional

import cuda.bindings.driver as cuda
import cutlass
import cutlass.cute as cute
from cutlass import Int32, const_expr

from .. import tile as tk
from . import access, plan
from .activations import VALUE, VALUE_AND_SLOPE


class Gated:
    """The result's M x N elements are counted in vectors, row after row, and every thread takes `vectors` of them:

        block b, thread t:   vectors  b * threads * vectors + j * threads + t,   j = 0 .. vectors - 1

    so a warp's accesses are neighbours, N need not fit any tile, and a thread's loads are all under way before the
    first is used. A thread past the end loads the last vector again and stores nothing. No shared memory, no barrier.
    """

    def __init__(self, spec, config):
        self.spec, self.config = spec, config
        self.dtype = tk.element_type(spec.dtype)

    @cute.jit
    def __call__(self, mX: cute.Tensor, mU: Optional[cute.Tensor], mDY: Optional[cute.Tensor],
                 mO: Optional[cute.Tensor], mDU: Optional[cute.Tensor], stream: cuda.CUstream):
        """Forward: mX gate, mU up, mO the result. Backward: mDY too; mO dgate and mDU dup, None where not wanted.
        All are (M, N); packed, mX (and in the backward mO) is (M, 2 N), and mU and mDU are None."""
        N = self._columns(mX)
        per_row = N // self.spec.vector
        total = mX.shape[0] * per_row
        threads = self.config.threads
        self.kernel(mX, mU, mDY, mO, mDU, total, N, cute.fast_divmod_create_divisor_v2(per_row)).launch(
            grid=[cute.ceil_div(total, threads * self.config.vectors), 1, 1], block=[threads, 1, 1], stream=stream)

    def _columns(self, mX):
        return mX.shape[1] if self.spec.packing == "apart" else mX.shape[1] // 2

    @cute.kernel
    def kernel(self, mX: cute.Tensor, mU: Optional[cute.Tensor], mDY: Optional[cute.Tensor],
               mO: Optional[cute.Tensor], mDU: Optional[cute.Tensor], total: Int32, N: Int32,
               per_row: cute.FastDivmodDivisorV2):
        vectors, v = self.config.vectors, self.spec.vector
        block, thread = cute.arch.block_idx()[0], cute.arch.thread_idx()[0]
        mine = [plan.vector_of(self.config, block, thread, j) for j in range(vectors)]
        places, held = [], []
        for j in cutlass.range_constexpr(vectors):
            row, vector = divmod(cutlass.min(mine[j], total - 1), per_row)
            at = Int32(row), Int32(vector) * v
            places.append(at)
            held.append((*self._load_pair(mX, mU, at, N), self._load(mDY, at, v)))
        for j in cutlass.range_constexpr(vectors):
            inside = mine[j] < total
            gate, up, dy = held[j]
            if const_expr(self.spec.backward):
                self._store_pair(*self._gradients(gate, up, dy), mO, mDU, places[j], N, inside)
            else:
                self._store(self._value(gate, up), mO, places[j], inside)

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

    # ---- memory -----------------------------------------------------------------------------------------

    def _load(self, m, at, n):
        return None if m is None else access.load(access.run_at(m, at, n), once=True)

    def _load_pair(self, mX, mU, at, N):
        """(gate, up) of a vector; (both by turns, None) where they interleave."""
        (row, col), v = at, self.spec.vector
        if self.spec.packing == "interleaved":
            return self._load(mX, (row, 2 * col), 2 * v), None
        if self.spec.packing == "split":
            return self._load(mX, at, v), self._load(mX, (row, col + N), v)
        return self._load(mX, at, v), self._load(mU, at, v)

    def _store(self, values, m, at, inside):
        access.store(access.packed(values, self.dtype), access.run_at(m, at, len(values)), inside)

    def _store_pair(self, dgate, dup, mO, mDU, at, N, inside):
        row, col = at
        if self.spec.packing == "interleaved":
            both = [value for pair in zip(dgate, dup, strict=True) for value in pair]
            self._store(both, mO, (row, 2 * col), inside)
        elif self.spec.packing == "split":
            self._store(dgate, mO, at, inside)
            self._store(dup, mO, (row, col + N), inside)
        else:
            if dgate is not None:
                self._store(dgate, mO, at, inside)
            if dup is not None:
                self._store(dup, mDU, at, inside)
