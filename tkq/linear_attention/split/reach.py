"""How many chunks of a segment reach the state at its end, where decays leave nothing of those before them."""
import cuda.bindings.driver as cuda
import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32

import tkq.tile as tk
from tkq.linear_attention.config import ALL, CHUNK
from tkq.linear_attention.engine.gates import LOWEST
from tkq.linear_attention.engine.packed import any_strides
from tkq.linear_attention.split.spec import ReachSpec
from tkq.runtime.compile import fake
from tkq.tile import vectors

THREADS, WARP, VECTOR = 512, 32, 8
AT_ONCE = THREADS // CHUNK  # chunks: a thread has one token
NOTHING = -160.0  # as a power of 2: of numbers up to 2^10 it leaves 0 in fp32, of any 2^-32


class Reach:
    """reach[way, b * N + n, h], of the n-th of N segments of a sequence: how many of its last chunks reach the state
    behind it (way 0), or of its first ones, reversed, the state before it (way 1); `ALL` where the state at its other
    end does, too.

    The delta rule makes of a state S

        S[t] = exp(g[t]) (I - beta[t] k[t] k[t]') S[t - 1] + ..

    and a matrix I - beta k k' makes nothing larger by more than the larger of 1 and |beta k'k - 1|. Where the product
    of these bounds over some chunks is below 2^NOTHING, a state before them, however it was made, leaves nothing behind
    them. That it is not finite is lost there, too.

    A block has one way, segment and head: it adds up all gates, and if they alone leave something it is done. Otherwise
    it goes through eight chunks at a time until the bound is reached, a token a thread. No atomics: the order of each
    sum is that of the tokens."""

    def __init__(self, spec: ReachSpec):
        self.spec = spec

    def fake_arguments(self):
        """Compiled for any B, S, heads and segments."""
        spec, (B, S, H, HO, rows) = self.spec, (fake.sym() for _ in range(5))
        k = fake.tensor(spec.dtype, (B, S, H, spec.head_dim), (*(fake.sym64(divisibility=8) for _ in range(3)), 1))
        return (k, any_strides("fp32", (B, S, HO)), any_strides(spec.beta, (B, S, HO)),
                fake.tensor("int32", (2, rows, HO), align=4))

    @cute.jit
    def __call__(self, k: cute.Tensor, g: cute.Tensor, beta: cute.Tensor, reach: cute.Tensor, stream: cuda.CUstream):
        """k: (B, S, H, K). g, beta: (B, S, HO). reach: (2, B * N, HO)."""
        self.kernel(k, g, beta, reach).launch(grid=[reach.shape[2], reach.shape[1], 2], block=[THREADS, 1, 1],
                                              stream=stream)

    @cute.kernel
    def kernel(self, k: cute.Tensor, g: cute.Tensor, beta: cute.Tensor, reach: cute.Tensor):
        head, row, way = cute.arch.block_idx()
        thread, _, _ = cute.arch.thread_idx()
        sums = tk.SharedAllocator().vector(THREADS // WARP)[None, 0]
        whole, segments = cute.ceil_div(g.shape[1], CHUNK), reach.shape[1] // g.shape[0]
        each = cute.ceil_div(whole, segments)
        first, batch = row % segments * each, row // segments
        chunks = cutlass.max(cutlass.min(each, whole - first), 0)
        found, total = cute.make_rmem_tensor((1,), Int32), cute.make_rmem_tensor((1,), Float32)
        found[0], total[0] = Int32(ALL), Float32(0.0)
        for i in cutlass.range(cute.ceil_div(chunks, AT_ONCE), unroll=8):
            total[0] = total[0] + self.gate(g, (batch, first * CHUNK + i * THREADS + thread, head),
                                            i * AT_ONCE + thread // CHUNK < chunks)
        self.share(sums, thread, total[0])
        total[0] = Float32(0.0)
        for i in cutlass.range_constexpr(THREADS // WARP):
            total[0] = total[0] + sums[i]
        if total[0] < NOTHING:
            total[0] = Float32(0.0)
            for i in cutlass.range(cute.ceil_div(chunks, AT_ONCE), unroll=1):
                if found[0] == ALL:
                    mine = i * AT_ONCE + thread // CHUNK
                    chunk = first + cutlass.select_(way == 0, chunks - 1 - mine, mine)
                    token = chunk * CHUNK + thread % CHUNK
                    self.share(sums, thread, self.bound(k, g, beta, (batch, token, head), mine < chunks))
                    for c in cutlass.range_constexpr(AT_ONCE):
                        for part in cutlass.range_constexpr(CHUNK // WARP):
                            total[0] = total[0] + sums[c * (CHUNK // WARP) + part]
                        if (found[0] == ALL) & (total[0] < NOTHING):
                            found[0] = i * AT_ONCE + c + 1
        if thread == 0:
            reach[way, row, head] = found[0]

    @cute.jit
    def gate(self, g: cute.Tensor, at, inside):
        """A token's decay, as a power of 2, as the engine has it; 0 where there is none."""
        found = Float32(0.0)
        if inside and at[1] < g.shape[1]:
            gate = g[at] * tk.LOG2E
            found = cutlass.select_(gate < LOWEST, Float32(LOWEST), gate)
        return found

    @cute.jit
    def bound(self, k: cute.Tensor, g: cute.Tensor, beta: cute.Tensor, at, inside):
        """Likewise, of what a token makes of a state."""
        found = self.gate(g, at, inside)
        batch, token, head = at
        if inside and token < g.shape[1]:
            square = cute.make_rmem_tensor((1,), Float32)
            square[0] = Float32(0.0)
            of_key = batch, token, head // (g.shape[2] // k.shape[2])
            for column in cutlass.range_constexpr(0, self.spec.head_dim, VECTOR):
                for x in vectors.wide(vectors.load(vectors.run_at(k, (*of_key, column), VECTOR))):
                    square[0] = cute.math.fma(x, x, square[0])
            longer = square[0] * Float32(beta[at])
            longer = cutlass.select_(longer < 0.0, 1.0 - longer, longer - 1.0)
            found = found + cutlass.select_(longer > 1.0, cute.math.log2(longer), Float32(0.0))
        return found

    @cute.jit
    def share(self, sums: cute.Tensor, thread, x):
        """sums[i] = the sum over the i-th warp, for all threads, once all are through with those before."""
        total = cute.make_rmem_tensor((1,), Float32)
        total[0] = x
        for i in cutlass.range_constexpr(WARP.bit_length() - 1):
            total[0] = total[0] + cute.arch.shuffle_sync_bfly(total[0], offset=1 << i)
        tk.sync_block()
        if thread % WARP == 0:
            sums[thread // WARP] = total[0]
        tk.sync_block()
