"""The window's part of the gradients of Hedgehog's keys and values, chunk by chunk."""
from dataclasses import dataclass
from typing import Any, NamedTuple

import cuda.bindings.driver as cuda
import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32

import tkq.tile as tk
from tkq.linear_attention.config import CHUNK
from tkq.linear_attention.hedgehog.config import WARPS, KeyWindowConfig
from tkq.linear_attention.hedgehog.kernel import Task
from tkq.linear_attention.hedgehog.spec import WindowSpec
from tkq.linear_attention.hedgehog.weights import following
from tkq.linear_attention.hedgehog.window_rows import LN2
from tkq.runtime.compile import fake
from tkq.tile.dtypes import element_type

KEYS_BARRIER = 1  # the named barrier of the keys' warpgroup


class Operands(NamedTuple):
    """q, k, v, do, dk, dv: (B, S, H, D), the last two written. inverse, most, delta, share: (B, S, H) fp32. window:
    (H,) fp32."""

    q: cute.Tensor
    k: cute.Tensor
    v: cute.Tensor
    do: cute.Tensor
    dk: cute.Tensor
    dv: cute.Tensor
    inverse: cute.Tensor
    most: cute.Tensor
    delta: cute.Tensor
    share: cute.Tensor
    window: cute.Tensor


@dataclass(frozen=True)
class Globals:
    q: tk.gl
    k: tk.gl
    v: tk.gl
    do: tk.gl
    dk: tk.gl
    dv: tk.gl
    inverse: cute.Tensor
    most: cute.Tensor
    delta: cute.Tensor
    share: cute.Tensor
    window: cute.Tensor
    scale: Float32
    tokens: Int32


@dataclass(frozen=True)
class Shared:
    q: tk.SharedTile
    do: tk.SharedTile
    k: tk.SharedTile
    v: tk.SharedTile
    p: tk.SharedTile  # of each stage: weights of keys of the chunk, of the one before
    ds: tk.SharedTile  # gradients of scores likewise
    out: tk.SharedTile  # dk, dv
    tokens: tk.Pipe
    keys: tk.Pipe
    pairs: tk.Pipe


@dataclass(frozen=True)
class Rows:
    """Registers of the pairs' warpgroup, numbers of its tokens."""

    most: tk.RowVec  # of no token: such rows weigh nothing
    scaled: tk.RowVec  # the same, times the scale of exponents
    weight: tk.RowVec  # window * inverse
    delta: tk.RowVec
    share: tk.RowVec


