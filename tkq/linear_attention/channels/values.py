"""Linear attention whose gates are of the columns of v: the passes of the gradients of gates for each column."""
from dataclasses import dataclass
from typing import Any, NamedTuple, Optional

import cuda.bindings.driver as cuda
import cutlass
import cutlass.cute as cute
from cutlass import Constexpr, Float32, Float64, Int32, const_expr

import tkq.tile as tk
from tkq.linear_attention.blocks.pairs import words
from tkq.linear_attention.channels.columns import HALVES, Columns, pick_scores
from tkq.linear_attention.channels.parts import (
    SCORES_BARRIER,
    Operands,
    Task,
    chunks,
    order,
)
from tkq.linear_attention.channels.plan import PAD, STEPS, less_of_values
from tkq.linear_attention.channels.spec import ChannelSpec
from tkq.linear_attention.channels.value_state import ValueState
from tkq.linear_attention.channels.whole_of_values import WholeOfValues
from tkq.linear_attention.config import CHUNK, LinearConfig
from tkq.linear_attention.engine.fields import Globals
from tkq.linear_attention.engine.packed import Sequences, any_strides, numbers
from tkq.runtime.compile import fake
from tkq.tile.dtypes import element_type


class OfValues(NamedTuple):
    """Of `Globals`: o times x, and what `parts.Operands` calls end, second, o2 and rest; or None."""

    of_x: Optional[tk.gl]
    end: Optional[cute.Tensor]
    second: Optional[tk.gl]
    o2: Optional[tk.gl]
    rest: Optional[tk.gl]


@dataclass(frozen=True)
class Shared:
    q: tk.SharedTile
    k: tk.SharedTile
    v: tk.SharedTile
    x: Any
    less: Any
    rest: Any
    second: Any
    v2: Any
    o: Any  # narrow outputs
    dots: Any
    o2: Any
    behind: Any  # of sums: of each column, what later chunks add up to
    carried: tk.SharedTile  # rows of v, with their factors; of a whole chunk what rounding leaves of p
    factors: cute.Tensor  # (STEPS, tokens, columns): of the rows that take them
    carried2: Any  # with pairs: those of v2; what rounding leaves of p2
    p: tk.SharedTile  # the pairs of one level, or all
    p2: Any
    products: cute.Tensor
    sums: cute.Tensor  # of logarithms: of each part of a chunk, for each column
    ends: cute.Tensor  # of columns: what a chunk decays by; or its first half, then the second (`WholeOfValues`)
    whole: cute.Tensor  # of a step: is it all of a chunk?
    tokens: tk.Pipe
    steps: tk.Pipe
    others: Any  # with sums: less and rest


