"""Linear attention, chunk by chunk (Katharopoulos et al., 2020; the chunked form of Sun et al., 2023, and Yang et al.,
2023), with the state in accumulators."""
from dataclasses import dataclass
from typing import Any, NamedTuple, Optional

import cuda.bindings.driver as cuda
import cutlass
import cutlass.cute as cute
from cutlass import Constexpr, Float32, Int32, const_expr

import tkq.tile as tk
from tkq.linear_attention.config import CHUNK, LinearConfig
from tkq.linear_attention.engine.delta import Delta
from tkq.linear_attention.engine.dots import put_dots
from tkq.linear_attention.engine.gates import Gate
from tkq.linear_attention.engine.packed import Sequences
from tkq.linear_attention.engine.ssd import Ssd
from tkq.linear_attention.spec import LinearSpec
from tkq.runtime.compile import fake
from tkq.tile.dtypes import element_type

SCORES_BARRIER, OUT_BARRIER = 1, 2  # named barriers: of the scores' warpgroup, of the state's (one each)


class Operands(NamedTuple):
    """q, k: (B, S, H, K). v: (B, S, Hv, V). o: (B, S, HO, V), HO a multiple of H and Hv: neighbouring heads of o share
    one of theirs. g: None, (HO,) or (B, S, HO) fp32. beta: None, or (B, S, HO). initial, final: (B, HO, K, V) or None,
    of any strides; (B, HO, V, K) with state_v_first. x: None, or as v, of any heads that divide HO. dots: (ceil(V /
    64), B, S, HO) fp32, the sums of o times x of 64 columns each. dv: None, or as o: with delta, reversed, o times
    beta. cu: None, or (N + 1,), where N packed sequences begin and end: then B is 1, and states are N. state_indices:
    None, or (N,), rows of a pool, which is initial and final."""

    q: cute.Tensor
    k: cute.Tensor
    v: cute.Tensor
    o: cute.Tensor
    g: Optional[cute.Tensor]
    beta: Optional[cute.Tensor]
    initial: Optional[cute.Tensor]
    final: Optional[cute.Tensor]
    x: Optional[cute.Tensor]
    dots: Optional[cute.Tensor]
    dv: Optional[cute.Tensor]
    cu: Optional[cute.Tensor]
    state_indices: Optional[cute.Tensor]


@dataclass(frozen=True)
class Globals:
    q: tk.gl
    k: tk.gl
    v: tk.gl
    o: tk.gl
    dv: Optional[tk.gl]
    x: Optional[tk.gl]
    g: Optional[cute.Tensor]
    beta: Optional[cute.Tensor]
    initial: Optional[cute.Tensor]
    final: Optional[cute.Tensor]
    dots: Optional[cute.Tensor]
    scale: Float32
    tokens: Int32
    heads_per_k: Int32
    heads_per_v: Int32
    heads_per_x: Int32
    ssd: Any
    cu: Optional[cute.Tensor]
    state_indices: Optional[cute.Tensor]


@dataclass(frozen=True)
class Shared:
    q: tk.SharedTile
    k: tk.SharedTile
    v: tuple  # of each warpgroup of the state
    x: tuple  # likewise
    dots: Any
    o: tk.SharedTile
    p: tk.SharedTile
    rest: Any  # of p, with dots
    gate: Any
    delta: Any
    diagonal: Any
    tokens: tk.Pipe
    scores: tk.Pipe


@dataclass(frozen=True)
class Task:
    """One head of one sequence, the row of its states, and where its V begins, in tiles of 64."""

    batch: Int32
    state: Int32
    head: Int32
    head_k: Int32
    head_v: Int32
    part: Int32
    chunks: Int32


@dataclass(frozen=True)
class State:
    """Registers of 64 rows of V."""

    s: tk.RegTile  # the state, transposed: V by K
    s16: tk.RegTile  # the same, rounded: an operand
    v: tk.RegTile  # a chunk's values, transposed
    u: tk.RegTile  # the same, with what decays to the chunk's end
    o: tk.RegTile  # outputs, transposed: V by tokens
    x: tk.RegTile  # another tensor's rows, as v
    w: tk.RegTile  # with the delta rule: what the state gives for keys, then what it takes up
    at_query: tk.ColVec
    to_end: tk.ColVec
    beta: tk.ColVec
    erase: tk.ColVec


