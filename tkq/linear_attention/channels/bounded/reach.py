"""How many chunks in front of a segment reach the state that it begins with."""
from typing import Any, NamedTuple

import cuda.bindings.driver as cuda
import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32

import tkq.tile as tk
from tkq.linear_attention.blocks.pairs import EDGE
from tkq.linear_attention.channels.bounded.blocks import OF_LANE, decay, z_factor
from tkq.linear_attention.channels.bounded.config import COLUMNS, MOST_REACHED
from tkq.linear_attention.channels.l2norm import EPS
from tkq.linear_attention.channels.spec import BoundedReachSpec
from tkq.linear_attention.config import ALL, CHUNK
from tkq.linear_attention.engine.packed import any_strides
from tkq.linear_attention.split.reach import NOTHING
from tkq.runtime.compile import fake
from tkq.tile import vectors

THREADS, WARP = 256, 32
WARPS, BLOCKS = THREADS // WARP, CHUNK // EDGE  # of a block: warps; of a chunk: blocks of tokens, of a warp each
AT_ONCE = WARPS // BLOCKS  # chunks
SLACK = 1.0 + 2.0**-6  # for what the rule's kernel rounds


class Operands(NamedTuple):
    """As `bounded.kernel.Operands` has them."""

    k: cute.Tensor
    x: cute.Tensor
    beta: cute.Tensor
    A_log: cute.Tensor
    bias: cute.Tensor


