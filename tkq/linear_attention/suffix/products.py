"""What states that a segment ends with, and their gradients, add to the gradients of all gates before them."""
import cuda.bindings.driver as cuda
import cutlass
import cutlass.cute as cute
from cutlass import Float32

import tkq.tile as tk
from tkq.linear_attention.spec import ProductsSpec
from tkq.runtime.compile import fake
from tkq.tile import vectors

THREADS, WARP, FOUR = 512, 32, 4
AHEAD = 8  # runs of four of each state that a thread has under way: all of one of 128 x 128


class StateProducts:
    """found[r, h] = scale * the sum of x[r, h] * y[r, h], over V and K, in fp32, in an order that V and K alone decide.

    x, y: (R, H, V, K) fp32, K contiguous. A block has a pair of states, a thread every 512th run of four elements."""

    def __init__(self, spec: ProductsSpec):
        self.spec = spec

    def fake_arguments(self):
        """Compiled for any R, H and V."""
        R, H, V = (fake.sym() for _ in range(3))
        x, y = (fake.tensor("fp32", (R, H, V, self.spec.head_dim), (*(fake.sym64(divisibility=4) for _ in range(3)), 1))
                for _ in range(2))
        return x, y, fake.tensor("fp32", (R, H), align=4), Float32(1.0)

    @cute.jit
    def __call__(self, x: cute.Tensor, y: cute.Tensor, found: cute.Tensor, scale: Float32, stream: cuda.CUstream):
        """found: (R, H), contiguous."""
        rows, heads = found.shape
        self.kernel(x, y, found, scale).launch(grid=[heads, rows, 1], block=[THREADS, 1, 1], stream=stream)

    @cute.kernel
    def kernel(self, x: cute.Tensor, y: cute.Tensor, found: cute.Tensor, scale: Float32):
        head, row, _ = cute.arch.block_idx()
        thread, _, _ = cute.arch.thread_idx()
        of_warps = tk.SharedAllocator().vector(THREADS // WARP)[None, 0]
        K, total = self.spec.head_dim, cute.make_rmem_tensor((1,), Float32)
        runs = x.shape[2] * (K // FOUR)
        total[0] = Float32(0.0)
        for base in cutlass.range(thread, runs, THREADS * AHEAD, unroll=1):
            held = []
            for i in cutlass.range_constexpr(AHEAD):
                first = cutlass.min(base + i * THREADS, runs - 1) * FOUR
                held.append([vectors.load(vectors.run_at(m, (row, head, first // K, first % K), FOUR)) for m in (x, y)])
            for i in cutlass.range_constexpr(AHEAD):
                there = base + i * THREADS < runs
                for a, b in zip(*map(vectors.wide, held[i])):
                    total[0] = cutlass.select_(there, cute.math.fma(a, b, total[0]), total[0])
        for i in cutlass.range_constexpr(WARP.bit_length() - 1):
            total[0] = total[0] + cute.arch.shuffle_sync_bfly(total[0], offset=1 << i)
        if thread % WARP == 0:
            of_warps[thread // WARP] = total[0]
        tk.sync_block()
        if thread == 0:
            parts = [of_warps[warp] for warp in range(THREADS // WARP)]
            found[row, head] = scale * sum(parts[1:], parts[0])
