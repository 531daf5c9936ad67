"""Linear attention whose gates are of the columns of v: the passes of the gradients of gates for each column."""
from dataclasses import dataclass
from typing import Any, Optional

import cuda.bindings.driver as cuda
import cutlass
import cutlass.cute as cute
from cutlass import Constexpr, Float32, Int32, const_expr

import tkq.tile as tk
from tkq.linear_attention.channels.columns import HALVES, Columns, pick_scores, scaled, unpacked, words
from tkq.linear_attention.channels.parts import (
    SCORES_BARRIER,
    Operands,
    Task,
    chunks,
    order,
)
from tkq.linear_attention.channels.plan import PAD
from tkq.linear_attention.channels.spec import ChannelSpec
from tkq.linear_attention.config import CHUNK, LinearConfig
from tkq.linear_attention.engine.packed import Sequences, any_strides, numbers
from tkq.runtime.compile import fake
from tkq.tile.dtypes import element_type


@dataclass(frozen=True)
class Globals:
    q: tk.gl
    k: tk.gl
    v: tk.gl
    x: Optional[tk.gl]
    o: cute.Tensor
    of_x: Optional[cute.Tensor]
    g: cute.Tensor
    initial: Optional[cute.Tensor]
    final: Optional[cute.Tensor]
    scale: Float32
    tokens: Int32
    heads_per_k: Int32
    heads_per_v: Int32
    heads_per_x: Int32
    cu: Optional[cute.Tensor]


@dataclass(frozen=True)
class Shared:
    q: tk.SharedTile
    k: tk.SharedTile
    v: tk.SharedTile
    x: Any
    carried: tk.SharedTile  # rows of v, with their factors
    factors: cute.Tensor  # (2, tokens, columns): of the rows that take them
    p: tk.SharedTile  # the pairs of one level
    products: cute.Tensor
    total: cute.Tensor
    tokens: tk.Pipe
    steps: tk.Pipe


@dataclass(frozen=True)
class State:
    """Registers of 64 columns of v."""

    s: tk.RegTile  # the state, transposed: columns of v by those of q and k
    s16: tk.RegTile
    v: tk.RegTile  # values, transposed
    o: tk.RegTile  # outputs, transposed: columns by tokens
    given: tk.RegTile  # those of a level, of 32 tokens, without the tokens' own factors
    x: Any  # with dot, of which it is that with the outputs: x, transposed, and the products
    dots: Any
    total: tk.RowVec


