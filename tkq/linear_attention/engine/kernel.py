"""Linear attention, chunk by chunk (Katharopoulos et al., 2020; the chunked form of Sun et al., 2023, and Yang et al.,
2023), with the state in accumulators."""
from functools import partial
from typing import Any

import cuda.bindings.driver as cuda
import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32, const_expr

import tkq.tile as tk
from tkq.linear_attention.config import CHUNK, LinearConfig
from tkq.linear_attention.engine.both_ways import BothWays
from tkq.linear_attention.engine.checkpoints import Checkpoints
from tkq.linear_attention.engine.delta import Delta
from tkq.linear_attention.engine.dots import add_dots, write_dots
from tkq.linear_attention.engine.factors import FactorWarps
from tkq.linear_attention.engine.fields import Globals, Shared, State, Task
from tkq.linear_attention.engine.gates import Gate
from tkq.linear_attention.engine.heads import Heads
from tkq.linear_attention.engine.neighbours import Neighbours
from tkq.linear_attention.engine.operands import Operands
from tkq.linear_attention.engine.packed import Sequences, any_strides, numbers
from tkq.linear_attention.engine.ping_pong import ScorePingPong
from tkq.linear_attention.engine.products import StateProducts
from tkq.linear_attention.engine.scores import Scores
from tkq.linear_attention.engine.second import Second
from tkq.linear_attention.engine.segmented import Segmented, visited
from tkq.linear_attention.engine.ssd import Ssd
from tkq.linear_attention.outputs import put, put_double_buffered
from tkq.linear_attention.plan import factors_alone
from tkq.linear_attention.spec import LinearSpec
from tkq.runtime.compile import fake
from tkq.tile.dtypes import element_type

SCORES_BARRIER, OUT_BARRIER = 1, 2  # named barriers: of the scores' first warpgroup, of the state's (one each)