class LinearAttention:
    """o[t] = scale * S[t]' q[t], S[t] = exp(g[t]) S[t-1] + k[t] v[t]', for chunks of 64 tokens:

        O = scale * (e^G Q S + P V),  P[i, j] = e^(G[i] - G[j]) q[i] k[j] for j <= i,  G the running sum of g
        S = e^G[63] S + (e^(G[63] - G) K)' V

    Reversed, a token sees those from itself to the last, P[i, j] = e^(G[j] - G[i]) q[i] k[j] for j >= i, and

        O = scale * (e^(G[63] - G) Q S + P V),  S = e^G[63] S + (e^G K)' V,  S of the chunks behind

    A block has one head of one sequence and 64 columns of V for each of its warpgroups of the state, which keep
    S' (V by K, fp32) in their accumulators from the first chunk to the last: rounded to 16 bits it is the A operand of
    S' Q', and values transposed are that of V' P' and V' K.

      producer (a warp)        Q K V of a chunk | of the next | ..
      scores (a warpgroup)     Q K', gates, mask: P | P of the next chunk | ..
      state (1 or 2)           O' = S' Q', O' += V' P', S' += V' K | O to global memory | ..

    With sums of o times another tensor ("dot"), of whose differences gates' gradients are made, 16 bits are too few:
    what rounding takes from an operand, P, S' or values that decay, goes through the tensor cores as a second one.

      pipe      stages           full (arrivals)            empty (arrivals)
      tokens    config.stages    producer's bytes (1)       warps of the scores and of the state (4 + 4 groups)
      scores    2                warps of the scores (4)    warps of the state (4 groups)
    """

    def __init__(self, spec: LinearSpec, config: LinearConfig):
        self.spec, self.config, self.ssd = spec, config, Ssd(spec)
        self.gate = Gate(spec, self.ssd)
        self.dtype = element_type(spec.dtype)
        self.qk_tile = tk.st(CHUNK, spec.head_dim, self.dtype)
        self.v_tile = self.p_tile = tk.st(CHUNK, CHUNK, self.dtype)
        self.delta, self.sequences = Delta(spec, self.p_tile, SCORES_BARRIER), Sequences(spec)

    # ---- host ----------------------------------------------------------------------------------

    def fake_arguments(self):
        """Compiled for any B, S and heads, and strides of q, k, v, o and x that are multiples of 16 bytes."""
        spec, (B, S, H, HV, HO) = self.spec, (fake.sym() for _ in range(5))
        K, V = spec.head_dim, spec.value_dim

        def operand(heads, cols):
            return fake.tensor(spec.dtype, (B, S, heads, cols), (*(fake.sym64(divisibility=8) for _ in range(3)), 1))

        def of_tokens(dtype):
            return _any_strides(dtype, (B, S, HO))

        g = {"none": None, "head": fake.tensor("fp32", (HO,), align=4), "token": of_tokens("fp32")}[spec.gate]
        g = None if spec.ssd else g
        dots = fake.tensor("fp32", (-(-V // CHUNK), B, S, HO), align=4) if spec.dot else None
        rows, sizes = fake.sym() if spec.packed or spec.pool else B, (V, K) if spec.state_v_first else (K, V)
        states = rows, HO, *sizes
        operands = Operands(operand(H, K), operand(H, K), operand(HV, V), operand(HO, V), g, of_tokens(spec.delta),
                            _any_strides(spec.initial, states), _any_strides(spec.final, states),
                            operand(fake.sym(), V) if spec.has_x else None, dots,
                            operand(HO, V) if self.delta.back else None, _numbers(spec.packed),
                            _numbers(spec.pool))
        return operands, Float32(1.0), self.ssd.fake_operands(B, S, HO)

    @cute.jit
    def __call__(self, operands: Operands, scale: Float32, ssd: Any, stream: cuda.CUstream):
        c, at = self.config, self.sequences
        q, k, v, o = [at.rows(x) for x in operands[:4]]
        dv, x, x_heads = None, None, Int32(1)
        if const_expr(self.delta.back):
            dv = at.stores(at.rows(operands.dv), self.v_tile)
        if const_expr(self.spec.has_x):
            x = at.rows(operands.x)
            x, x_heads = at.loads(x, self.v_tile), o.shape[2] // x.shape[2]
        states = [x if x is None or not self.spec.state_v_first else cute.make_tensor(
            x.iterator, cute.select(x.layout, [0, 1, 3, 2])) for x in operands[6:8]]
        g = Globals(at.loads(q, self.qk_tile), at.loads(k, self.qk_tile), at.loads(v, self.v_tile),
                    at.stores(o, self.v_tile), dv, x, *operands[4:6], *states, operands.dots, scale, Int32(q.shape[0]),
                    o.shape[2] // k.shape[2], o.shape[2] // v.shape[2], x_heads, ssd, operands.cu,
                    operands.state_indices)
        parts = -(-self.spec.value_dim // (CHUNK * c.groups))
        blocks = at.blocks(operands.q, operands.cu)
        self.kernel(g).launch(grid=[parts, o.shape[2], blocks], block=[tk.WARPGROUP * (c.groups + 2), 1, 1],
                              stream=stream, min_blocks_per_mp=1)

    # ---- device --------------------------------------------------------------------------------

    @cute.kernel
    def kernel(self, g: Globals):
        c, al = self.config, tk.SharedAllocator()
        n, x = c.groups, int(self.spec.has_x)
        s = Shared(al.tile(self.qk_tile, c.stages), al.tile(self.qk_tile, c.stages),
                   tuple(al.tile(self.v_tile, c.stages) for _ in range(n)),
                   tuple(al.tile(self.v_tile, c.stages) for _ in range(n * x)),
                   al.vector(CHUNK, 4 * n) if self.spec.dot else None, al.tile(self.v_tile, n),
                   al.tile(self.p_tile, 2), al.tile(self.p_tile, 2) if self.spec.dot else None,
                   self.gate.shared(al), self.delta.shared(al), self.ssd.shared(al),
                   al.pipe(c.stages, 2 * self.qk_tile.bytes + n * (1 + x) * self.v_tile.bytes, 4 + 4 * n),
                   al.pipe(2, 0, 4 * n, producers=4))
        tk.init_block(lambda: [x.init() for x in (s.tokens, s.scores)])
        part, head, block = cute.arch.block_idx()
        g, batch, state, tokens = self.sequences.of_block(g, block)
        t = Task(batch, state, head, head // g.heads_per_k, head // g.heads_per_v, part * n,
                 cute.ceil_div(tokens, CHUNK))
        few, some, many = c.registers
        tk.assign((tk.Role(lambda _: self.produce(g, s, t), few, warps=1),
                   tk.Role(lambda _: self.make_scores(g, s, t), some),
                   tk.Role(lambda wg: self.keep_state(g, s, t, wg), many, n)))

    def order(self, t, i):
        """The i-th chunk that is visited."""
        return t.chunks - 1 - i if self.spec.reverse else i

    @cute.jit
    def produce(self, g, s, t):
        ring = s.tokens.ring()
        tk.prefetch(g.q, g.k, g.v, g.o)
        for i in cutlass.range(t.chunks, unroll=1):
            chunk = self.order(t, i)
            sem = s.tokens.acquire(ring)
            tk.load_async(s.k[ring.stage], g.k, (t.batch, t.head_k, chunk, 0), sem)
            tk.load_async(s.q[ring.stage], g.q, (t.batch, t.head_k, chunk, 0), sem)
            for wg in cutlass.range_constexpr(self.config.groups):
                tk.load_async(s.v[wg][ring.stage], g.v, (t.batch, t.head_v, chunk, t.part + wg), sem)
                if const_expr(self.spec.has_x):
                    at = t.batch, t.head // g.heads_per_x, chunk, t.part + wg
                    tk.load_async(s.x[wg][ring.stage], g.x, at, sem)
            ring.advance()

    @cute.jit
    def make_scores(self, g, s, t):
        """P of each chunk, and beside it what decays."""
        ring, out = s.tokens.ring(), s.scores.ring()
        x, p = tk.rt_fl(CHUNK), tk.rt(CHUNK, self.dtype)
        gates, mine = self.gate.begin(g, t, self.order(t, 0)), self.delta.begin(g, t, self.order(t, 0))
        for i in cutlass.range(t.chunks, unroll=1):
            s.tokens.wait(ring)
            if const_expr(self.spec.scored):
                tk.mm_ABt(x, s.q[ring.stage], s.k[ring.stage])
            s.scores.acquire_empty(out)
            self.gate.factors(g, t, self.order(t, i), (s.gate, out.stage), gates)
            self.delta.factors(g, s.delta, mine, self.gate.sums_of(s.gate), out.stage)
            if const_expr(not self.spec.delta):
                self.gate.ask(g, t, self.order(t, i + 1), gates)
            tk.sync(SCORES_BARRIER, tk.WARPGROUP)
            between = self.gate.between(s.gate, gates, out.stage)
            tk.mma_wait(0)
            if const_expr(self.spec.scored):
                self.ssd.put_diagonal(s.diagonal, x, between, g.scale, out.stage)
                self.gate.weigh(p, x, between, g.scale)
            self.delta.products(x, s.q[ring.stage] if self.spec.reverse else s.k[ring.stage])
            if const_expr(self.spec.scored):
                self.put_scores(s.p[out.stage], p)
            if const_expr(self.spec.dot):
                self.gate.weigh_rest(p, x, between, g.scale)
                self.put_scores(s.rest[out.stage], p)
            tk.mma_wait(0)
            s.tokens.release(ring)
            self.delta.put(s.delta, x, mine, between, out.stage)
            if const_expr(self.spec.delta):  # registers are free again, and the inverse takes as long as memory does
                self.gate.ask(g, t, self.order(t, i + 1), gates)
                self.delta.ask(g, t, self.order(t, i + 1), mine)
            self.delta.invert(s.delta, x, mine, out.stage)
            tk.publish()
            s.scores.commit(out)
            ring.advance()
            out.advance()

    def put_scores(self, tile, p):
        """Without those of tokens that a query does not see."""
        # by how many tokens a query and a key are at least
        apart = int(self.spec.strict or self.ssd.apart)
        if self.spec.reverse:
            tk.left_fill(p, apart, 0.0, diagonal=True)
        else:
            tk.right_fill(p, 1 - apart, 0.0, diagonal=True)
        tk.store(tile, p)

    @cute.jit
    def keep_state(self, g, s, t, wg):
        spec = self.spec
        c = State(tk.rt_fl(spec.head_dim), tk.rt(spec.head_dim, self.dtype), tk.rt(CHUNK, self.dtype),
                  tk.rt(CHUNK, self.dtype), tk.rt_fl(CHUNK), tk.rt(CHUNK, self.dtype), tk.rt_fl(CHUNK),
                  *[tk.cv(CHUNK) for _ in range(4)])
        ring, scores = s.tokens.ring(), s.scores.ring()
        row0 = (t.part + wg) * CHUNK
        self.first_state(g, t, c.s, row0)
        skip = self.ssd.begin(g, t, row0)
        for i in cutlass.range(t.chunks, unroll=1):
            s.tokens.wait(ring)
            tk.copy(c.s16, c.s)
            self.delta.of_state(c, s.k[ring.stage])
            if const_expr(not spec.updates):
                tk.mm_ABt(c.o, c.s16, s.q[ring.stage])
            self.read_values(s, c, wg, ring.stage)
            s.scores.wait(scores)
            tk.mma_wait(0)
            if const_expr(spec.dot):
                tk.apply_narrow(c.s16, lambda wide, rounded: wide - rounded, c.s, c.s16)
                tk.mma_ABt(c.o, c.s16, s.q[ring.stage])
                tk.mma_wait(0)
            self.delta.updates(c, s.delta, scores.stage)
            self.gate.decay(c, s.gate, scores.stage)
            if const_expr(not spec.updates):
                self.gate.at_query(c, s.gate, scores.stage, g.scale)
            self.add_own(s, c, scores.stage)
            self.delta.gradients_of_updates(c, s.delta, scores.stage)
            tk.mma_AB(c.s, self.gate.values(c), s.k[ring.stage])
            self.delta.erase(c, s.q[ring.stage])
            tk.mma_wait(1)
            if const_expr(spec.has_x):
                self.of_group(s.x, wg, lambda x: tk.load_T(c.x, x[ring.stage]))
            if const_expr(spec.dot):
                put_dots(g, s.dots, t, c, self.order(t, i), (wg, OUT_BARRIER + wg))
            self.ssd.write_diagonal(g, t, s.diagonal, (wg, self.order(t, i)), scores.stage)
            self.ssd.finish(c, s, skip, scores.stage, lambda: self.read_values(s, c, wg, ring.stage))
            self.put(g.o, s, t, self.ssd.result(c, self.delta.result(c)), self.order(t, i), wg)
            if const_expr(self.delta.back):
                tk.mul_col(c.w, c.w, c.beta)
                self.put(g.dv, s, t, c.w, self.order(t, i), wg)
            tk.mma_wait(0)
            self.add_rest(s, c, wg, (ring.stage, scores.stage))
            s.tokens.release(ring)
            s.scores.release(scores)
            ring.advance()
            scores.advance()
        if const_expr(spec.final is not None):
            tk.store_elements(self.sequences.state(g.final, t), c.s, row0, 0)
        self.ssd.put_skip(g, t, skip, row0)
        tk.store_wait(read=False)

    def add_own(self, s, c, stage):
        """What a chunk's tokens give each other."""
        if self.spec.scored:
            tk.mma_ABt(c.o, c.v, s.p[stage])
        if self.spec.dot:
            tk.mma_ABt(c.o, c.v, s.rest[stage])

    def add_rest(self, s, c, wg, stages):
        """What rounding took from the values that the state took up. They are read anew: registers had o, x and s."""
        if self.spec.dot:
            self.read_values(s, c, wg, stages[0])
            self.gate.rest_of_values(c, s.gate, stages[1])
            tk.mma_AB(c.s, c.u, s.k[stages[0]])
            tk.mma_wait(0)

    def read_values(self, s, c, wg, stage):
        """A chunk's, transposed."""
        self.of_group(s.v, wg, lambda v: tk.load_T(c.v, v[stage]))

    @cute.jit
    def of_group(self, tiles: Constexpr, wg, f: Constexpr):
        """f of the tile that belongs to this warpgroup."""
        for i in cutlass.range_constexpr(len(tiles)):
            if wg == i:
                f(tiles[i])

    @cute.jit
    def first_state(self, g, t, state: tk.RegTile, row0):
        if const_expr(self.spec.initial is None):
            tk.zero(state)
        else:
            tk.load_from(state, self.sequences.state(g.initial, t), row0, 0)

    @cute.jit
    def put(self, to, s, t, x, chunk, wg):
        """A chunk's outputs through shared memory: those before have left it."""
        tile, leader = s.o[wg], tk.warp_id() % 4 == 0
        if leader:
            tk.store_wait()
        tk.sync(OUT_BARRIER + wg, tk.WARPGROUP)
        tk.store_T(tile, x)
        tk.publish()
        tk.sync(OUT_BARRIER + wg, tk.WARPGROUP)
        if leader:
            tk.store_async(to, tile, (t.batch, t.head, chunk, t.part + wg))


def _any_strides(dtype, shape):
    """None without a dtype."""
    strides = tuple(fake.sym64() for _ in shape)
    return dtype and fake.tensor(dtype, shape, strides, align=4 if dtype == "fp32" else 2)


def _numbers(dtype):
    """Of sequences; None without a dtype."""
    return dtype and fake.tensor(dtype, (fake.sym(),), align=8 if dtype == "int64" else 4)
