"""out = f(A @ B) for unaligned operands, which TMA cannot take: any stride, any alignment. Correct, not tuned."""
import cuda.bindings.driver as cuda
import cutlass
import cutlass.cute as cute
from cutlass import Constexpr, Float32, Int32, const_expr

from ... import tile as tk
from ..epilogue import registers as ep
from . import operands
from .spec import GemmSpec

M, N, K = 64, 128, 64  # a block's tile


class UnalignedGemm:
    """A warpgroup a tile, one block each: its threads load a step of K element by element (zeros past the end), meet,
    multiply, meet again. Several blocks on an SM run under each other's loads. Gated, B's tile is 64 columns of
    the gate and the same 64 of up, each with its accumulator."""

    def __init__(self, spec: GemmSpec):
        self.spec, self.epilogue = spec, spec.epilogue
        dtype = tk.element_type(spec.dtype)
        a_t, b_t = spec.transposed
        self.parts = 2 if self.epilogue.gate else 1
        self.width = N // self.parts
        self.a_tile = tk.st(K, M, dtype) if a_t else tk.st(M, K, dtype)
        self.b_tile = tk.st(self.width, K, dtype) if b_t else tk.st(K, self.width, dtype)
        _, self.mma = operands.products(spec)

    @cute.jit
    def __call__(self, a: cute.Tensor, b: cute.Tensor, out: cute.Tensor, bias, c, alpha: Float32, beta: Float32,
                 blocks: Int32, stream: cuda.CUstream):
        spec = self.spec
        out, A = operands.matrix(out), operands.matrix(a, spec.transposed[0])
        steps = cute.ceil_div(A.shape[0] if const_expr(spec.transposed[0]) else A.shape[1], K)
        tiles = cute.ceil_div(out.shape[0], M) * cute.ceil_div(out.shape[1], self.width)
        batches = Int32(1) if const_expr(not spec.batch) else out.shape[2]
        inputs = ep.Inputs(operands.column_vector(bias, spec), operands.residual(c, spec), alpha, beta)
        self.kernel(A, operands.weights(b, spec), out, inputs, steps).launch(
            grid=[tiles * batches, 1, 1], block=[tk.WARPGROUP, 1, 1], stream=stream)

    def fake_arguments(self) -> tuple:
        """What it is compiled for: as ``DenseGemm``, but ``blocks`` is not used: it is one a tile."""
        return *operands.fakes(self.spec), Int32(1)

    @cute.kernel
    def kernel(self, a: cute.Tensor, b: cute.Tensor, out: cute.Tensor, inputs: ep.Inputs, steps: Int32):
        al = tk.SharedAllocator()
        x, y = al.tile(self.a_tile)[0], [al.tile(self.b_tile)[0] for _ in range(self.parts)]
        rows, cols = cute.ceil_div(out.shape[0], M), cute.ceil_div(out.shape[1], self.width)
        batch = cute.arch.block_idx()[0] // (rows * cols)
        number = cute.arch.block_idx()[0] - batch * (rows * cols)
        row, col = number % rows * M, number // rows * self.width
        a = operands.of_batch(a, batch) if const_expr("a" in self.spec.batch) else a
        b = operands.of_batch(b, batch) if const_expr("b" in self.spec.batch) else b
        acc = [tk.rt_fl(self.width) for _ in range(self.parts)]
        for part in acc:
            tk.zero(part)
        for step in cutlass.range(steps, unroll=1):
            self.load(a, b, x, y, step * K, row, col)
            tk.publish()
            tk.sync_block()
            for part in cutlass.range_constexpr(self.parts):
                self.mma(acc[part], x, y[part])
            tk.mma_wait()
            tk.sync_block()
        place = ep.Place(row, col)
        residual = operands.of_batch(inputs.residual, batch)
        self.finish(acc, ep.Inputs(inputs.bias, residual, inputs.alpha, inputs.beta), place)
        out = operands.of_batch(out, batch) if const_expr(self.spec.batch) else out
        tk.store_elements(out, acc[0], row, col, self.spec.accumulate)

    def load(self, a, b, x, y, k, row, col):
        a_t, b_t = self.spec.transposed
        me = tk.thread_in_warpgroup()
        tk.load_elements(x, a, k if a_t else row, row if a_t else k, tk.WARPGROUP, me)
        for part in range(self.parts):
            half = b if self.parts == 1 else b[None, None, part]
            tk.load_elements(y[part], half, col if b_t else k, k if b_t else col, tk.WARPGROUP, me)

    def finish(self, acc: Constexpr, inputs, place):
        """The epilogue, in the accumulators."""
        e = self.epilogue
        for part, x in enumerate(acc):
            bias, c = None, None
            if e.bias:
                bias, vector = tk.cv(self.width), inputs.bias if self.parts == 1 else inputs.bias[None, part]
                tk.load_cols(bias, vector, place.col, cute.size(vector))
            if e.residual:
                c = tk.rt(self.width, tk.element_type(self.spec.out))
                ep.load_residual(c, inputs.residual, place, e.residual_pairs)
            ep.linear(x, x, e, inputs, bias, c)
        ep.activate(acc[0], e, acc, place, tk.element_type(self.spec.out))
