"""Based, linear attention with the Taylor series of exp, forward, on tkq.tile: under 150 lines, without comments.
Run it: with a Hopper GPU it is checked against float64 and timed with tkq.based; without one it is only compiled.
"""
from dataclasses import dataclass

import cuda.bindings.driver as cuda
import cutlass
import cutlass.cute as cute
import torch
from cutlass import BFloat16, Float32, Int32

import tkq
import tkq.tile as tk
from tkq import runtime
from tkq.runtime import fake
from tkq.testing import sass, timing

CHUNK, D, V, FEATURES = 64, 16, 64, 160  # of which 153 are of use: 1, 16 columns, 136 products of two
SCORES, OUT = 1, 2  # named barriers
PAIR, SQUARE, LINEAR, ONE = range(4)
KINDS = (LINEAR, LINEAR, ONE, PAIR, SQUARE, SQUARE, *[PAIR] * 14)  # of 8 columns each


@dataclass(frozen=True)
class Globals:
    q: tk.gl
    k: tk.gl
    v: tk.gl
    o: tk.gl
    scale: Float32
    chunks: Int32


@dataclass(frozen=True)
class Shared:
    q: tk.SharedTile
    k: tk.SharedTile
    v: tk.SharedTile
    of_q: tk.SharedTile  # features
    of_k: tk.SharedTile
    p: tk.SharedTile
    o: tk.SharedTile
    one_over: cute.Tensor  # the sums of weights
    tokens: tk.Pipe
    ready: tk.Pipe


