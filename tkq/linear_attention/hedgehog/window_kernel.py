"""The window's part of the gradients of Hedgehog's attention, chunk by chunk."""
from dataclasses import dataclass
from typing import Any, NamedTuple

import cuda.bindings.driver as cuda
import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32

import tkq.tile as tk
from tkq.linear_attention.config import CHUNK
from tkq.linear_attention.hedgehog.config import WindowConfig
from tkq.linear_attention.hedgehog.kernel import Task
from tkq.linear_attention.hedgehog.spec import WindowSpec
from tkq.linear_attention.hedgehog.weights import EPS
from tkq.runtime.compile import fake
from tkq.tile.dtypes import element_type

BELOW_ONE = 1 - 2.0**-24
LEAST_SHARE = 2.0**-16  # of the denominator: as `tkq.reference.hedgehog` has it
QUERIES_BARRIER, KEYS_BARRIER = 1, 2  # named barriers: of the warpgroups that have gradients of queries, of keys


class Operands(NamedTuple):
    """q, k, v, do, dq, dk, dv: (B, S, H, D), the last three to be added to. inverse, delta, less: (B, S, H) fp32.
    linear, window: factors, (H,) fp32. of_factors: (2, B, H, S) fp32, gradients of linear and of window."""

    q: cute.Tensor
    k: cute.Tensor
    v: cute.Tensor
    do: cute.Tensor
    dq: cute.Tensor
    dk: cute.Tensor
    dv: cute.Tensor
    inverse: cute.Tensor
    delta: cute.Tensor
    less: cute.Tensor
    linear: cute.Tensor
    window: cute.Tensor
    of_factors: cute.Tensor


@dataclass(frozen=True)
class Globals:
    q: tk.gl
    k: tk.gl
    v: tk.gl
    do: tk.gl
    dq: tk.gl
    dk: tk.gl
    dv: tk.gl
    inverse: cute.Tensor
    delta: cute.Tensor
    less: cute.Tensor
    linear: cute.Tensor
    window: cute.Tensor
    of_factors: cute.Tensor
    scale: Float32
    tokens: Int32


@dataclass(frozen=True)
class Shared:
    q: tk.SharedTile
    do: tk.SharedTile
    k: tk.SharedTile
    v: tk.SharedTile
    p: tk.SharedTile  # weights of keys of the chunk, of the one before
    ds: tk.SharedTile  # gradients of scores likewise
    dq: tk.SharedTile
    dk: tk.SharedTile
    tokens: tk.Pipe
    keys: tk.Pipe
    pairs: tk.Pipe


@dataclass(frozen=True)
class Rows:
    """Registers of the pairs' warpgroup, numbers of its tokens."""

    most: tk.RowVec
    total: tk.RowVec
    of_do: tk.RowVec
    count: tk.RowVec
    inverse: tk.RowVec
    delta: tk.RowVec
    far_do: tk.RowVec
    far: tk.RowVec
    exact: tk.RowVec
    found: tk.RowVec