class KeyWindowGradients:
    """With e[i, j] = exp(q[i] k[j] / sqrt(D) - most[i]) of keys in the window, dp[i, j] = do[i] v[j], and of each query
    what the forward and the launch for queries have left, 1 over its denominator, most, delta and share:

        p = window * inverse * e
        ds = (p (dp - delta) - [the score is most] * share) / sqrt(D)
        dk = ds' Q, dv = p' dO

    A block has one head of one sequence and walks along its chunks of 64 tokens, each with its own keys and those of
    the chunk before; gradients are in accumulators until the chunk behind has added its part. The launch for features
    adds its own to them.

      producer (a warp)      K V, Q dO of a chunk | of the next | ..
      pairs (a warpgroup)    Q K', dO V' of both chunks: p, ds | ..
      keys (1)               dK and dV of the chunk before: done; of this one: begun | ..

      pipe      stages   full (arrivals)            empty (arrivals)
      tokens    2        producer's bytes (1)       warps of pairs and keys (8): Q dO
      keys      2        producer's bytes (1)       warps of pairs (4), a chunk later: K V; first zeros, of no chunk
      pairs     2        warps of pairs (4)         warps of keys (4)
    """

    def __init__(self, spec: WindowSpec, config: KeyWindowConfig):
        self.spec, self.config, self.dtype = spec, config, element_type(spec.dtype)
        self.x_tile = tk.st(CHUNK, spec.head_dim, self.dtype)
        self.p_tile = tk.st(CHUNK, CHUNK, self.dtype)

    # ---- host ----------------------------------------------------------------------------------

    def fake_arguments(self):
        """Compiled for any B, S and H, and strides of rows that are multiples of 16 bytes."""
        B, S, H = (fake.sym() for _ in range(3))
        rows = [fake.tensor(self.spec.dtype, (B, S, H, self.spec.head_dim),
                            (*(fake.sym64(divisibility=8) for _ in range(3)), 1)) for _ in range(6)]
        numbers = [fake.tensor("fp32", (B, S, H), align=4) for _ in range(4)]
        return rows[0], (*rows[1:], *numbers, fake.tensor("fp32", (H,), align=4)), Float32(1.0)

    @cute.jit
    def __call__(self, q: cute.Tensor, others: Any, scale: Float32, stream: cuda.CUstream):
        """others: those of `Operands` behind q. scale: of exponents of 2, as the forward has it."""
        operands = Operands(q, *others)
        # (batch, token, head, col) to (token, col, head, batch)
        rows = [cute.make_tensor(x.iterator, cute.select(x.layout, [1, 3, 2, 0])) for x in operands[:6]]
        g = Globals(*[tk.gl.load(x, self.x_tile) for x in rows[:4]], *[tk.gl.store(x, self.x_tile) for x in rows[4:]],
                    *operands[6:], scale, Int32(rows[0].shape[0]))
        self.kernel(g).launch(grid=[rows[0].shape[2], rows[0].shape[3], 1], block=[3 * tk.WARPGROUP, 1, 1],
                              stream=stream, min_blocks_per_mp=1)

    # ---- device --------------------------------------------------------------------------------

    @cute.kernel
    def kernel(self, g: Globals):
        al, x, p = tk.SharedAllocator(), self.x_tile, self.p_tile
        s = Shared(al.tile(x, 2), al.tile(x, 2), al.tile(x, 2), al.tile(x, 2), al.tile(p, 4), al.tile(p, 4),
                   al.tile(x, 2), al.pipe(2, 2 * x.bytes, 2 * WARPS), al.pipe(2, 2 * x.bytes, WARPS),
                   al.pipe(2, 0, WARPS, producers=WARPS))
        tk.init_block(lambda: [z.init() for z in (s.tokens, s.keys, s.pairs)])
        head, batch, _ = cute.arch.block_idx()
        t = Task(batch, head, cute.ceil_div(g.tokens, CHUNK))
        few, some, many = self.config.registers
        tk.assign((tk.Role(lambda _: self.produce(g, s, t), few, warps=1),
                   tk.Role(lambda _: self.make_pairs(g, s, t), some),
                   tk.Role(lambda _: self.add_keys(g, s, t), many)))

    @cute.jit
    def produce(self, g, s, t):
        tk.prefetch(g.q, g.k, g.v, g.do, g.dk, g.dv)
        tokens, keys = s.tokens.ring(), s.keys.ring()
        self.load_keys(g, s, t, keys, t.chunks)
        for i in cutlass.range(t.chunks, unroll=1):
            self.load_keys(g, s, t, keys, i)
            sem = s.tokens.acquire(tokens)
            tk.load_async(s.q[tokens.stage], g.q, (t.batch, t.head, i, 0), sem)
            tk.load_async(s.do[tokens.stage], g.do, (t.batch, t.head, i, 0), sem)
            tokens.advance()

    def load_keys(self, g, s, t, keys, i):
        """Chunk i; behind the last one zeros."""
        sem = s.keys.acquire(keys)
        tk.load_async(s.k[keys.stage], g.k, (t.batch, t.head, i, 0), sem)
        tk.load_async(s.v[keys.stage], g.v, (t.batch, t.head, i, 0), sem)
        keys.advance()

    # ---- the pairs' warpgroup ------------------------------------------------------------------

    @cute.jit
    def make_pairs(self, g, s, t):
        now, past, dp_now, dp_past = (tk.rt_fl(CHUNK) for _ in range(4))
        rows, window = Rows(*[tk.rv() for _ in range(5)]), g.window[t.head]
        tokens = s.tokens.ring()  # one count for all pipes
        s.keys.wait(s.keys.ring())
        for i in cutlass.range(t.chunks, unroll=1):
            keys = following(tokens)
            self.ask(g, t, rows, window, i)
            s.tokens.wait(tokens)
            s.keys.wait(keys)
            tk.mm_ABt(now, s.q[tokens.stage], s.k[keys.stage])
            tk.mm_ABt(dp_now, s.do[tokens.stage], s.v[keys.stage])
            tk.mm_ABt(past, s.q[tokens.stage], s.k[tokens.stage])
            tk.mm_ABt(dp_past, s.do[tokens.stage], s.v[tokens.stage])
            s.pairs.acquire_empty(tokens)
            tk.mma_wait(2)
            tk.right_fill(now, 1, -Float32.inf, diagonal=True)
            self.put_pairs(g, s, 2 * tokens.stage, (now, dp_now), rows)
            tk.mma_wait(0)
            s.tokens.release(tokens)
            s.keys.release(tokens)
            self.put_pairs(g, s, 2 * tokens.stage + 1, (past, dp_past), rows)
            tk.publish()
            s.pairs.commit(tokens)
            tokens.advance()

    def ask(self, g, t, rows, window, i):
        """Numbers of a chunk's queries."""
        for to, x in ((rows.most, g.most), (rows.weight, g.inverse), (rows.delta, g.delta), (rows.share, g.share)):
            tk.load_rows(to, x[t.batch, None, t.head], i * CHUNK, g.tokens)
        for r in range(2):
            there = i * CHUNK + tk.first_row() + 8 * r < g.tokens
            rows.most.tensor[r] = cutlass.select_(there, rows.most.tensor[r], Float32.inf)
        tk.mul(rows.scaled, rows.most, g.scale)
        tk.mul(rows.weight, rows.weight, window)

    def put_pairs(self, g, s, n, pair, rows):
        """p and ds of a chunk's keys."""
        x, dp = pair
        p, ds, scale = tk.rt(CHUNK, self.dtype), tk.rt(CHUNK, self.dtype), g.scale * LN2

        def both(score, d, most, scaled, weight, delta, share):
            one = cute.math.exp2(score * g.scale - scaled, fastmath=True) * weight
            less = cutlass.select_(score == most, share, Float32(0.0))
            return one, scale * (one * (d - delta) - less)

        tk.apply_narrow((p, ds), both, x, dp, rows.most, rows.scaled, rows.weight, rows.delta, rows.share)
        tk.store(s.p[n], p)
        tk.store(s.ds[n], ds)

    # ---- gradients -----------------------------------------------------------------------------

    @cute.jit
    def add_keys(self, g, s, t):
        dk, dv = tk.rt_fl(self.spec.head_dim), tk.rt_fl(self.spec.head_dim)
        tk.zero(dk)
        tk.zero(dv)
        tokens = s.tokens.ring()  # of pairs, too
        for i in cutlass.range(t.chunks, unroll=1):
            n, stage = 2 * tokens.stage, tokens.stage
            s.tokens.wait(tokens)
            s.pairs.wait(tokens)
            tk.mma_AtB(dk, s.ds[n + 1], s.q[stage])
            tk.mma_AtB(dv, s.p[n + 1], s.do[stage])
            tk.mma_wait(0)
            if i > 0:
                self.put_keys(g, s, t, (dk, dv), i - 1)
            tk.mm_AtB(dk, s.ds[n], s.q[stage])
            tk.mm_AtB(dv, s.p[n], s.do[stage])
            tk.mma_wait(0)
            s.pairs.release(tokens)
            s.tokens.release(tokens)
            tokens.advance()
        self.put_keys(g, s, t, (dk, dv), t.chunks - 1)
        tk.store_wait(read=False)

    @cute.jit
    def put_keys(self, g, s, t, pair, chunk):
        """dk and dv of a chunk, once those of the chunk before have left their rooms."""
        leader, at = tk.warp_id() % 4 == 0, (t.batch, t.head, chunk, 0)
        if leader:
            tk.store_wait()
        tk.sync(KEYS_BARRIER, tk.WARPGROUP)
        for n in cutlass.range_constexpr(2):
            tk.store(s.out[n], pair[n])
        tk.publish()
        tk.sync(KEYS_BARRIER, tk.WARPGROUP)
        if leader:
            tk.store_async(g.dk, s.out[0], at)
            tk.store_async(g.dv, s.out[1], at)
