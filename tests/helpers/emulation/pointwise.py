"""The pointwise kernels on a CPU: the same methods, called for one thread after the other by host code.

`use(monkeypatch)` makes tkq's launch path compile and call these. What differs from the GPU: loads and stores go
element by element, and exp2, reciprocal and erf are others (activations.py)."""
import functools

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32

from tests.helpers.emulation import host
from tkq.pointwise import activations, gated, gated_ops, rope, rope_launch
from tkq.runtime.compile import build, fake
from tkq.tile import vectors


class GatedOnCpu(gated.Gated):
    @cute.jit
    def __call__(self, mX, mU, mDY, mO, mDU):
        given, work = gated.Given(mX, mU, mDY, mO, mDU), self._work(mX)
        for block in cutlass.range(cute.ceil_div(work.vectors, self.config.threads * self.config.vectors)):
            for thread in cutlass.range(self.config.threads):
                self.thread(Int32(block), Int32(thread), given, work)


class RopeOnCpu(rope.Rope):
    memory = cute.AddressSpace.generic

    @cute.jit
    def __call__(self, mX, mO, mX2, mO2, mCos, mSin, mPositions, mStarts, offset: Int32, sign: Float32):
        given = rope.Given(mX, mO, mX2, mO2, mCos, mSin, mPositions, mStarts, offset, sign)
        work, threads = self._work(given), self.config.threads
        for unit in cutlass.range(cute.ceil_div(work.units, threads) * threads):  # as many threads as a grid has
            self.thread(Int32(unit), given, work)


def _load(src, once=False):
    held = cute.make_rmem_tensor(cute.size(src), src.element_type)
    for i in range(cute.size(src)):
        held[i] = src[i]
    return held


def _store(held, dst, once=False):
    for i in range(cute.size(held)):
        dst[i] = held[i]


def _erf(x):
    """To 1.5e-7: Abramowitz and Stegun, 7.1.26."""
    t = Float32(1.0) / (Float32(1.0) + Float32(0.3275911) * cutlass.select_(x < Float32(0.0), -x, x))
    p = Float32(1.061405429)
    for c in (-1.453152027, 1.421413741, -0.284496736, 0.254829592):
        p = p * t + Float32(c)
    e = Float32(1.0) - p * t * cute.math.exp2(-x * x * Float32(activations.LOG2_E))
    return cutlass.select_(x < Float32(0.0), -e, e)


@functools.cache
def _function(recipe):
    return host.compiled(*build._made(recipe))


def use(monkeypatch):
    """From here on, for this test, tkq's launch path takes tensors of the CPU."""
    monkeypatch.setattr(gated, "Gated", GatedOnCpu)
    monkeypatch.setattr(rope, "Rope", RopeOnCpu)
    monkeypatch.setattr(fake, "tensor", functools.partial(fake.tensor, host=True))
    monkeypatch.setattr(vectors, "load", _load)
    monkeypatch.setattr(vectors, "store", _store)
    monkeypatch.setattr(activations, "_exp2", lambda x: cute.math.exp2(x))
    monkeypatch.setattr(activations, "_reciprocal", lambda x: Float32(1.0) / x)
    monkeypatch.setattr(activations, "_erf", _erf)
    for module in (gated_ops, rope_launch):
        monkeypatch.setattr(module, "_launchers", {})
        monkeypatch.setattr(module, "_launch_cache", {})
        monkeypatch.setattr(module.runtime, "function", _function)
        monkeypatch.setattr(module.arch, "require_hopper", lambda device: None)