class ChannelValues:
    """o[t] = scale * S[t]' q[t], S[t] = S[t-1] diag(exp(g[t])) + k[t] v[t]', for chunks of 64 tokens: with D the
    products of decays, for each column c of v,

        O[i, c] = scale * (D[0..i] (Q S)[i, c] + sum over j <= i of (q[i] k[j]) D[j+1..i] v[j, c])
        S[:, c] = D[0..63] S[:, c] + K' (D[i+1..63] v[:, c])

    Reversed, a token sees those from itself to the last, and D[0..i] and D[i+1..63] change places. A sum's decays do
    not go into Q K', for they differ from column to column: for each level of `Columns` the part of Q K' that is of it
    is multiplied by rows of v with their factors, and the result has the factors of its own rows.

      producer (a warp)    Q K V of a chunk | of the next | ..     a second one, with sums: what they are less of | ..
      scores (1)           Q K'; of each step its part, rows of v, factors | ..
      state (1)            O' = S' Q', S' += V' K; of each step O' += V' P' | O to global memory | ..

    Where a chunk's decays allow it, it has one step (`WholeOfValues`). Else its steps are the one that meets the state,
    six levels, and the diagonal. Two passes that share states are one launch (`pairs`, see `value_pairs`).

      pipe      stages           full (arrivals)            empty (arrivals)
      tokens    config.stages    producer's bytes (1)       warps of the state (4), behind the scores
      steps     1                warps of the scores (4)    warps of the state (4)
      others    2, of pairs 1    producer's bytes (1)       warps of the state (4)
    """

    def __init__(self, spec: ChannelSpec, config: LinearConfig):
        self.spec, self.config, self.sequences = spec, config, Sequences(spec)
        self.dtype = element_type(spec.dtype)
        self.qk_tile = tk.st(CHUNK, spec.head_dim, self.dtype)
        self.v_tile = self.p_tile = tk.st(CHUNK, CHUNK, self.dtype)
        self.less_tile = tk.st(CHUNK, CHUNK, Float32)
        self.columns = Columns(self.v_tile)
        self.two_values = spec.pairs and spec.reverse
        self.whole, self.state = WholeOfValues(self.columns), ValueState(spec, self.sequences)

    # ---- host ----------------------------------------------------------------------------------

    def fake_arguments(self):
        """Compiled for any B, S and heads, and strides of q, k, v, g and o that are multiples of 16 bytes."""
        spec, (B, S, H, HV, HO) = self.spec, (fake.sym() for _ in range(5))
        K, V = spec.head_dim, spec.value_dim
        states = fake.sym() if spec.packed else B, HO, K, V

        def operand(heads, cols, dtype=spec.dtype, unit=8):
            return fake.tensor(dtype, (B, S, heads, cols), (*(fake.sym64(divisibility=unit) for _ in range(3)), 1))

        o = operand(HO, V) if spec.narrow else operand(HO, V, "fp32", 4)
        operands = Operands(operand(H, K), operand(H, K), operand(HV, V), o,
                            operand(HO, V, "fp32", 4), None, any_strides(spec.initial, states),
                            any_strides(spec.final, states),
                            operand(fake.sym(), V) if spec.dot and not self.two_values else None,
                            operand(HO, V, "fp32", 4) if spec.dot else None, None, numbers(spec.packed), None,
                            operand(HO, V, "fp32", 4) if spec.sums else None,
                            any_strides("fp32", (states[0], HO, V)) if spec.end else None,
                            operand(H, K) if spec.pairs else None, operand(HV, V) if self.two_values else None,
                            operand(HO, V, "fp32", 4) if spec.pairs and not spec.reverse else None,
                            operand(HO, V, "fp32", 4) if spec.rest else None)
        return operands.q, tuple(operands[1:]), Float32(1.0)

    @cute.jit
    def __call__(self, q: cute.Tensor, others: Any, scale: Float32, stream: cuda.CUstream):
        """others: those of `Operands` behind q."""
        operands = Operands(q, *others)
        at = self.sequences
        q, k, v = [at.rows(x) for x in operands[:3]]
        o, heads, x, x_heads, less = operands.o, operands.o.shape[2], None, Int32(1), None
        if const_expr(self.spec.narrow):
            o = at.stores(at.rows(o), self.v_tile)
        if const_expr(self.spec.sums):
            less = at.loads(at.rows(operands.less), self.less_tile)
        second = v2 = of_x = o2 = None
        if const_expr(self.spec.dot):
            of_x = at.stores(at.rows(operands.dots), self.less_tile)
        rest = None
        if const_expr(self.spec.rest):
            rest = at.loads(at.rows(operands.rest), self.less_tile)
        if const_expr(self.spec.pairs and not self.two_values):
            o2 = at.stores(at.rows(operands.o2), self.less_tile)
        if const_expr(self.spec.pairs):
            second = at.loads(at.rows(operands.second), self.qk_tile)
        if const_expr(self.two_values):
            v2 = at.loads(at.rows(operands.v2), self.v_tile)
        if const_expr(self.spec.dot and not self.two_values):
            x = at.rows(operands.x)
            x, x_heads = at.loads(x, self.v_tile), heads // x.shape[2]
        g = Globals(
            q=at.loads(q, self.qk_tile), k=at.loads(k, self.qk_tile), v=at.loads(v, self.v_tile), o=o, x=x,
            g=operands.g, initial=operands.initial, final=operands.final, scale=scale, tokens=Int32(q.shape[0]),
            heads_per_k=heads // k.shape[2], heads_per_v=heads // v.shape[2], heads_per_x=x_heads, cu=operands.cu,
            v2=v2, less=less, own=OfValues(of_x, operands.end, second, o2, rest))
        parts = -(-self.spec.value_dim // CHUNK)
        blocks = at.blocks(operands.q, operands.cu)
        self.kernel(g).launch(grid=[parts, heads, blocks], block=[3 * tk.WARPGROUP, 1, 1], stream=stream,
                              min_blocks_per_mp=1)

    # ---- device --------------------------------------------------------------------------------

    @cute.kernel
    def kernel(self, g: Globals):
        stages, al, row = self.config.stages, tk.SharedAllocator(), CHUNK + PAD
        factors = cute.make_layout((STEPS, CHUNK, CHUNK), stride=(CHUNK * row, row, 1))
        spec, of_less = self.spec, less_of_values(self.spec)
        loaded = (2 + spec.pairs) * self.qk_tile.bytes + (1 + spec.dot) * self.v_tile.bytes
        s = Shared(al.tile(self.qk_tile, stages), al.tile(self.qk_tile, stages), al.tile(self.v_tile, stages),
                   al.tile(self.v_tile, stages) if spec.dot and not self.two_values else None,
                   al.tile(self.less_tile, of_less) if spec.sums else None,
                   al.tile(self.less_tile, of_less) if spec.rest else None,
                   al.tile(self.qk_tile, stages) if spec.pairs else None,
                   al.tile(self.v_tile, stages) if self.two_values else None,
                   al.tile(self.v_tile) if spec.narrow else None,
                   al.tile(self.less_tile) if spec.dot and not spec.sums else None,
                   al.tile(self.less_tile) if spec.pairs and not spec.reverse else None,
                   al.vector(CHUNK, dtype=Float64) if spec.sums else None, al.tile(self.v_tile, STEPS),
                   al.allocate_tensor(Float32, factors, 128), al.tile(self.v_tile, STEPS) if spec.pairs else None,
                   al.tile(self.p_tile, STEPS), al.tile(self.p_tile, STEPS) if spec.pairs else None,
                   al.vector(4 * CHUNK), al.vector(4 * CHUNK, 2), al.vector(2 * CHUNK, STEPS),
                   al.vector(1, STEPS, Int32), al.pipe(stages, loaded, 4), al.pipe(STEPS, 0, 4, producers=4),
                   al.pipe(of_less, (1 + spec.rest) * self.less_tile.bytes, 4) if spec.sums else None)
        tk.init_block(lambda: [x.init() for x in (s.tokens, s.steps, s.others) if x is not None])
        part, head, block = cute.arch.block_idx()
        g, batch, state, tokens = self.sequences.of_block(g, block)
        t = Task(batch, head, head // g.heads_per_k, head // g.heads_per_v, part, state, tokens)
        few, some, many = self.config.registers
        tk.assign((tk.Role(lambda _: self.produce(g, s, t), few, warps=1 + spec.sums),
                   tk.Role(lambda _: self.make_steps(g, s, t), some),
                   tk.Role(lambda _: self.state.keep(g, s, t), many)))

    @cute.jit
    def produce(self, g, s, t):
        """A warp for the tokens, one for what sums are less of: neither waits for the other's room."""
        if const_expr(self.spec.sums):
            if tk.warp_id() % 4 == 0:
                self.produce_tokens(g, s, t)
            else:
                self.produce_others(g, s, t)
        else:
            self.produce_tokens(g, s, t)

    @cute.jit
    def produce_others(self, g, s, t):
        ring = s.others.ring()
        for i in cutlass.range(chunks(self.spec, g, t), unroll=1):
            sem, place = s.others.acquire(ring), (t.batch, t.head, order(self.spec, g, t, i), t.part)
            tk.load_async(s.less[ring.stage], g.less, place, sem)
            if const_expr(self.spec.rest):
                tk.load_async(s.rest[ring.stage], g.own.rest, place, sem)
            ring.advance()

    @cute.jit
    def produce_tokens(self, g, s, t):
        ring = s.tokens.ring()
        tk.prefetch(g.q, g.k, g.v)
        for i in cutlass.range(chunks(self.spec, g, t), unroll=1):
            chunk = order(self.spec, g, t, i)
            sem = s.tokens.acquire(ring)
            tk.load_async(s.k[ring.stage], g.k, (t.batch, t.head_k, chunk, 0), sem)
            tk.load_async(s.q[ring.stage], g.q, (t.batch, t.head_k, chunk, 0), sem)
            tk.load_async(s.v[ring.stage], g.v, (t.batch, t.head_v, chunk, t.part), sem)
            if const_expr(self.spec.pairs):
                tk.load_async(s.second[ring.stage], g.own.second, (t.batch, t.head_k, chunk, 0), sem)
            if const_expr(self.two_values):
                tk.load_async(s.v2[ring.stage], g.v2, (t.batch, t.head_v, chunk, t.part), sem)
            if const_expr(self.spec.dot and not self.two_values):
                tk.load_async(s.x[ring.stage], g.x, (t.batch, t.head // g.heads_per_x, chunk, t.part), sem)
            ring.advance()

    @cute.jit
    def make_steps(self, g, s, t):
        """What each step of a chunk multiplies."""
        ring, out = s.tokens.ring(), s.steps.ring()
        x, scores, p = self.two(lambda: tk.rt_fl(CHUNK)), self.two(lambda: tk.rt(CHUNK, self.dtype)), tk.rt(
            CHUNK, self.dtype)
        mine, ahead = self.columns.begin(), self.columns.begin()
        self.read(g, t, order(self.spec, g, t, 0), mine)
        for i in cutlass.range(chunks(self.spec, g, t), unroll=1):
            s.tokens.wait(ring)
            self.multiply(x, s, ring.stage)
            self.read(g, t, order(self.spec, g, t, i + 1), ahead)
            if const_expr(self.whole.there):
                sums = s.sums[None, i % 2]
                self.whole.sums(mine, sums)
                tk.sync(SCORES_BARRIER, tk.WARPGROUP)
                near, of = self.whole.find(sums)
                tk.mma_wait(0)
                if near:
                    self.put_whole(s, x, p, mine, of, out)
                else:
                    self.put_levels(g, s, (x, scores, p), mine, ring, out)
            else:
                tk.mma_wait(0)
                self.put_levels(g, s, (x, scores, p), mine, ring, out)
            mine.a.store(ahead.a.load())
            ring.advance()

    def two(self, make):
        """Of each pair of operands."""
        return tuple(make() for _ in range(1 + self.spec.pairs))

    def multiply(self, x, s, stage):
        """Q K' of both are under way."""
        tk.mm_ABt(x[0], s.q[stage], s.k[stage])
        if self.two_values:
            tk.mm_ABt(x[1], s.q[stage], s.second[stage])
        elif self.spec.pairs:
            tk.mm_ABt(x[1], s.second[stage], s.k[stage])

    @cute.jit
    def put_whole(self, s, x, p, mine, of, out):
        """A chunk by one step: all of Q K' that tokens see, in two parts, and factors."""
        reverse = self.spec.reverse
        for n in cutlass.range_constexpr(len(x)):
            if const_expr(reverse):
                tk.left_fill(x[n], int(n > 0), 0.0, diagonal=True)
            else:
                tk.right_fill(x[n], int(n == 0), 0.0, diagonal=True)
        s.steps.acquire_empty(out)
        for n in cutlass.range_constexpr(len(x)):
            tk.copy(p, x[n])
            tk.store((s.p, s.p2)[n][out.stage], p)
            tk.apply_narrow(p, lambda wide, rounded: wide - rounded, x[n], p)
            tk.store((s.carried, s.carried2)[n][out.stage], p)
        ends = [cute.make_tensor(s.ends.iterator + cute.crd2idx((n * CHUNK, out.stage), s.ends.layout),
                                 cute.make_layout(CHUNK)) for n in range(2)]
        self.whole.put(mine, of, factors_of(self.columns, s.factors, out.stage), ends, reverse)
        self.says(s.whole, out, 1)
        tk.publish()
        s.steps.commit(out)
        out.advance()

    @cute.jit
    def says(self, to, out, whole: Constexpr[int]):
        """Is a chunk's first step all of it?"""
        if const_expr(self.whole.there):
            if tk.thread_in_warpgroup() == 0:
                to[0, out.stage] = Int32(whole)

    @cute.jit
    def put_levels(self, g, s, registers, mine, ring, out):
        """A chunk by a step that meets the state, six levels, and the diagonal."""
        x, scores, p = registers
        self.columns.decays(mine, s.products[None, 0])
        tk.sync(SCORES_BARRIER, tk.WARPGROUP)
        tk.apply_narrow(scores[0], lambda s: s * g.scale, x[0])
        if const_expr(self.spec.pairs):
            tk.apply_narrow(scores[1], lambda s: -s, x[1])
        s.steps.acquire_empty(out)
        early, late = self.puts(s, ring.stage, out.stage)
        # all rows and factors: those that a level does not write are numbers, which it multiplies by zeros
        self.columns.to_ends(mine, s.products[None, 0], early, late, s.ends[None, out.stage])
        self.says(s.whole, out, 0)
        s.steps.commit(out)  # no fence: neither TMA nor wgmma reads it
        out.advance()
        for n in cutlass.range_constexpr(len(HALVES)):
            s.steps.acquire_empty(out)
            puts = self.puts(s, ring.stage, out.stage)
            self.columns.early(mine, s.products[None, 0], HALVES[n], puts)
            self.columns.late(mine, HALVES[n], puts)
            self.put_scores(s, scores, p, HALVES[n], out)
        s.steps.acquire_empty(out)
        self.put_scores(s, scores[:1], p, 0, out)

    def read(self, g, t, chunk, mine):
        """Behind the last chunk, of the first one: it is not used."""
        gates, first = g.g[t.batch, None, t.head, None], t.part * CHUNK
        gates = cute.make_tensor(gates.iterator + first, gates.layout)
        self.columns.read(gates, g.tokens, self.spec.value_dim - first, cutlass.max(chunk, 0), mine)

    def puts(self, s, of, stage):
        """What is put for early tokens and late ones: rows of v, or factors."""
        pairs = [(words(s.carried[stage]), words(s.v[of]))]
        if self.two_values:
            pairs.append((words(s.carried2[stage]), words(s.v2[of])))
        carried = self.columns.rows(*pairs)
        taken = factors_of(self.columns, s.factors, stage)
        return (taken, carried) if self.spec.reverse else (carried, taken)

    @cute.jit
    def put_scores(self, s, scores, p, half: Constexpr[int], out):
        """The level's part of Q K', and the step is there."""
        for n in cutlass.range_constexpr(len(scores)):
            pick_scores(p, scores[n], half, self.spec.reverse)
            tk.store((s.p, s.p2)[n][out.stage], p)
        tk.publish()
        s.steps.commit(out)
        out.advance()

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