class ChannelValues:
    """o[t] = scale * S[t]' q[t], S[t] = S[t-1] diag(exp(g[t])) + k[t] v[t]', for chunks of 64 tokens: with D the
    products of decays, for each column c of v,

        O[i, c] = scale * (D[0..i] (Q S)[i, c] + sum over j <= i of (q[i] k[j]) D[j+1..i] v[j, c])
        S[:, c] = D[0..63] S[:, c] + K' (D[i+1..63] v[:, c])

    Reversed, a token sees those from itself to the last, and D[0..i] and D[i+1..63] change places. A sum's decays do
    not go into Q K', for they differ from column to column: for each level of `Columns` the part of Q K' that is of it
    is multiplied by rows of v with their factors, and the result has the factors of its own rows.

      producer (a warp)    Q K V of a chunk | of the next | ..
      scores (1)           Q K'; of each step its part, rows of v, factors | ..
      state (1)            O' = S' Q', S' += V' K; of each level O' += V' P' | O to global memory | ..

    A chunk's steps are the one that meets the state, six levels, and the diagonal but for `strict`.

      pipe      stages           full (arrivals)            empty (arrivals)
      tokens    config.stages    producer's bytes (1)       warps of the state (4), behind the scores
      steps     2                warps of the scores (4)    warps of the state (4)
    """

    def __init__(self, spec: ChannelSpec, config: LinearConfig):
        self.spec, self.config, self.sequences = spec, config, Sequences(spec)
        self.dtype = element_type(spec.dtype)
        self.qk_tile = tk.st(CHUNK, spec.head_dim, self.dtype)
        self.v_tile = self.p_tile = tk.st(CHUNK, CHUNK, self.dtype)
        self.columns = Columns(self.v_tile)

    # ---- host ----------------------------------------------------------------------------------

    def fake_arguments(self):
        """Compiled for any B, S and heads, and strides of q, k, v, g and o that are multiples of 16 bytes."""
        spec, (B, S, H, HV, HO) = self.spec, (fake.sym() for _ in range(5))
        K, V = spec.head_dim, spec.value_dim
        states = fake.sym() if spec.packed else B, HO, K, V

        def operand(heads, cols, dtype=spec.dtype, unit=8):
            return fake.tensor(dtype, (B, S, heads, cols), (*(fake.sym64(divisibility=unit) for _ in range(3)), 1))

        operands = Operands(operand(H, K), operand(H, K), operand(HV, V), operand(HO, V, "fp32", 4),
                            operand(HO, V, "fp32", 4), None, any_strides(spec.initial, states),
                            any_strides(spec.final, states), operand(fake.sym(), V) if spec.dot else None,
                            operand(HO, V, "fp32", 4) if spec.dot else None, None, numbers(spec.packed), None)
        return operands.q, tuple(operands[1:]), Float32(1.0)

    @cute.jit
    def __call__(self, q: cute.Tensor, others: Any, scale: Float32, stream: cuda.CUstream):
        """others: those of `Operands` behind q."""
        operands = Operands(q, *others)
        at = self.sequences
        q, k, v = [at.rows(x) for x in operands[:3]]
        o, heads, x, x_heads = operands.o, operands.o.shape[2], None, Int32(1)
        if const_expr(self.spec.dot):
            x = at.rows(operands.x)
            x, x_heads = at.loads(x, self.v_tile), heads // x.shape[2]
        g = Globals(at.loads(q, self.qk_tile), at.loads(k, self.qk_tile), at.loads(v, self.v_tile), x, o,
                    operands.dots, operands.g, operands.initial, operands.final, scale, Int32(q.shape[0]),
                    heads // k.shape[2], heads // v.shape[2], x_heads, operands.cu)
        parts = -(-self.spec.value_dim // CHUNK)
        blocks = at.blocks(operands.q, operands.cu)
        self.kernel(g).launch(grid=[parts, heads, blocks], block=[3 * tk.WARPGROUP, 1, 1], stream=stream,
                              min_blocks_per_mp=1)

    # ---- device --------------------------------------------------------------------------------

    @cute.kernel
    def kernel(self, g: Globals):
        stages, al, row = self.config.stages, tk.SharedAllocator(), CHUNK + PAD
        factors = cute.make_layout((2, CHUNK, CHUNK), stride=(CHUNK * row, row, 1))
        loaded = 2 * self.qk_tile.bytes + (1 + self.spec.dot) * self.v_tile.bytes
        s = Shared(al.tile(self.qk_tile, stages), al.tile(self.qk_tile, stages), al.tile(self.v_tile, stages),
                   al.tile(self.v_tile, stages) if self.spec.dot else None, al.tile(self.v_tile, 2),
                   al.allocate_tensor(Float32, factors, 128), al.tile(self.p_tile, 2), al.vector(4 * CHUNK),
                   al.vector(CHUNK), al.pipe(stages, loaded, 4), al.pipe(2, 0, 4, producers=4))
        tk.init_block(lambda: [x.init() for x in (s.tokens, s.steps)])
        part, head, block = cute.arch.block_idx()
        g, batch, state, tokens = self.sequences.of_block(g, block)
        t = Task(batch, head, head // g.heads_per_k, head // g.heads_per_v, part, state, tokens)
        few, some, many = self.config.registers
        tk.assign((tk.Role(lambda _: self.produce(g, s, t), few, warps=1),
                   tk.Role(lambda _: self.make_steps(g, s, t), some),
                   tk.Role(lambda _: self.keep_state(g, s, t), many)))

    @cute.jit
    def produce(self, g, s, t):
        ring = s.tokens.ring()
        tk.prefetch(g.q, g.k, g.v)
        for i in cutlass.range(chunks(self.spec, g, t), unroll=1):
            chunk = order(self.spec, g, t, i)
            sem = s.tokens.acquire(ring)
            tk.load_async(s.k[ring.stage], g.k, (t.batch, t.head_k, chunk, 0), sem)
            tk.load_async(s.q[ring.stage], g.q, (t.batch, t.head_k, chunk, 0), sem)
            tk.load_async(s.v[ring.stage], g.v, (t.batch, t.head_v, chunk, t.part), sem)
            if const_expr(self.spec.dot):
                tk.load_async(s.x[ring.stage], g.x, (t.batch, t.head // g.heads_per_x, chunk, t.part), sem)
            ring.advance()

    @cute.jit
    def make_steps(self, g, s, t):
        """What each step of a chunk multiplies."""
        ring, out = s.tokens.ring(), s.steps.ring()
        x, scores, p = tk.rt_fl(CHUNK), tk.rt(CHUNK, self.dtype), tk.rt(CHUNK, self.dtype)
        mine = self.columns.begin()
        self.clear(s)
        self.read(g, t, order(self.spec, g, t, 0), mine)
        for i in cutlass.range(chunks(self.spec, g, t), unroll=1):
            s.tokens.wait(ring)
            tk.mm_ABt(x, s.q[ring.stage], s.k[ring.stage])
            self.columns.decays(mine, s.products[None, 0])
            tk.sync(SCORES_BARRIER, tk.WARPGROUP)
            tk.mma_wait(0)
            tk.apply_narrow(scores, lambda s: s * g.scale, x)
            s.steps.acquire_empty(out)
            early, late = self.puts(s, s.v[ring.stage], out.stage)
            self.columns.to_ends(mine, s.products[None, 0], early, late, s.total[None, 0])
            s.steps.commit(out)  # no fence: neither TMA nor wgmma reads it
            out.advance()
            for n in cutlass.range_constexpr(len(HALVES)):
                s.steps.acquire_empty(out)
                puts = self.puts(s, s.v[ring.stage], out.stage)
                self.columns.early(mine, s.products[None, 0], HALVES[n], puts)
                self.columns.late(mine, HALVES[n], puts)
                self.put_scores(s, scores, p, HALVES[n], out)
            self.read(g, t, order(self.spec, g, t, i + 1), mine)
            if const_expr(not self.spec.strict):
                s.steps.acquire_empty(out)
                self.put_scores(s, scores, p, 0, out)
            ring.advance()

    def read(self, g, t, chunk, mine):
        """Behind the last chunk, of the first one: it is not used."""
        gates, first = g.g[t.batch, None, t.head, None], t.part * CHUNK
        gates = cute.make_tensor(gates.iterator + first, gates.layout)
        self.columns.read(gates, g.tokens, self.spec.value_dim - first, cutlass.max(chunk, 0), mine)

    @cute.jit
    def clear(self, s):
        """What no row of a level is written to is multiplied by zeros: numbers from the start."""
        thread, factors = tk.thread_in_warpgroup(), s.factors
        for stage in cutlass.range_constexpr(2):
            rows = words(s.carried[stage])
            for i in cutlass.range(CHUNK * CHUNK // 2 // tk.WARPGROUP, unroll=4):
                rows[i * tk.WARPGROUP + thread] = Int32(0)
            for i in cutlass.range(CHUNK * CHUNK // tk.WARPGROUP, unroll=4):
                at = i * tk.WARPGROUP + thread
                factors[stage, at // CHUNK, at % CHUNK] = Float32(0.0)
        tk.sync(SCORES_BARRIER, tk.WARPGROUP)

    def puts(self, s, v, stage):
        """What is put for early tokens and late ones: rows of v, or factors."""
        carried = self.columns.rows((words(s.carried[stage]), words(v)))
        taken = factors_of(self.columns, s.factors, stage)
        return (taken, carried) if self.spec.reverse else (carried, taken)

    @cute.jit
    def put_scores(self, s, scores, p, half: Constexpr[int], out):
        """The level's part of Q K', and the step is there."""
        pick_scores(p, scores, half, self.spec.reverse)
        tk.store(s.p[out.stage], p)
        tk.publish()
        s.steps.commit(out)
        out.advance()

    @cute.jit
    def keep_state(self, g, s, t):
        c = State(tk.rt_fl(self.spec.head_dim), tk.rt(self.spec.head_dim, self.dtype), tk.rt(CHUNK, self.dtype),
                  tk.rt_fl(CHUNK), tk.rt_fl(CHUNK // 2), tk.rt(CHUNK, self.dtype) if self.spec.dot else None,
                  tk.rt_fl(CHUNK) if self.spec.dot else None, tk.rv())
        ring, steps = s.tokens.ring(), s.steps.ring()
        if const_expr(self.spec.initial is None):
            tk.zero(c.s)
        else:
            tk.load_from(c.s, self.sequences.state(g.initial, t), t.part * CHUNK, 0)
        for i in cutlass.range(chunks(self.spec, g, t), unroll=1):
            s.tokens.wait(ring)
            self.of_state(c, s.q[ring.stage])
            if const_expr(self.spec.dot):
                tk.load_T(c.x, s.x[ring.stage])
            s.steps.wait(steps)
            tk.load_rows(c.total, s.total[None, 0], 0, CHUNK)
            tk.mul_row(c.s, c.s, c.total)
            self.scale_outputs(c, s.factors, steps.stage, g.scale)
            tk.load_T(c.v, s.carried[steps.stage])
            tk.mma_AB(c.s, c.v, s.k[ring.stage])
            tk.mma_wait(0)
            self.next(s, steps)
            for n in cutlass.range_constexpr(len(HALVES)):
                s.steps.wait(steps)
                tk.load_T(c.v, s.carried[steps.stage])
                self.add_level(c, s, steps.stage, HALVES[n])
                self.next(s, steps)
            if const_expr(not self.spec.strict):
                s.steps.wait(steps)
                tk.load_T(c.v, s.v[ring.stage])
                self.add_level(c, s, steps.stage, 0)
                self.next(s, steps)
            s.tokens.release(ring)
            token0 = order(self.spec, g, t, i) * CHUNK
            self.put(g.o, g, t, c.o, token0)
            if const_expr(self.spec.dot):
                self.put(g.of_x, g, t, c.dots, token0)
            ring.advance()
        if const_expr(self.spec.final is not None):
            tk.store_elements(self.sequences.state(g.final, t), c.s, t.part * CHUNK, 0)

    def of_state(self, c, queries):
        """c.o = what the state gives, with dot from the state in two parts."""
        tk.copy(c.s16, c.s)
        tk.mm_ABt(c.o, c.s16, queries)
        tk.mma_wait(0)
        if self.spec.dot:
            tk.apply_narrow(c.s16, lambda wide, rounded: wide - rounded, c.s, c.s16)
            tk.mma_ABt(c.o, c.s16, queries)
            tk.mma_wait(0)

    def next(self, s, steps):
        s.steps.release(steps)
        steps.advance()

    def scale_outputs(self, c, factors, stage, scale):
        """What the state gave, as each token sees it."""
        if self.spec.dot:
            tk.zero(c.dots)
        for r, n in pairs_of(range(CHUNK)):
            given = [c.o.rows_view[r, 2 * n + e] * scale for e in range(2)]
            for e in range(2):
                c.o.rows_view[r, 2 * n + e] = Float32(0.0)
            self.add(c, r, n, given, self.factors_at(factors, stage, r, n))

    def add_level(self, c, s, stage, half):
        """A level's outputs, as each token sees them, 32 tokens at a time. half 0: the diagonal, without factors."""
        takes = [token for token in range(CHUNK) if not half or token // half % 2 != self.spec.reverse]
        for part in range(2):
            mine = [token for token in takes if token // 32 == part]
            if mine:
                tk.mm_ABt(c.given, c.v, s.p[stage], b_part=part)
                tk.mma_wait(0)
                for r, n in pairs_of(mine):
                    f = self.factors_at(s.factors, stage, r, n) if half else None
                    self.add(c, r, n, [c.given.rows_view[r, 2 * (n - 4 * part) + e] for e in range(2)], f)

    def add(self, c, r, n, given, f):
        """Two tokens' outputs, and those times x: with x's factors rounded as they are where x is what is carried."""
        o = c.o.rows_view
        for e in range(2):
            o[r, 2 * n + e] = o[r, 2 * n + e] + given[e] if f is None else cute.math.fma(
                given[e], f[e], o[r, 2 * n + e])
        if self.spec.dot:
            word, dots = cute.recast_tensor(c.x.tensor, Int32)[2 * n + r], c.dots.rows_view
            x = unpacked(word if f is None else scaled(word, f, self.dtype), self.dtype)
            for e in range(2):
                dots[r, 2 * n + e] = cute.math.fma(given[e], x[e], dots[r, 2 * n + e])

    def factors_at(self, factors, stage, r, n):
        """Of a thread's r-th column and its two tokens among the n-th 8."""
        return [factors[stage, tk.first_col() + 8 * n + e, tk.first_row() + 8 * r] for e in range(2)]

    @cute.jit
    def put(self, to: cute.Tensor, g, t, o: tk.RegTile, token0):
        """Outputs to global memory, in pieces of 32 bytes."""
        x, view = to[t.batch, None, t.head, None], o.rows_view
        tokens = t.tokens if const_expr(self.spec.packed) else g.tokens
        row, token = t.part * CHUNK + tk.first_row(), token0 + tk.first_col()
        at = x.iterator + cute.crd2idx((token, row), x.layout)
        for r in cutlass.range_constexpr(2):
            for j in cutlass.range_constexpr(CHUNK // 4):
                behind = 8 * (j // 2) + j % 2
                if token + behind < tokens and row + 8 * r < self.spec.value_dim:
                    cute.make_tensor(at + (behind * x.stride[0] + 8 * r), cute.make_layout(1))[0] = view[r, j]


def factors_of(columns, factors, stage):
    """What `columns` put: a token's factors themselves."""
    def put(mine, rows):
        two, pair = cute.make_rmem_tensor((2,), Float32), 2 * columns.pair
        for i, f in rows:
            for e in range(2):
                two[e] = Float32(1.0) if f is None else f[e]
            at = factors.iterator + cute.crd2idx((stage, columns.part * columns.mine + i, pair), factors.layout)
            cute.autovec_copy(two, cute.make_tensor(at.align(8), cute.make_layout(2)))
    return put


def pairs_of(tokens):
    """[(r, n)]: which of a thread's two columns, and which 8 tokens of which it has two, are of any of the tokens in
    any thread."""
    return [(r, n) for r in range(2) for n in range(CHUNK // 8) if any(token // 8 == n for token in tokens)]
