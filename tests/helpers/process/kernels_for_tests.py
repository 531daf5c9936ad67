"""Small kernels that the tests of the runtime compile: on the host, where they run without a GPU, and for the GPU."""
import os
from dataclasses import dataclass

import cuda.bindings.driver as cuda
import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32

from tkq.runtime.compile import fake


@dataclass(frozen=True)
class Scale:
    """log: a file that gets a line for each compile."""

    dtype: str = "fp32"
    factor: float = 2.0
    log: str = ""


class ScaleOnHost:
    def __init__(self, factor):
        self.factor = factor

    @cute.jit
    def __call__(self, x: cute.Tensor, y: cute.Tensor):
        for i in range(cute.size(x)):
            y[i] = x[i] * Float32(self.factor)


class ScaleOnGpu(ScaleOnHost):
    @cute.jit
    def __call__(self, x: cute.Tensor, y: cute.Tensor, stream: cuda.CUstream):
        self.kernel(x, y).launch(grid=[x.shape[0], 1, 1], block=[32, 1, 1], stream=stream)

    @cute.kernel
    def kernel(self, x: cute.Tensor, y: cute.Tensor):
        thread, _, _ = cute.arch.thread_idx()
        row, _, _ = cute.arch.block_idx()
        tile = cute.local_tile(x, (1, 4), (row, thread)), cute.local_tile(y, (1, 4), (row, thread))
        held = cute.make_rmem_tensor((1, 4), Float32)
        cute.autovec_copy(tile[0], held)
        held.store(held.load() * Float32(self.factor))
        cute.autovec_copy(held, tile[1])


class ReadsARegisterByNumber:
    """What a kernel must not do: registers have no numbers at run time, so the array goes to local memory."""

    @cute.jit
    def __call__(self, x: cute.Tensor, which: Int32, stream: cuda.CUstream):
        self.kernel(x, which).launch(grid=[1, 1, 1], block=[32, 1, 1], stream=stream)

    @cute.kernel
    def kernel(self, x: cute.Tensor, which: Int32):
        thread, _, _ = cute.arch.thread_idx()
        held = cute.make_rmem_tensor((64,), Float32)
        for i in cutlass.range(64, unroll_full=True):
            held[i] = x[i * 32 + thread]
        for i in range(which):
            held[(which * i + thread) % 64] = held[(which + i * thread) % 64] + Float32(1)
        for i in cutlass.range(64, unroll_full=True):
            x[i * 32 + thread] = held[i]


def _noted(spec):
    if spec.log:
        with open(spec.log, "a") as log:
            log.write(f"{os.getpid()} {spec}\n")


def build_scale(spec):
    """On the host: y = factor * x, both (n,)."""
    _noted(spec)
    n = fake.sym()
    return ScaleOnHost(spec.factor), tuple(fake.tensor(spec.dtype, (n,), align=4, host=True) for _ in range(2))


def build_gpu_scale(spec):
    """On the GPU: y = factor * x, both (n, 128)."""
    _noted(spec)
    n = fake.sym()
    return ScaleOnGpu(spec.factor), tuple(fake.tensor(spec.dtype, (n, 128)) for _ in range(2))


def build_in_a_tuple(spec):
    """All tensors of the GPU kernel as one argument: no recipe."""
    kernel, arguments = build_gpu_scale(spec)
    return kernel, (arguments,)


def build_local_memory():
    """x (2048,), and an Int32."""
    return ReadsARegisterByNumber(), (fake.tensor("fp32", (2048,)), Int32(0))


def build_nothing():
    """Not what a builder returns."""
    return "nothing"