def weights(scale):
    """What a product of two features is multiplied by, by its column: 1 + s + s^2 / 2 with s = scale * q k."""
    of_kind = {PAIR: scale * scale, SQUARE: scale * scale * 0.5, LINEAR: scale, ONE: Float32(1.0)}
    return lambda column: of_kind[KINDS[column // 8]]


def features(f: tk.RegTile, x: tk.SharedTile):
    """f = the features of x's rows. A thread has columns 2 l and 2 l + 1 of each 8, l its lane of four: it makes them
    of y[m] = x[(4 l + m) % 16], so that the four lanes, which do the same, make all products, and each of them once."""
    lane, row = tk.lane_id() % 4, tk.first_row()
    for r in range(2):
        y = [Float32(x.tensor[row + 8 * r, (4 * lane + m) % D]) for m in range(12)]
        for e in range(2):
            one = cutlass.select_(lane == 0, Float32(1.0 - e), Float32(0.0))
            opposite = cutlass.select_(lane < 2, y[e] * y[8 + e], y[2 + e] * y[10 + e])
            columns = [y[e], y[2 + e], one, opposite]
            for apart in range(8):
                columns += [y[e] * y[e + apart], y[2 + e] * y[2 + e + apart]]
            for block, value in enumerate(columns):
                f.rows_view[r, 2 * block + e] = BFloat16(value)


def dot(sums: tk.RowVec, f: tk.RegTile, total: tk.RegTile, weight):
    """This thread's part of each row's sum of f times total times weight."""
    for r in range(2):
        parts = [Float32(f.rows_view[r, j]) * total.rows_view[r, j] * weight(4 * j) for j in range(FEATURES // 4)]
        sums.tensor[r] = sum(parts[1:], parts[0])


class Based:
    """A block has one head of one sequence. Its state S, the sum of v[j] f(k[j])' over the chunks before, V by
    features, stays in the accumulators of a warpgroup; within a chunk of 64 tokens all weights are made:

        O = (f(Q) S' + P V) / sums,   P[t, j] = 1 + s + s^2 / 2 for j <= t

      producer (a warp)         Q K V of a chunk | of the next | ..
      features (a warpgroup)    f(Q), f(K), P and sums of a chunk | of the next | ..
      state (a warpgroup)       O' = S f(Q)' + V' P', S += V' f(K), O to global memory | ..

    tokens: full[stage] 1 arrival, the producer's, with the bytes; empty[stage] 8, one of each warp of the others.
    ready: full[stage] 4, empty[stage] 4."""

    x_tile, v_tile, f_tile = tk.st(CHUNK, D), tk.st(CHUNK, V), tk.st(CHUNK, FEATURES)

    @cute.jit
    def __call__(self, q: cute.Tensor, k: cute.Tensor, v: cute.Tensor, o: cute.Tensor, scale: Float32,
                 stream: cuda.CUstream):
        # (batch, token, head, col) to (token, col, head, batch)
        q, k, v, o = [cute.make_tensor(x.iterator, cute.select(x.layout, [1, 3, 2, 0])) for x in (q, k, v, o)]
        g = Globals(tk.gl.load(q, self.x_tile), tk.gl.load(k, self.x_tile), tk.gl.load(v, self.v_tile),
                    tk.gl.store(o, self.v_tile), scale, cute.ceil_div(q.shape[0], CHUNK))
        self.kernel(g).launch(grid=[q.shape[2], q.shape[3], 1], block=[384, 1, 1], stream=stream, min_blocks_per_mp=1)

    @cute.kernel
    def kernel(self, g: Globals):
        al = tk.SharedAllocator()
        s = Shared(al.tile(self.x_tile, 4), al.tile(self.x_tile, 4), al.tile(self.v_tile, 4), al.tile(self.f_tile, 3),
                   al.tile(self.f_tile, 3), al.tile(tk.st(CHUNK, CHUNK), 3), al.tile(self.v_tile), al.vector(CHUNK, 3),
                   al.pipe(4, 2 * self.x_tile.bytes + self.v_tile.bytes, 8), al.pipe(3, 0, 4, producers=4))
        tk.init_block(lambda: [pipe.init() for pipe in (s.tokens, s.ready)])
        tk.assign((tk.Role(lambda _: self.produce(g, s), 24, warps=1), tk.Role(lambda _: self.make_features(g, s), 240),
                   tk.Role(lambda _: self.keep_state(g, s), 232)))

    @cute.jit
    def produce(self, g, s):
        ring, (head, batch, _) = s.tokens.ring(), cute.arch.block_idx()
        for i in cutlass.range(g.chunks, unroll=1):
            sem = s.tokens.acquire(ring)
            tk.load_async(s.q[ring.stage], g.q, (batch, head, i, 0), sem)
            tk.load_async(s.k[ring.stage], g.k, (batch, head, i, 0), sem)
            tk.load_async(s.v[ring.stage], g.v, (batch, head, i, 0), sem)
            ring.advance()

    @cute.jit
    def make_features(self, g, s):
        ring, out = s.tokens.ring(), s.ready.ring()
        f, x, sums = tk.rt_bf(FEATURES), tk.rt_fl(CHUNK), tk.rv()
        total, ones = tk.rt_fl(FEATURES), tk.rt_bf(CHUNK)  # in each row of total the sum of f(k)
        tk.zero(total)
        tk.fill(ones, 1.0)
        for _ in cutlass.range(g.chunks, unroll=1):
            s.tokens.wait(ring)
            s.ready.acquire_empty(out)
            features(f, s.q[ring.stage])
            tk.store(s.of_q[out.stage], f)
            dot(sums, f, total, weights(g.scale))
            features(f, s.k[ring.stage])
            tk.store(s.of_k[out.stage], f)
            tk.publish()
            tk.sync(SCORES, tk.WARPGROUP)
            tk.mm_ABt(x, s.q[ring.stage], s.k[ring.stage])
            tk.mma_AB(total, ones, s.of_k[out.stage])
            tk.mma_wait(0)
            s.tokens.release(ring)
            tk.apply(x, lambda y: 1.0 + y * g.scale * (1.0 + y * g.scale * 0.5), x)
            tk.right_fill(x, 1, 0.0, diagonal=True)
            tk.store(s.p[out.stage], x)
            tk.row_sum_partial(sums, x, sums)
            tk.quad_sum(sums)
            tk.apply(sums, cute.arch.rcp_approx, sums)
            tk.store_rows(s.one_over[None, out.stage], sums, 0, CHUNK)
            tk.publish()
            s.ready.commit(out)
            ring.advance()
            out.advance()

    @cute.jit
    def keep_state(self, g, s):
        ring, ready, weight = s.tokens.ring(), s.ready.ring(), weights(g.scale)
        state, narrow = tk.rt_fl(FEATURES), tk.rt_bf(FEATURES)
        v, o, one_over = tk.rt_bf(CHUNK), tk.rt_fl(CHUNK), tk.cv(CHUNK)  # transposed, as the state is
        tk.zero(state)
        for i in cutlass.range(g.chunks, unroll=1):
            tk.apply_narrow(narrow, lambda y, column: y * weight(column), state, tk.COLUMN)
            s.tokens.wait(ring)
            tk.load_T(v, s.v[ring.stage])
            s.ready.wait(ready)
            tk.mm_ABt(o, narrow, s.of_q[ready.stage])
            tk.mma_ABt(o, v, s.p[ready.stage])
            tk.mma_AB(state, v, s.of_k[ready.stage])
            tk.load_shared_cols(one_over, s.one_over[None, ready.stage])
            tk.mma_wait(1)  # for O; the state's product goes on
            tk.mul_col(o, o, one_over)
            self.put(g, s, o, i)
            tk.mma_wait(0)
            s.tokens.release(ring)
            s.ready.release(ready)
            ring.advance()
            ready.advance()
        tk.store_wait(read=False)

    @cute.jit
    def put(self, g, s, o, chunk):
        """Transposed, through shared memory: what was there before has left it."""
        head, batch, _ = cute.arch.block_idx()
        leader = tk.first_warp_of_group()
        if leader:
            tk.store_wait()
        tk.sync(OUT, tk.WARPGROUP)
        tk.store_T(s.o[0], o)
        tk.publish()
        tk.sync(OUT, tk.WARPGROUP)
        if leader:
            tk.store_async(g.o, s.o[0], (batch, head, chunk, 0))


def build():
    B, S, H = (fake.sym() for _ in range(3))
    return Based(), (*[fake.tensor("bf16", (B, S, H, cols)) for cols in (D, D, V, V)], Float32(1.0))


RECIPE = runtime.Recipe("write_a_based:build")


def based(q, k, v):
    """o[t] = the mean of v[j] over j <= t with weights 1 + s + s^2 / 2, s = q[t] k[j] / 4. q, k: (B, S, H, 16) bf16, v:
    (B, S, H, 64)."""
    o = torch.empty_like(v)
    runtime.function(RECIPE)(q, k, v, o, D**-0.5)
    return o


def inputs(B, S, H):
    return [torch.randn(B, S, H, cols, device="cuda").bfloat16() for cols in (D, D, V)]


def exactly(q, k, v, dtype=torch.float64):
    """The sum over tokens, in dtype."""
    q, k, v = [x.transpose(1, 2).to(dtype) for x in (q, k, v)]
    s = q @ k.mT * D**-0.5
    w = (1 + s + s * s / 2).tril()
    return (w @ v / w.sum(-1, keepdim=True)).transpose(1, 2)


def check(S):
    """Against float64: at most twice PyTorch's own error in bf16, and 2^-8."""
    q, k, v = inputs(2, S, 4)
    want = exactly(q, k, v)
    error, peer = [(o.double() - want).abs().max().item() for o in (based(q, k, v), exactly(q, k, v, torch.bfloat16))]
    assert error <= 2 * peer + 2**-8, f"S {S}: error {error}, PyTorch's is {peer}"
    return error


def main():
    if not torch.cuda.is_available():
        print(sass.shown("Based", RECIPE))
        print("No GPU: compiled for sm_90a, nothing run or timed.")
        return
    error = max(check(S) for S in (1, 64, 65, 200, 1024))
    calls = {"this": based, "tkq.based": lambda q, k, v: tkq.based(q, k, v)}
    both = timing.compare(calls, lambda i: inputs(16, 4096, 16))
    print(f"error {error:.1e},", *[f"{t.name} {t.median_ms:.3f} ms," for t in both.timings],
          f"{timing.ratio(both['this'], both['tkq.based']):.2f} of its speed")


if __name__ == "__main__":
    main()
