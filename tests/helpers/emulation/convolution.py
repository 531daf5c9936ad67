"""The kernels of convolutions on a CPU: their own `thread`, called for one thread after the other, as a warp of one
lane. What differs from the GPU: loads and stores go element by element, and the exponential and the reciprocal are
others."""
import functools

import cutlass
import cutlass.cute as cute
import pytest
from cutlass import Float32, Int32

from tests.helpers.emulation import finish
from tkq.convolution import along_time, backward, forward, step, sums
from tkq.pointwise import activations


class ChannelForwardOnCpu(forward.ChannelForward):
    lanes = 1

    @cute.jit
    def __call__(self, x, operands: forward.Operands, run: Int32):
        g, (B, S, C) = forward.Given(x, *operands, run), x.shape
        for batch in cutlass.range(B):
            for part in cutlass.range(cute.ceil_div(S, run)):
                for column in cutlass.range(cute.ceil_div(C, self.spec.vector)):
                    self.thread(Int32(column), Int32(part), Int32(batch), g)


class ChannelBackwardOnCpu(backward.ChannelBackward):
    lanes = 1

    @cute.jit
    def __call__(self, x, operands: backward.Operands, run: Int32):
        g, (B, S, C) = backward.Given(x, *operands, run), x.shape
        for batch in cutlass.range(B):
            for part in cutlass.range(cute.ceil_div(S, run)):
                for column in cutlass.range(cute.ceil_div(C, self.spec.vector)):
                    self.thread(Int32(column), Int32(part), Int32(batch), g)


class SumsOnCpu(sums.Sums):
    @cute.jit
    def __call__(self, parts, to, dbias, each: Int32):
        for group in cutlass.range(to.shape[0] if self.spec.groups else 1):
            for i in cutlass.range(self.taps):
                for channel in cutlass.range(parts.shape[2]):
                    self.thread((Int32(channel), Int32(i), Int32(group)), parts, to, dbias, each)


class AlongTimeOnCpu(along_time.AlongTime):
    lanes = 1

    @cute.jit
    def __call__(self, x, operands: along_time.Operands, run: Int32):
        g, (B, S, C) = along_time.Given(x, *operands, run), x.shape
        for batch in cutlass.range(B):
            for part in cutlass.range(cute.ceil_div(S, run)):
                for channel in cutlass.range(C):
                    self.thread(Int32(0), Int32(channel), Int32(part), Int32(batch), g)

    def from_behind(self, dz, behind, lane):
        """One lane has all that is behind its tokens from the step before."""
        for k in range(self.ahead):
            dz[self.spec.vector + k] = behind[k]
        for k in range(self.ahead):
            behind[k] = dz[k]


class ConvStepOnCpu(step.ConvStep):
    @cute.jit
    def __call__(self, x, operands: step.Operands):
        given = self.given(x, operands)
        for n in cutlass.range(x.shape[0]):
            for channel in cutlass.range(x.shape[-1]):
                self.thread(Int32(n), Int32(channel), given)


def function(kernel, monkeypatch):
    """The compiled kernel, of one of this file's classes; takes tensors of the CPU."""
    with monkeypatch.context() as patched:
        patched.setattr(activations, "_exp2", lambda x: cute.math.exp2(x))
        patched.setattr(activations, "_reciprocal", lambda x: Float32(1.0) / x)
        return finish.function(kernel, patched)


@functools.cache
def compiled(of, *given):
    """`function` of `of(*given)`, one of this file's classes: tests that ask for the same have one."""
    with pytest.MonkeyPatch.context() as monkeypatch:
        return function(of(*given), monkeypatch)
