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
WARPS, AT_ONCE = THREADS // WARP, THREADS // CHUNK  # of a block: warps; chunks, of which a thread has one token
FAR = 4  # times as many chunks, whose gates are asked for at once
NOTHING = -160.0  # as a power of 2: of numbers up to 2^10 it leaves 0 in fp32, of any 2^-32


class Reach:
    """reach[way, b * N + n, h], of the n-th of N segments of a sequence: how many of its last chunks reach the state
    behind it (way 0), or, where asked for, of its first ones, reversed, the state before it (way 1); `ALL` where the
    state at its other end does, too.

    The delta rule makes of a state S

        S[t] = exp(g[t]) (I - beta[t] k[t] k[t]') S[t - 1] + ..

    and a matrix I - beta k k' makes nothing larger by more than the larger of 1 and |beta k'k - 1|. Where the product
    of these bounds over some chunks is below 2^NOTHING, a state before them, however it was made, leaves nothing behind
    them. That it is not finite is lost there, too.

    A block has one way, segment and head, a thread one token of eight chunks. It adds up gates alone, 32 chunks at a
    time, until they are below; where they never are, it is done. Then it goes through the chunks again, with keys. The
    order of each sum is that of the tokens."""

    def __init__(self, spec: ReachSpec):
        self.spec = spec

    def fake_arguments(self):
        """Compiled for any B, S, heads and segments."""
        spec, (B, S, H, HO, rows, ways) = self.spec, (fake.sym() for _ in range(6))
        k = fake.tensor(spec.dtype, (B, S, H, spec.head_dim), (*(fake.sym64(divisibility=8) for _ in range(3)), 1))
        return (k, any_strides("fp32", (B, S, HO)), any_strides(spec.beta, (B, S, HO)),
                fake.tensor("int32", (ways, rows, HO), align=4))

    @cute.jit
    def __call__(self, k: cute.Tensor, g: cute.Tensor, beta: cute.Tensor, reach: cute.Tensor, stream: cuda.CUstream):
        """k: (B, S, H, K). g, beta: (B, S, HO). reach: (1 or 2, B * N, HO)."""
        ways, rows, heads = reach.shape
        self.kernel(k, g, beta, reach).launch(grid=[heads, rows, ways], block=[THREADS, 1, 1],
                                              stream=stream)

    @cute.kernel
    def kernel(self, k: cute.Tensor, g: cute.Tensor, beta: cute.Tensor, reach: cute.Tensor):
        head, row, way = cute.arch.block_idx()
        thread, _, _ = cute.arch.thread_idx()
        sums = tk.SharedAllocator().vector(FAR * WARPS)[None, 0]
        whole, segments = cute.ceil_div(g.shape[1], CHUNK), reach.shape[1] // g.shape[0]
        each = cute.ceil_div(whole, segments)
        first, batch = row % segments * each, row // segments
        chunks = cutlass.max(cutlass.min(each, whole - first), 0)
        found, total = cute.make_rmem_tensor((1,), Int32), cute.make_rmem_tensor((1,), Float32)

        of_segment = way, first, chunks, g.shape[1]
        found[0], total[0] = Int32(ALL), Float32(0.0)
        for i in cutlass.range(cute.ceil_div(chunks, FAR * AT_ONCE), unroll=1):
            if found[0] == ALL:
                tk.sync_block()
                for part in cutlass.range_constexpr(FAR):
                    token, there = self.token(of_segment, i * FAR + part, thread)
                    self.share(sums, part * WARPS, thread, self.gate(g, (batch, token, head), there))
                tk.sync_block()
                self.add_up(sums, i * FAR * AT_ONCE, FAR * AT_ONCE, found, total)
        if found[0] < ALL:
            found[0], total[0] = Int32(ALL), Float32(0.0)
            for i in cutlass.range(cute.ceil_div(chunks, AT_ONCE), unroll=1):
                if found[0] == ALL:
                    token, there = self.token(of_segment, i, thread)
                    tk.sync_block()
                    self.share(sums, 0, thread, self.bound(k, g, beta, (batch, token, head), there))
                    tk.sync_block()
                    self.add_up(sums, i * AT_ONCE, AT_ONCE, found, total)
        if thread == 0:
            reach[way, row, head] = found[0]

    def token(self, of_segment, i, thread):
        """(a thread's token of the i-th eight chunks, from the end that is reached on; whether there is one).
        of_segment: the way, the first chunk, how many there are, the sequence's tokens."""
        way, first, chunks, tokens = of_segment
        mine = i * AT_ONCE + thread // CHUNK
        chunk = first + cutlass.select_(way == 0, chunks - 1 - mine, mine)
        token = chunk * CHUNK + thread % CHUNK
        return token, (mine < chunks) & (token < tokens)

    def add_up(self, sums: cute.Tensor, before, count, found: cute.Tensor, total: cute.Tensor):
        """total of so many chunks more, and found: with which of them it is below. before: chunks before them."""
        for c in range(count):
            for part in range(CHUNK // WARP):
                total[0] = total[0] + sums[c * (CHUNK // WARP) + part]
            below = (found[0] == ALL) & (total[0] < NOTHING)
            found[0] = cutlass.select_(below, before + c + 1, found[0])

    @cute.jit
    def gate(self, g: cute.Tensor, at, there):
        """A token's decay, as a power of 2, as the engine has it; 0 where there is none."""
        found = Float32(0.0)
        if there:
            gate = g[at] * tk.LOG2E
            found = cutlass.select_(gate < LOWEST, Float32(LOWEST), gate)
        return found

    @cute.jit
    def bound(self, k: cute.Tensor, g: cute.Tensor, beta: cute.Tensor, at, there):
        """Likewise, of what a token makes of a state."""
        batch, token, head = at
        of_key = head // (g.shape[2] // k.shape[2])
        square = self.squares(k, (batch, token - tk.lane_id(), of_key))
        found = self.gate(g, at, there)
        if there:
            longer = square * Float32(beta[at])
            longer = cutlass.select_(longer < 0.0, 1.0 - longer, longer - 1.0)
            found = found + cutlass.select_(longer > 1.0, cute.math.log2(longer), Float32(0.0))
        return found

    def squares(self, k: cute.Tensor, at):
        """The sum of a key's squares, of a lane's token; of a token that is not there anything. at: (batch, the warp's
        first token, head). Neighbouring lanes have a key, so that each access is of whole rows."""
        (batch, first, head), lane, lanes = at, tk.lane_id(), self.spec.head_dim // VECTOR
        keys, last, mine = WARP // lanes, k.shape[1] - 1, Float32(0.0)
        held = []
        for i in range(0, WARP, keys):
            token = cutlass.max(cutlass.min(first + (i + lane // lanes), last), 0)
            held.append(vectors.load(vectors.run_at(k, (batch, token, head, lane % lanes * VECTOR), VECTOR)))
        for i, of_key in enumerate(held):
            total = Float32(0.0)
            for x in vectors.wide(of_key):
                total = cute.math.fma(x, x, total)
            for bit in range(lanes.bit_length() - 1):
                total = total + cute.arch.shuffle_sync_bfly(total, offset=1 << bit)
            mine = cutlass.select_(lane // keys == i, cute.arch.shuffle_sync(total, lane % keys * lanes), mine)
        return mine

    @cute.jit
    def share(self, sums: cute.Tensor, at, thread, x):
        """sums[at + i] = the sum over the i-th warp."""
        total = cute.make_rmem_tensor((1,), Float32)
        total[0] = x
        for i in cutlass.range_constexpr(WARP.bit_length() - 1):
            total[0] = total[0] + cute.arch.shuffle_sync_bfly(total[0], offset=1 << i)
        if thread % WARP == 0:
            sums[at + thread // WARP] = total[0]