class LinearAttention:
    """o[t] = scale * S[t]' q[t], S[t] = exp(g[t]) S[t-1] + k[t] v[t]', for chunks of 64 tokens:

        O = scale * (e^G Q S + P V),  P[i, j] = e^(G[i] - G[j]) q[i] k[j] for j <= i,  G the running sum of g
        S = e^G[63] S + (e^(G[63] - G) K)' V

    Reversed, a token sees those from itself to the last, P[i, j] = e^(G[j] - G[i]) q[i] k[j] for j >= i, and

        O = scale * (e^(G[63] - G) Q S + P V),  S = e^G[63] S + (e^G K)' V,  S of the chunks behind

    A block has one head of one sequence, or two (see `heads.Heads`), and 64 columns of V for each of its warpgroups of
    the state, which keep S' (V by K, fp32) in their accumulators from the first chunk to the last: rounded to 16 bits
    it is the A operand of S' Q', and values transposed are that of V' P' and V' K.

      producer (a warp)        Q K V of a chunk | of the next | ..
      factors (a warp a head)  two heads: an empty stage of scores, what gates make of a chunk; meet at SCORES_BARRIER
      scores (1 or 2)          Q K', (one head: factors,) mask: P | P of the next chunk | ..   (2: ping-pong by chunks)
                               factors alone: each warp those of every 4th chunk; two heads: of every 2nd, of its head
      state (1 or 2)           O' = S' Q', O' += V' P', S' += V' K | O to global memory | ..

    With sums of o times another tensor ("dot"), of whose differences gates' gradients are made, 16 bits are too few:
    what rounding takes from P (see `both_ways`), S' or values that decay goes through the tensor cores as a second one.

      pipe    stages               full (arrivals)                 empty (arrivals)
      tokens  config.stages        producer's bytes (1)            warps of the chunk's scores and of the state (4 + 4
                                                                   groups); factors alone: of the state (4 groups)
      scores  config.score_stages  warps that make them (4);       warps of the state (4 groups)
                                   factors alone: one a head

    "Factors alone" (`plan.factors_alone`): states of segments, with gates, without the delta rule.
    """

    def __init__(self, spec: LinearSpec, config: LinearConfig):
        self.spec, self.config, self.ssd = spec, config, Ssd(spec)
        self.factors_alone, self.ping_pong = factors_alone(spec), ScorePingPong(config)
        self.heads = Heads(config.heads, config.score_stages, self.factors_alone)
        self.gate = Gate(spec, self.ssd, self.heads, self.heads.every if self.factors_alone else self.ping_pong.count)
        self.factors, self.dtype = FactorWarps(self.gate, SCORES_BARRIER, self.ping_pong), element_type(spec.dtype)
        self.qk_tile = tk.st(CHUNK, spec.head_dim, self.dtype)
        self.v_tile = self.p_tile = tk.st(CHUNK, CHUNK, self.dtype)
        self.delta = Delta(spec, self.p_tile, SCORES_BARRIER, room=True, inverse=spec.inverse)
        self.scores = Scores(spec, self.delta, spec.strict or self.ssd.apart)
        self.sequences, self.segmented = Sequences(spec), Segmented(spec)
        self.second = Second(spec, self.gate)
        self.products = StateProducts(spec, self.delta, self.second, OUT_BARRIER)
        # with room for a third chunk, keys' products begin before the inverse of the chunk before is made
        self.keys_before_inverse = bool(spec.delta) and not spec.scored and config.stages > 2
        self.two = bool(spec.updates or self.second.query)  # are there outputs beside o?
        self.checkpoints = Checkpoints(spec, self.products)
        self.neighbours = Neighbours(spec, self.v_tile, OUT_BARRIER)
        self.both_ways = BothWays(config.groups, self.neighbours, OUT_BARRIER)

    # ---- host ----------------------------------------------------------------------------------

    def fake_arguments(self):
        """Compiled for any B, S and heads, and strides of q, k, v, o and x that are multiples of 16 bytes."""
        spec, (B, S, H, HV, HO) = self.spec, (fake.sym() for _ in range(5))
        out = fake.sym() if spec.summed else HO
        K, V = spec.head_dim, spec.value_dim

        def operand(heads, cols):
            return fake.tensor(spec.dtype, (B, S, heads, cols), (*(fake.sym64(divisibility=8) for _ in range(3)), 1))

        def of_tokens(dtype):
            return any_strides(dtype, (B, S, HO))

        g = {"none": None, "head": fake.tensor("fp32", (HO,), align=4), "token": of_tokens("fp32")}[spec.gate]
        g = None if spec.ssd else g
        dots = fake.tensor("fp32", (-(-V // CHUNK), B, S, HO), align=4) if spec.dots else None
        rows = fake.sym() if spec.packed or spec.pool or spec.part else B
        states, last = [(rows, HO, *((x, K) if spec.state_v_first else (K, x))) for x in (V, self.segmented.columns)]
        operands = Operands(operand(H, K), operand(H, K), operand(HV, V), operand(out, V) if spec.writes else None, g,
                            of_tokens(spec.delta or spec.kept), any_strides(spec.initial, states),
                            any_strides(spec.final, last), operand(fake.sym(), V) if spec.has_x else None, dots,
                            operand(out, V) if spec.writes and self.two else None, numbers(spec.packed),
                            numbers(spec.pool), *self.checkpoints.fake_operands(B, HO),
                            self.segmented.fake_decays(rows, HO), operand(H, K) if self.second.query else None,
                            *((operand(H, K), operand(HV, V)) if self.second.pair else (None, None)),
                            operand(HO, CHUNK) if spec.inverse else None, operand(out, V) if spec.less else None,
                            self.segmented.fake_reach(rows, HO))
        return operands.q, tuple(operands[1:]), Float32(1.0), self.ssd.fake_operands(B, S, HO, rows)

    @cute.jit
    def __call__(self, q: cute.Tensor, others: Any, scale: Float32, ssd: Any, stream: cuda.CUstream):
        """others: those of `Operands` behind q."""
        operands = Operands(q, *others)
        c, at = self.config, self.sequences
        q, k, v = [at.rows(x) for x in operands[:3]]
        o, dv, x, x_heads, heads = None, None, None, Int32(1), self.segmented.heads(operands)
        inverse, kept, less = None, None, None
        if const_expr(self.delta.known):
            inverse = at.loads(at.rows(operands.inverse), self.p_tile)
        if const_expr(self.delta.kept):
            kept = at.stores(at.rows(operands.inverse), self.p_tile)
        if const_expr(self.spec.writes):
            o = at.stores(at.rows(operands.o), self.v_tile)
            if const_expr(self.two):
                dv = at.stores(at.rows(operands.dv), self.v_tile)
        if const_expr(self.spec.less):
            less = at.loads(at.rows(operands.less), self.v_tile)
        if const_expr(self.spec.has_x):
            x = at.rows(operands.x)
            x, x_heads = at.loads(x, self.v_tile), heads // x.shape[2]
        states = [x if x is None or not self.spec.state_v_first else cute.make_tensor(
            x.iterator, cute.select(x.layout, [0, 1, 3, 2])) for x in operands[6:8]]
        q2, k2, v2 = (x if x is None else at.loads(at.rows(x), tile) for x, tile in (
            (operands.q2, self.qk_tile), (operands.k2, self.qk_tile), (operands.v2, self.v_tile)))
        g = Globals(
            q=at.loads(q, self.qk_tile), k=at.loads(k, self.qk_tile), v=at.loads(v, self.v_tile), o=o, dv=dv, x=x,
            g=operands.g, beta=operands.beta, initial=states[0], final=states[1], dots=operands.dots, scale=scale,
            tokens=Int32(q.shape[0]), heads_per_k=heads // k.shape[2], heads_per_v=heads // v.shape[2],
            heads_per_x=x_heads, ssd=ssd, cu=operands.cu, state_indices=operands.state_indices,
            checkpoints=operands.checkpoints, every=operands.every, decays=operands.decays, q2=q2, k2=k2, v2=v2,
            inverse=inverse, kept=kept, segments=self.segmented.count(operands), less=less, reach=operands.reach)
        parts, blocks = -(-self.segmented.columns // (CHUNK * c.groups // c.heads)), at.blocks(operands.q, operands.cu)
        self.kernel(g).launch(grid=[parts, self.heads.blocks(heads), self.segmented.blocks(operands, blocks)],
                              block=[tk.WARPGROUP * (1 + c.scores + c.groups), 1, 1], stream=stream,
                              cluster=self.neighbours.launched(), min_blocks_per_mp=1)

    # ---- device --------------------------------------------------------------------------------

    @cute.kernel
    def kernel(self, g: Globals):
        c, al = self.config, tk.SharedAllocator()
        n, x, warps = c.groups, int(self.spec.has_x), 0 if self.factors_alone else 4  # that read a chunk for its scores
        s = Shared(None if self.factors_alone else al.tile(self.qk_tile, c.stages), al.tile(self.qk_tile, c.stages),
                   al.tile(self.v_tile, c.stages * n), al.tile(self.v_tile, c.stages * n) if x else None,
                   al.vector(CHUNK, 4 * n) if self.spec.dots else None,
                   None if self.factors_alone else al.tile(self.v_tile, n * c.outputs),
                   al.tile(self.p_tile, self.heads.places) if self.spec.scored else None,
                   al.tile(self.p_tile, 2) if self.spec.exact_scores else None,
                   self.gate.shared(al), self.delta.shared(al, c.stages), self.ssd.shared(al),
                   self.second.shared(al, (self.qk_tile, self.v_tile, self.p_tile), c), self.neighbours.shared(al, n),
                   al.pipe(c.stages, (1 + self.spec.queried + self.second.there) * self.qk_tile.bytes
                           + (n * (1 + x + self.second.pair) + self.delta.known) * self.v_tile.bytes, warps + 4 * n),
                   al.pipe(c.score_stages, 0, 4 * n, producers=warps or c.heads))
        tk.init_block(lambda: self.initialise(s), self.neighbours.cluster)
        part, head, block = cute.arch.block_idx()
        head, make_scores = self.heads.first(head), self.factors.make if self.factors_alone else self.make_scores
        g, batch, state, tokens = self.sequences.of_block(g, self.segmented.row_of(block))
        batch, first, chunks = self.segmented.of_block(g, batch, head, cute.ceil_div(tokens, CHUNK))
        t = Task(batch, state, head, head // g.heads_per_k, head // g.heads_per_v, part * n, chunks, first)
        (few, some, many), factors = c.registers, self.factors
        tk.assign((tk.Role(lambda _: factors.beside(self.produce, g, s, t), few, warps=1 + factors.count),
                   tk.Role(lambda wg: make_scores(g, s, t, wg), some, c.scores),
                   tk.Role(lambda wg: self.keep_state(g, s, t, wg), many, n)))
        self.neighbours.end()

    def initialise(self, s):
        """Counts of the pipes."""
        s.tokens.init()
        s.scores.init()
        self.neighbours.initialise(s.neighbours, self.config.groups)

    def order(self, t, i):
        """The i-th chunk that is visited."""
        return visited(t, i, self.spec.reverse)

    @cute.jit
    def produce(self, g, s, t):
        ring = s.tokens.ring()
        tk.prefetch(g.q, g.k, g.v, *(x for x in (g.o,) if x is not None))
        for i in cutlass.range(t.chunks, unroll=1):
            sem = s.tokens.acquire(ring)
            for load in self.tokens_of(g, s, t, ring.stage, self.order(t, i)):
                tk.load_async(*load, sem)
            ring.advance()

    def tokens_of(self, g, s, t, stage, chunk):
        """(a shared tile, the tensor, coordinates) of all that is loaded of a chunk."""
        found = [(s.k[stage], g.k, (t.batch, t.head_k, chunk, 0))]
        if self.spec.queried:
            found.append((s.q[stage], g.q, (t.batch, t.head_k, chunk, 0)))
        for wg in range(self.config.groups):
            of, tile = self.heads.of_warpgroup(g, t, wg), self.tile(stage, wg)
            at = t.batch, of.head_v, self.segmented.chunk_of_values(g, chunk), of.part + wg
            found.append((s.v[tile], g.v, at))
            if self.spec.has_x:
                found.append((s.x[tile], g.x, (t.batch, of.head // g.heads_per_x, chunk, of.part + wg)))
            found += self.second.values_of(g, s, t, (tile, chunk, wg))
        found += self.second.tokens_of(g, s, t, (stage, chunk))
        return found + self.delta.tokens_of(g, s.delta, t, (stage, chunk))

    @cute.jit
    def make_scores(self, g, s, t, wg):
        """P of each chunk, and beside it, of one head, what decays."""
        ring, out = s.tokens.ring(), s.scores.ring()
        x, p, keys = tk.rt_fl(CHUNK), tk.rt(CHUNK, self.dtype), s.q if self.spec.reverse else s.k
        first, every = self.ping_pong.begin(wg, ring, out), self.ping_pong.count
        gates, mine = self.gate.begin(g, t, self.order(t, first)), self.delta.begin(g, t, self.order(t, first))
        self.scores.begin(s, t, first, ring, x, self.keys_before_inverse)
        for i in cutlass.range(first, t.chunks, every, unroll=1):
            self.scores.begin(s, t, i, ring, x, not self.keys_before_inverse)
            s.scores.acquire_empty(out)
            self.gate.factors(g, t, self.order(t, i), (s.gate, self.heads.place_of_warp(out)), gates)
            self.delta.factors(g, s.delta, mine, self.gate.sums_of(s.gate), out.stage)
            if const_expr(not self.spec.delta):
                self.gate.ask(g, t, self.order(t, i + every), gates)
            self.factors.meet(wg)
            for head in cutlass.range_constexpr(self.heads.count):
                between = self.gate.between(s.gate, gates, self.heads.place(out, head))
                tk.mma_wait(0)
                if const_expr(self.spec.scored):
                    self.ssd.put_diagonal(s.diagonal, x, between, g.scale, self.heads.place(out, head))
                    self.scores.weigh(self.gate, p, x, between, g.scale)
                    self.delta.products(x, keys[ring.stage])
                    self.scores.put(s.p[self.heads.place(out, head)], p)
            if const_expr(self.spec.exact_scores):
                self.gate.weigh_rest(p, x)
                self.scores.put(s.rest[out.stage], p)
            if const_expr(self.spec.scored):
                self.second.put(s, x, p, gates, (ring.stage, out.stage), self.scores.put)
            tk.mma_wait(0)
            s.tokens.release(ring)
            self.ping_pong.advance(ring)
            self.delta.put(s.delta, x, mine, between, out.stage)
            if const_expr(self.spec.delta):  # registers are free again, and the inverse takes as long as memory does
                self.gate.ask(g, t, self.order(t, i + every), gates)
                self.delta.ask(g, t, self.order(t, i + every), mine)
            self.scores.begin(s, t, i + every, ring, x, self.keys_before_inverse)
            self.delta.invert(s.delta, tk.rt_fl(CHUNK), mine, out.stage)
            tk.publish()
            s.scores.commit(out)
            self.ping_pong.advance(out)
        tk.mma_wait(0)

    @cute.jit
    def keep_state(self, g, s, t, wg):
        spec, t = self.spec, self.heads.of_warpgroup(g, t, wg)
        c = State(tk.rt_fl(spec.head_dim), tk.rt(spec.head_dim, self.dtype), tk.rt(CHUNK, self.dtype),
                  *[tk.rt(CHUNK, self.dtype) for _ in range(2)], tk.rt_fl(CHUNK), tk.rt(CHUNK, self.dtype),
                  tk.rt_fl(CHUNK), *[tk.cv(CHUNK) for _ in range(4)])
        ring, scores, row0 = s.tokens.ring(), s.scores.ring(), (t.part + wg) * CHUNK
        self.first_state(g, t, c.s, row0)
        skip, decay = self.ssd.begin(g, t, row0), self.segmented.begin()
        second, written = self.second.begin(), self.neighbours.ring()
        for i in cutlass.range(t.chunks, unroll=1):
            s.tokens.wait(ring)
            self.products.begin(c, s, ring.stage)
            self.neighbours.ask(g, s, t, self.order(t, i), wg)
            if const_expr(not self.second.there):
                self.read_values(s, c, wg, ring.stage)
            s.scores.wait(scores)
            tk.mma_wait(0)
            self.delta.keep(g, s.delta, t, (self.order(t, i), scores.stage, wg))
            self.products.rest(c, s, ring.stage)
            solved = scores.stage, self.delta.of_inverse(ring.stage, scores.stage)
            self.delta.updates(c, s.delta, solved, partial(self.put, g.dv, s, t, c.w, self.order(t, i), wg))
            if const_expr(self.second.there):  # before, registers had the state, in two parts
                self.read_values(s, c, wg, ring.stage)
                self.add_outputs(g, s, c, wg, (ring.stage, scores))
            self.take_up(g, s, c, second, (wg, ring.stage, scores))
            self.products.behind_updates(c, s, ring.stage)
            self.gate.decay(c, s.gate, self.heads.place(scores, wg))
            self.segmented.decay(decay, s.gate, self.heads.place(scores, wg))
            if const_expr(not self.second.there):
                self.add_outputs(g, s, c, wg, (ring.stage, scores))
            for values in self.gate.values(c):
                tk.mma_AB(c.s, values, s.k[ring.stage])
            self.delta.gradients_of_updates(c, s.delta, solved)
            self.delta.erase(c, s.delta, s.q[ring.stage] if self.delta.back else None, scores.stage)
            self.second.update(c, s, second, ring.stage)
            tk.mma_wait((1 + self.second.pair) * (1 + self.gate.in_two))
            if const_expr(spec.writes):
                write = self.both_ways.write if spec.both_ways else self.write
                write(g, s, t, c, (wg, self.order(t, i), ring.stage, self.heads.place(scores, wg), skip, written))
            tk.mma_wait(0)
            self.add_rest(s, c, wg, (ring.stage, scores.stage))
            self.delta.kept_by(wg)
            s.tokens.release(ring)
            s.scores.release(scores)
            self.checkpoints.put(g, t, c.s, i, row0)
            ring.advance()
            scores.advance()
        if const_expr(spec.final is not None):
            if self.segmented.stores(g, t):
                self.products.store(self.sequences.state(g.final, t), c.s, row0)
        self.ssd.put_skip(g, t, skip, row0)
        self.segmented.put_decay(g, t, decay, wg)
        tk.store_wait(read=False)

    def take_up(self, g, s, c, second, at):
        """The values as the state takes them up. at: the warpgroup, the stage of tokens, the ring of scores."""
        wg, stage, scores = at
        self.gate.take_up(c, s.gate, self.heads.place(scores, wg))
        self.second.take_up(g, c, s, second, (self.tile(stage, wg), scores.stage))

    def add_outputs(self, g, s, c, wg, at):
        """What the state gave as queries see it, and what a chunk's tokens give each other, which is under way. at: the
        stage of tokens, the ring of scores."""
        stage, scores = at
        if const_expr(self.spec.queried):
            self.gate.at_query(c, s.gate, self.heads.place(scores, wg), g.scale)
        self.second.at_query(c, s.gate, scores.stage)
        self.add_own(s, c, (self.tile(stage, wg), self.heads.place(scores, wg)))

    def write(self, g, s, t, c, at):
        """What comes out of a chunk. at: (the warpgroup, the chunk, stages of tokens and scores, what D has,
        the ring of outputs)."""
        wg, chunk, stage, of_scores, skip, written = at
        if not self.ssd.finishes:  # on their way while sums are made; others are complete behind the sums
            self.neighbours.give(s, t, c.o, (wg, written))
        o, x = self.delta.of_sums(c)
        if self.spec.has_x:
            tk.load_T(x, s.x[self.tile(stage, wg)])
        self.delta.gradients_of_lacking(c, s.delta, of_scores)
        if self.spec.dots:
            self.second.read_values(c, s, self.tile(stage, wg))
            add_dots(s.dots, o, x, wg)
            write_dots(g, s.dots, t, chunk, (wg, OUT_BARRIER + wg))
        self.ssd.write_diagonal(g, t, s.diagonal, (wg, chunk), of_scores)
        self.ssd.finish(c, s, skip, of_scores, lambda: self.read_values(s, c, wg, stage))
        if self.ssd.finishes:
            self.neighbours.give(s, t, c.o, (wg, written))
        self.neighbours.put(s, t, self.ssd.result(c, self.delta.result(c)), c.x, (wg, written),
                            lambda x: self.put(g.o, s, t, x, chunk, wg), True)
        if self.second.query:
            self.neighbours.give(s, t, c.w, (wg, written))
            self.neighbours.put(s, t, c.w, c.v, (wg, written), lambda x: self.put(g.dv, s, t, x, chunk, wg), False)

    def add_own(self, s, c, stages):
        """What a chunk's tokens give each other. stages: the tile of values, the stage of scores."""
        if self.spec.scored:
            self.products.add_scores(c, s, *stages)
        if self.spec.exact_scores:
            self.products.add_rest_of_scores(c, s, *stages)
        if self.spec.scored:
            self.second.add_own(c, s, *stages)

    def add_rest(self, s, c, wg, stages):
        """What rounding took from the values that the state took up. They are read anew: registers had o, x and s."""
        if self.spec.exact and not self.gate.in_two:
            self.read_values(s, c, wg, stages[0])
            self.gate.rest_of_values(c, s.gate, stages[1])
            tk.mma_AB(c.s, c.u, s.k[stages[0]])
            tk.mma_wait(0)

    def read_values(self, s, c, wg, stage):
        """A chunk's, transposed."""
        tk.load_T(c.v, s.v[self.tile(stage, wg)])

    def tile(self, stage, wg):
        """Which of the tiles of values is a warpgroup's."""
        return stage * self.config.groups + wg

    @cute.jit
    def first_state(self, g, t, state: tk.RegTile, row0):
        if const_expr(self.spec.initial is None):
            self.segmented.first_state(g, t, state, row0)
        else:
            self.products.load(state, self.sequences.state(g.initial, t), row0)

    def put(self, to, s, t, x, chunk, wg):
        """A chunk's outputs."""
        send = put_double_buffered if self.config.outputs == 2 else put
        send(to, s.o, x, (t.batch, self.neighbours.head(t), chunk, t.part), OUT_BARRIER, wg)