class WindowGradients:
    """With e[i, j] = exp(q[i] k[j] / sqrt(D) - most[i]) of keys in the window, dp[i, j] = do[i] v[j], inverse what
    outputs were multiplied by, and delta = o do,

        of_window = inverse * (sum (e dp) - exact * sum e)
        of_linear = inverse * (far_do - exact * far)
        p = window * inverse * e
        ds = (p (dp - delta) - [e is 1] * window * of_window / the number of such) / sqrt(D)
        dq += ds K, dk += ds' Q, dv += p' dO

    far and far_do are what linear is multiplied by, in the denominator and, of do, in what is divided by it: less is
    far_do - delta * far, and linear * far what window * sum e leaves of the denominator. exact is delta once more, of
    these numbers, which are not rounded to 16 bits as o is: the factors' gradients are small differences of large sums.
    Where e is 1 a score is the largest, most, which all others are relative to. A block has one head of one sequence
    and walks along its chunks of 64 tokens, each with its own keys and those of the chunk before; gradients of keys and
    values are in accumulators until the chunk behind has added its part.

      producer (a warp)      K V, Q dO of a chunk | of the next | ..
      pairs (a warpgroup)    Q K', dO V' of both chunks: p, ds | ..
      queries (1)            dQ | ..
      keys (1)               dK and dV of the chunk before: done; of this one: begun | ..

      pipe      stages   full (arrivals)            empty (arrivals)
      tokens    2        producer's bytes (1)       warps of pairs and keys (8): Q dO
      keys      3        producer's bytes (1)       warps of pairs and queries (8), a chunk later: K V; the first stage
                                                    is of a chunk before the first, whose p and ds are 0: chunk 0 again
      pairs     1        warps of pairs (4)         warps of queries and keys (8)
    """

    def __init__(self, spec: WindowSpec, config: WindowConfig):
        self.spec, self.config = spec, config
        self.dtype = element_type(spec.dtype)
        self.x_tile = tk.st(CHUNK, spec.head_dim, self.dtype)
        self.p_tile = tk.st(CHUNK, CHUNK, self.dtype)

    # ---- host ----------------------------------------------------------------------------------

    def fake_arguments(self):
        """Compiled for any B, S and H, and strides of rows that are multiples of 16 bytes."""
        B, S, H = (fake.sym() for _ in range(3))
        rows = [fake.tensor(self.spec.dtype, (B, S, H, self.spec.head_dim),
                            (*(fake.sym64(divisibility=8) for _ in range(3)), 1)) for _ in range(7)]
        numbers = [fake.tensor("fp32", (B, S, H), align=4) for _ in range(3)]
        linear, window = [fake.tensor("fp32", (H,), align=4) for _ in range(2)]
        of_factors = fake.tensor("fp32", (2, B, H, S), align=4)
        return rows[0], (*rows[1:], *numbers, linear, window, of_factors), Float32(1.0)

    @cute.jit
    def __call__(self, q: cute.Tensor, others: Any, scale: Float32, stream: cuda.CUstream):
        """others: those of `Operands` behind q."""
        operands = Operands(q, *others)
        # (batch, token, head, col) to (token, col, head, batch)
        rows = [cute.make_tensor(x.iterator, cute.select(x.layout, [1, 3, 2, 0])) for x in operands[:7]]
        g = Globals(*[tk.gl.load(x, self.x_tile) for x in rows[:4]], tk.gl.add(rows[4], self.p_tile),
                    *[tk.gl.add(x, self.x_tile) for x in rows[5:]], *operands[7:], scale, Int32(rows[0].shape[0]))
        self.kernel(g).launch(grid=[rows[0].shape[2], rows[0].shape[3], 1], block=[4 * tk.WARPGROUP, 1, 1],
                              stream=stream, min_blocks_per_mp=1)

    # ---- device --------------------------------------------------------------------------------

    @cute.kernel
    def kernel(self, g: Globals):
        al, x = tk.SharedAllocator(), self.x_tile
        s = Shared(al.tile(x, 2), al.tile(x, 2), al.tile(x, 3), al.tile(x, 3), al.tile(self.p_tile, 2),
                   al.tile(self.p_tile, 2), al.tile(self.p_tile, self.spec.head_dim // CHUNK), al.tile(x),
                   al.pipe(2, 2 * x.bytes, 8), al.pipe(3, 2 * x.bytes, 8), al.pipe(1, 0, 8, producers=4))
        tk.init_block(lambda: [x.init() for x in (s.tokens, s.keys, s.pairs)])
        head, batch, _ = cute.arch.block_idx()
        t = Task(batch, head, cute.ceil_div(g.tokens, CHUNK))
        few, pairs, queries, keys = self.config.registers
        tk.assign((tk.Role(lambda _: self.produce(g, s, t), few, warps=1),
                   tk.Role(lambda _: self.make_pairs(g, s, t), pairs),
                   tk.Role(lambda _: self.add_queries(g, s, t), queries),
                   tk.Role(lambda _: self.add_keys(g, s, t), keys)))

    @cute.jit
    def produce(self, g, s, t):
        tk.prefetch(g.q, g.k, g.v, g.do, g.dq, g.dk, g.dv)
        tokens, keys = s.tokens.ring(), s.keys.ring()
        first = s.keys.acquire(keys)
        tk.load_async(s.k[keys.stage], g.k, (t.batch, t.head, 0, 0), first)
        tk.load_async(s.v[keys.stage], g.v, (t.batch, t.head, 0, 0), first)
        keys.advance()
        for i in cutlass.range(t.chunks, unroll=1):
            of_keys = s.keys.acquire(keys)
            tk.load_async(s.k[keys.stage], g.k, (t.batch, t.head, i, 0), of_keys)
            tk.load_async(s.v[keys.stage], g.v, (t.batch, t.head, i, 0), of_keys)
            of_tokens = s.tokens.acquire(tokens)
            tk.load_async(s.q[tokens.stage], g.q, (t.batch, t.head, i, 0), of_tokens)
            tk.load_async(s.do[tokens.stage], g.do, (t.batch, t.head, i, 0), of_tokens)
            tokens.advance()
            keys.advance()

    # ---- the pairs' warpgroup ------------------------------------------------------------------

    @cute.jit
    def make_pairs(self, g, s, t):
        now, past, dp_now, dp_past = (tk.rt_fl(CHUNK) for _ in range(4))
        rows = Rows(*[tk.rv() for _ in range(10)])
        linear, window = g.linear[t.head], g.window[t.head]
        tokens, keys, before, out = s.tokens.ring(), s.keys.ring(), s.keys.ring(), s.pairs.ring()
        s.keys.wait(keys)
        keys.advance()
        for i in cutlass.range(t.chunks, unroll=1):
            tk.load_rows(rows.inverse, g.inverse[t.batch, None, t.head], i * CHUNK, g.tokens)
            tk.load_rows(rows.delta, g.delta[t.batch, None, t.head], i * CHUNK, g.tokens)
            tk.load_rows(rows.far_do, g.less[t.batch, None, t.head], i * CHUNK, g.tokens)
            s.tokens.wait(tokens)
            s.keys.wait(keys)
            tk.mm_ABt(now, s.q[tokens.stage], s.k[keys.stage])
            tk.mm_ABt(past, s.q[tokens.stage], s.k[before.stage])
            tk.mm_ABt(dp_now, s.do[tokens.stage], s.v[keys.stage])
            tk.mm_ABt(dp_past, s.do[tokens.stage], s.v[before.stage])
            tk.mma_wait(2)
            tk.right_fill(now, 1, -Float32.inf, diagonal=True)
            tk.row_max(rows.most, now)
            if i == 0:
                tk.neg_infty(past)
            tk.row_max(rows.most, past, rows.most)
            tk.mma_wait(0)
            s.tokens.release(tokens)
            s.keys.release(before)
            self.sums(rows, ((now, dp_now), (past, dp_past)), g.scale * tk.LOG2E)
            self.numbers(g, t, rows, (linear, window), i)
            s.pairs.acquire_empty(out)
            for n, x, dp in ((0, now, dp_now), (1, past, dp_past)):
                self.put_pairs(s, n, (x, dp), rows, (window, g.scale))
            tk.publish()
            s.pairs.commit(out)
            for ring in (tokens, keys, before, out):
                ring.advance()

    def sums(self, rows, parts, scale):
        """Scores become exponentials, 1 where they are the largest and below 1 elsewhere; sums of these, of their
        products with dp, and how many are 1."""
        for vector in (rows.total, rows.of_do, rows.count):
            tk.zero(vector)
        for x, dp in parts:
            e, d = x.rows_view, dp.rows_view
            for r in range(2):
                for j in range(CHUNK // 4):
                    less = e[r, j] - rows.most.tensor[r]
                    one = cute.math.exp2(less * scale, fastmath=True)
                    one = cutlass.select_(one >= 1.0, Float32(BELOW_ONE), one)  # NaN stays
                    one = cutlass.select_(less == 0.0, Float32(1.0), one)
                    e[r, j] = one
                    rows.total.tensor[r] = rows.total.tensor[r] + one
                    rows.of_do.tensor[r] = cute.math.fma(one, d[r, j], rows.of_do.tensor[r])
                    largest = cutlass.select_(less == 0.0, Float32(1.0), Float32(0.0))
                    rows.count.tensor[r] = rows.count.tensor[r] + largest
        for vector in (rows.total, rows.of_do, rows.count):
            tk.quad_sum(vector)

    def numbers(self, g, t, rows, factors, i):
        """The factors' gradients of each token, to global memory."""
        linear, window = factors
        one_over = cute.arch.rcp_approx(linear)
        tk.apply(rows.far, lambda inverse, near: cute.arch.rcp_approx(inverse) - EPS - window * near, rows.inverse,
                 rows.total)
        tk.apply(rows.exact, lambda inverse, near, less, delta, far: inverse * (
            window * near + linear * less + delta * far), rows.inverse, rows.of_do, rows.far_do, rows.delta, rows.far)
        # what is before the window is known from the denominator where it has a part in it: not where linear is near 0
        known = lambda inverse, far: cutlass.select_(
            cute.math.absf(far * inverse) > LEAST_SHARE, far * one_over, Float32(0.0))
        tk.apply(rows.found, lambda inverse, less, delta, exact, far: inverse * (
            less + (delta - exact) * known(inverse, far)), rows.inverse, rows.far_do, rows.delta, rows.exact, rows.far)
        tk.store_rows(g.of_factors[0, t.batch, t.head, None], rows.found, i * CHUNK, g.tokens)
        tk.apply(rows.found, lambda inverse, near, exact, total: inverse * (near - exact * total), rows.inverse,
                 rows.of_do, rows.exact, rows.total)
        tk.store_rows(g.of_factors[1, t.batch, t.head, None], rows.found, i * CHUNK, g.tokens)
        # what the largest score gets less, and from here on the factor of exponentials
        tk.apply(rows.found, lambda x, count: window * x * cute.arch.rcp_approx(count), rows.found, rows.count)
        tk.mul(rows.inverse, rows.inverse, window)

    def put_pairs(self, s, n, pair, rows, factors):
        """p and ds of a chunk's keys."""
        (x, dp), (_, scale) = pair, factors
        narrow = tk.rt(CHUNK, self.dtype)
        tk.apply_narrow(narrow, lambda e, inverse: e * inverse, x, rows.inverse)
        tk.store(s.p[n], narrow)
        tk.apply_narrow(narrow, lambda e, d, inverse, delta, less: scale * (
            e * inverse * (d - delta) - cutlass.select_(e == 1.0, less, Float32(0.0))), x, dp, rows.inverse, rows.delta,
            rows.found)
        tk.store(s.ds[n], narrow)

    # ---- gradients -----------------------------------------------------------------------------

    @cute.jit
    def add_queries(self, g, s, t):
        dq = tk.rt_fl(CHUNK)
        keys, before, pairs = s.keys.ring(), s.keys.ring(), s.pairs.ring()
        s.keys.wait(keys)
        keys.advance()
        for i in cutlass.range(t.chunks, unroll=1):
            s.keys.wait(keys)
            s.pairs.wait(pairs)
            for part in cutlass.range_constexpr(self.spec.head_dim // CHUNK):
                tk.mm_AB(dq, s.ds[0], s.k[keys.stage], b_part=part)
                tk.mma_AB(dq, s.ds[1], s.k[before.stage], b_part=part)
                tk.mma_wait(0)
                put(g.dq, s.dq[part], dq, (t.batch, t.head, i, part), QUERIES_BARRIER)
            s.pairs.release(pairs)
            s.keys.release(before)
            for ring in (keys, before, pairs):
                ring.advance()
        tk.store_wait(read=False)

    @cute.jit
    def add_keys(self, g, s, t):
        dk, dv = tk.rt_fl(self.spec.head_dim), tk.rt_fl(self.spec.head_dim)
        tk.zero(dk)
        tk.zero(dv)
        tokens, pairs = s.tokens.ring(), s.pairs.ring()
        for i in cutlass.range(t.chunks, unroll=1):
            s.tokens.wait(tokens)
            s.pairs.wait(pairs)
            tk.mma_AtB(dk, s.ds[1], s.q[tokens.stage])
            tk.mma_AtB(dv, s.p[1], s.do[tokens.stage])
            tk.mma_wait(0)
            if i > 0:
                self.put_keys(g, s, t, (dk, dv), i - 1)
            tk.mm_AtB(dk, s.ds[0], s.q[tokens.stage])
            tk.mm_AtB(dv, s.p[0], s.do[tokens.stage])
            tk.mma_wait(0)
            s.pairs.release(pairs)
            s.tokens.release(tokens)
            tokens.advance()
            pairs.advance()
        self.put_keys(g, s, t, (dk, dv), t.chunks - 1)
        tk.store_wait(read=False)

    @cute.jit
    def put_keys(self, g, s, t, pair, chunk):
        for to, x in ((g.dk, pair[0]), (g.dv, pair[1])):
            put(to, s.dk[0], x, (t.batch, t.head, chunk, 0), KEYS_BARRIER)


@cute.jit
def put(to, tile, x, at, barrier):
    """Rows through shared memory: those before have left it."""
    leader = tk.warp_id() % 4 == 0
    if leader:
        tk.store_wait()
    tk.sync(barrier, tk.WARPGROUP)
    tk.store(tile, x)
    tk.publish()
    tk.sync(barrier, tk.WARPGROUP)
    if leader:
        tk.store_async(to, tile, at)