class BoundedReach:
    """reach[b, n - 1, h], of the n-th of N segments of a sequence, n from 1 on: how many chunks in front of it reach
    the state that it begins with; `ALL` where more than `MOST_REACHED`, or half a segment (in twos), do. Segments
    have a chunk or more.

    With keys of length 1 or less the rule makes of a state S

        S[t] = (I - beta k k') diag(exp(g)) S[t - 1] + ..

    Let P be the product of these matrices over some tokens, p[c] a bound of the length of its column c, and w one of
    its norm. With a token more in front of them P is P (I - beta k k') diag(exp(g)), so that

        m = min(sum of |k[c]| p[c], w)      bounds |P k|
        p[c] = (p[c] + |beta k[c]| m) exp(g[c])        w = w max(1, |1 - beta|)

    A column that decays gives some of what it has to all others before it is gone: no product of a column's own decays
    is a bound. A warp has 16 tokens, from P = I on; the norm of P is at most the root of the largest p times their sum,
    and norms are multiplied. Where their product is below 2^NOTHING, a state before these chunks, however it was made,
    leaves nothing behind them. That it is not finite is lost there, too. Where norms so far would not be below it in
    time, at their mean, no more chunks are looked at: all reach the segment.

    A block has one segment and head, two chunks at a time. The order of each sum is that of the tokens."""

    def __init__(self, spec: BoundedReachSpec):
        self.spec = spec

    def fake_arguments(self):
        """Compiled for any B, S, heads and segments."""
        B, S, H, HO, rows = (fake.sym() for _ in range(5))

        def operand(heads):
            return fake.tensor("bf16", (B, S, heads, COLUMNS), (*(fake.sym64(divisibility=8) for _ in range(3)), 1))

        operands = Operands(operand(H), operand(HO), any_strides(self.spec.beta, (B, S, HO)),
                            fake.tensor("fp32", (HO,), align=4),
                            fake.tensor("fp32", (fake.sym(divisibility=COLUMNS),)))
        return operands.k, tuple(operands[1:]), fake.tensor("int32", (B, rows, HO), align=4), Float32(0.0)

    @cute.jit
    def __call__(self, k: cute.Tensor, others: Any, reach: cute.Tensor, bound: Float32, stream: cuda.CUstream):
        """others: those of `Operands` behind k. reach: (B, N - 1, HO)."""
        self.kernel(Operands(k, *others), reach, bound).launch(
            grid=[reach.shape[2], reach.shape[1], reach.shape[0]], block=[THREADS, 1, 1], stream=stream)

    @cute.kernel
    def kernel(self, x: Operands, reach: cute.Tensor, bound: Float32):
        head, row, batch = cute.arch.block_idx()
        sums = tk.SharedAllocator().vector(WARPS)[None, 0]
        each = cute.ceil_div(cute.ceil_div(x.x.shape[1], CHUNK), reach.shape[1] + 1)
        found, total = cute.make_rmem_tensor((1,), Int32), cute.make_rmem_tensor((1,), Float32)
        found[0], total[0] = Int32(ALL), Float32(0.0)
        times = cutlass.min(each // 2, MOST_REACHED) // AT_ONCE
        for i in cutlass.range(times, unroll=1):
            # not where norms so far are too large to be below in time, at their mean
            if found[0] == ALL and total[0] * Float32(times) <= NOTHING * Float32(i):
                behind = ((row + 1) * each - i * AT_ONCE) * CHUNK - tk.warp_id() * EDGE
                log = self.norm(x, (batch, behind - EDGE, head), bound)
                tk.sync_block()
                if tk.lane_id() == 0:
                    sums[tk.warp_id()] = log
                tk.sync_block()
                self.add_up(sums, i * AT_ONCE, found, total)
        if tk.warp_id() == 0 and tk.lane_id() == 0:
            reach[batch, row, head] = found[0]

    def add_up(self, sums: cute.Tensor, before, found: cute.Tensor, total: cute.Tensor):
        """total of two chunks more, and found: with which of them it is below. before: chunks before them."""
        for c in range(AT_ONCE):
            for part in range(BLOCKS):
                total[0] = total[0] + sums[c * BLOCKS + part]
            below = (found[0] == ALL) & (total[0] < NOTHING)
            found[0] = cutlass.select_(below, before + c + 1, found[0])

    def norm(self, x: Operands, at, bound):
        """A bound of the norm of P, as a power of 2, of 16 tokens. at: (batch, the first of them, head)."""
        (batch, first, head), column = at, OF_LANE * tk.lane_id()
        factor = z_factor(x.A_log[head])
        bias = [x.bias[head * COLUMNS + column + e] * factor for e in range(OF_LANE)]
        head_k = head // (x.x.shape[2] // x.k.shape[2])
        keys, gates, betas = [], [], []
        for i in range(EDGE):
            keys.append(vectors.load(vectors.run_at(x.k, (batch, first + i, head_k, column), OF_LANE)))
            gates.append(vectors.load(vectors.run_at(x.x, (batch, first + i, head, column), OF_LANE)))
            betas.append(Float32(x.beta[batch, first + i, head]))
        over = [cute.math.rsqrt(self.sum([y * y for y in vectors.wide(one)]) + EPS, fastmath=True) for one in keys]
        p, w = [Float32(1.0) for _ in range(OF_LANE)], Float32(1.0)
        for i in range(EDGE - 1, -1, -1):
            of_key = [cute.math.absf(y) for y in vectors.wide(keys[i])]
            m = cute.arch.fmin(over[i] * self.sum([k * y for k, y in zip(of_key, p)]), w)
            m = cute.math.absf(betas[i]) * (over[i] * (SLACK * m))
            decays = [decay(y, factor, bias[e], bound * tk.LOG2E) for e, y in enumerate(vectors.wide(gates[i]))]
            p = [cute.math.fma(m, k, y) * a for k, y, a in zip(of_key, p, decays)]
            w = w * cute.arch.fmax(cute.math.absf(1.0 - betas[i]), Float32(1.0))
        top = cute.arch.fmax(cute.arch.fmax(p[0], p[1]), cute.arch.fmax(p[2], p[3]))
        for bit in range(WARP.bit_length() - 1):
            top = cute.arch.fmax(top, cute.arch.shuffle_sync_bfly(top, offset=1 << bit))
        log = 0.5 * (cute.math.log2(top) + cute.math.log2(self.sum(p)))
        most = cute.math.log2(w)
        return cutlass.select_(log > most, most, log)

    def sum(self, of_lane):
        """Over all columns, in all lanes."""
        total = (of_lane[0] + of_lane[1]) + (of_lane[2] + of_lane[3])
        for bit in range(WARP.bit_length() - 1):
            total = total + cute.arch.shuffle_sync_bfly(total, offset=1 << bit)
        return total
