"""The copy between rows of any alignment on a CPU: its own `thread`, called for one thread after the other."""
import functools

import cutlass
import cutlass.cute as cute
from cutlass import Int32

from tests.helpers.emulation import host
from tkq.gemm.dense import realign
from tkq.runtime.compile import fake


class RealignOnCpu(realign.Realign):
    space = cute.AddressSpace.generic

    @cute.jit
    def __call__(self, src: cute.Tensor, dst: cute.Tensor, src2, dst2):
        work = self._work(dst)
        for block in cutlass.range(self._blocks(work)):
            for thread in cutlass.range(self.spec.threads):
                self.thread(Int32(block), Int32(thread), src, dst, work)


def function(spec, monkeypatch):
    """The compiled copy; takes tensors of the CPU."""
    monkeypatch.setattr(fake, "tensor", functools.partial(fake.tensor, host=True))
    kernel = RealignOnCpu(spec)
    return host.compiled(kernel, kernel.fake_arguments())
