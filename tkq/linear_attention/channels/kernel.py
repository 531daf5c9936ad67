"""Linear attention with a gate for each column of k (GLA: Yang et al., 2023), and the delta rule with such gates (KDA:
Kimi Linear, 2025), chunk by chunk, with the state in accumulators."""
from dataclasses import dataclass, replace
from typing import Any

import cuda.bindings.driver as cuda
import cutlass
import cutlass.cute as cute
from cutlass import Boolean, Constexpr, Float32, Int32, const_expr

import tkq.tile as tk
from tkq.linear_attention.channels.ahead import Taken, prefetch_rows, put_beta, slots, take_beta
from tkq.linear_attention.channels.columns import Columns
from tkq.linear_attention.channels.l2norm import L2Norm
from tkq.linear_attention.channels.parts import (
    SCORES_BARRIER,
    Operands,
    Task,
    chunks,
    order,
)
from tkq.linear_attention.channels.plan import shares_levels
from tkq.linear_attention.channels.scores import ChannelScores
from tkq.linear_attention.channels.spec import ChannelSpec
from tkq.linear_attention.channels.state import ChannelState
from tkq.linear_attention.channels.whole import BLOCKS
from tkq.linear_attention.config import CHUNK, LinearConfig
from tkq.linear_attention.engine.delta import Delta, DeltaShared
from tkq.linear_attention.engine.fields import Globals
from tkq.linear_attention.engine.inverse import PITCH
from tkq.linear_attention.engine.packed import Sequences, any_strides, numbers
from tkq.runtime.compile import fake
from tkq.tile.dtypes import element_type


@dataclass(frozen=True)
class Shared:
    q: tk.SharedTile
    k: tk.SharedTile
    v: tuple  # of each warpgroup of the state
    o: tk.SharedTile
    p: tk.SharedTile
    levels: tk.SharedTile  # operands of two levels
    others: Any  # with the delta rule: of queries, for those of keys are of all rows
    started: Any  # with the delta rule: keys, with what decays from a chunk's start
    whole: Any  # of `Whole`
    products: cute.Tensor  # of decays: those of each part of it, for each column
    total: cute.Tensor  # of a chunk, for each column
    delta: Any
    l2norm: Any  # of `L2Norm`
    beta: Any  # with the delta rule: of a chunk's tokens, from the producer
    tokens: tk.Pipe
    scores: tk.Pipe


class ChannelAttention:
    """o[t] = scale * S[t]' q[t], S[t] = diag(exp(g[t])) S[t-1] + k[t] v[t]', for chunks of 64 tokens: with D the
    products of decays, for each column,

        O = scale * ((D[0..i] Q) S + P V),  P[i, j] = (D[j+1..i] q[i]) k[j] for j <= i
        S = D[0..63] S + (D[i+1..63] K)' V

    Reversed, a token sees those from itself to the last, P[i, j] = (D[i+1..j] q[i]) k[j] for j >= i, and

        O = scale * ((D[i+1..63] Q) S + P V),  S = D[0..63] S + (D[0..i] K)' V,  S of the chunks behind

    Where decays allow it, P is one product of rows with their factors, which meet the state as well (`Whole`), or such
    a one for each block of 16 tokens, block by block. Else it is a sum of products of 64 x 64, one for each level of
    `Columns` and one for the diagonal, of each of which its own part is taken; and queries and keys that meet the state
    are scaled where they lie in shared memory. A block has one head of one sequence and 64 columns
    of V for each of its warpgroups of the state, which keep S' (V by K, fp32) in their accumulators from the first
    chunk to the last.

      producer (a warp)        beta, gates to L2, Q K V of a chunk | of the next | ..
      scores (a warpgroup)     decays: P by one product, or by levels; Q and K scaled | of the next chunk | ..
      state (1 or 2)           O' = S' Q', O' += V' P', S' += V' K | O to global memory | ..

    With the delta rule (`Delta`) L is made beside P, of keys in the place of queries.

      pipe      stages           full (arrivals)            empty (arrivals)
      tokens    config.stages    producer's bytes (1)       warps of the state (4 groups), behind the scores
      scores    2                warps of the scores (4)    warps of the state (4 groups)
    """

    def __init__(self, spec: ChannelSpec, config: LinearConfig):
        self.spec, self.config, self.sequences = spec, config, Sequences(spec)
        self.dtype = element_type(spec.dtype)
        self.qk_tile = tk.st(CHUNK, spec.head_dim, self.dtype)
        self.columns = Columns(self.qk_tile)
        self.v_tile = self.p_tile = tk.st(CHUNK, CHUNK, self.dtype)
        self.delta = Delta(spec, self.p_tile, SCORES_BARRIER)
        self.scored, self.solved = not spec.updates, bool(spec.delta)
        self.crowded = self.solved and config.groups > 1  # two warpgroups of the state: neither registers nor room
        self.scores = ChannelScores(spec, self.columns, SCORES_BARRIER, self.crowded)
        self.whole, self.l2norm = self.scores.whole, L2Norm(spec, self.columns)
        self.aliased = self.solved and shares_levels(spec)
        self.state = ChannelState(spec, (self.delta, self.whole, self.l2norm), self.sequences,
                                  bool(self.delta.forward) and self.crowded)

    # ---- host ----------------------------------------------------------------------------------

    def fake_arguments(self):
        """Compiled for any B, S and heads, and strides of q, k, v, g and o that are multiples of 16 bytes."""
        spec, (B, S, H, HV, HO) = self.spec, (fake.sym() for _ in range(5))
        K, V = spec.head_dim, spec.value_dim
        states = fake.sym() if spec.packed or spec.pool else B, HO, K, V

        def operand(heads, cols, dtype=spec.dtype, unit=8):
            return fake.tensor(dtype, (B, S, heads, cols), (*(fake.sym64(divisibility=unit) for _ in range(3)), 1))

        operands = Operands(operand(H, K), operand(H, K), operand(HV, V), operand(HO, V), operand(HO, K, "fp32", 4),
                            any_strides(spec.delta, (B, S, HO)), any_strides(spec.initial, states),
                            any_strides(spec.final, states), None, None,
                            operand(HO, V) if self.delta.gives_two else None, numbers(spec.packed), numbers(spec.pool))
        return operands.q, tuple(operands[1:]), Float32(1.0)

    @cute.jit
    def __call__(self, q: cute.Tensor, others: Any, scale: Float32, stream: cuda.CUstream):
        """others: those of `Operands` behind q."""
        operands = Operands(q, *others)
        c, at = self.config, self.sequences
        q, k, v, o = [at.rows(x) for x in operands[:4]]
        dv = None
        if const_expr(self.delta.gives_two):
            dv = at.stores(at.rows(operands.dv), self.v_tile)
        g = Globals(
            q=at.loads(q, self.qk_tile), k=at.loads(k, self.qk_tile), v=at.loads(v, self.v_tile),
            o=at.stores(o, self.v_tile), dv=dv, g=operands.g, beta=operands.beta, initial=operands.initial,
            final=operands.final, scale=scale, tokens=Int32(q.shape[0]), heads_per_k=o.shape[2] // k.shape[2],
            heads_per_v=o.shape[2] // v.shape[2], cu=operands.cu, state_indices=operands.state_indices)
        parts = -(-self.spec.value_dim // (CHUNK * c.groups))
        blocks = at.blocks(operands.q, operands.cu)
        self.kernel(g).launch(grid=[parts, o.shape[2], blocks], block=[tk.WARPGROUP * (c.groups + 2), 1, 1],
                              stream=stream, min_blocks_per_mp=1)

    # ---- device --------------------------------------------------------------------------------

    @cute.kernel
    def kernel(self, g: Globals):
        c, al = self.config, tk.SharedAllocator()
        n, delta, K = c.groups, self.solved, self.spec.head_dim
        q, k = (al.tile(self.qk_tile, c.stages) for _ in range(2))
        v = tuple(al.tile(self.v_tile, c.stages) for _ in range(n))
        o, p = al.tile(self.v_tile, n), al.tile(self.p_tile, 2)
        levels = al.tile(self.qk_tile, 2)
        whole = self.whole.shared(al)
        total = self.whole.total(whole) if self.whole.there else al.vector(K, 2)
        s = Shared(q, k, v, o, p, levels, al.tile(self.qk_tile, 2) if delta and not self.scores.one_other else None,
                   al.tile(self.qk_tile, 2) if delta else None, whole,
                   al.vector(self.whole.parts * K, 1 if delta else 2), total,
                   self.shared_of_delta(al, levels), self.l2norm.shared(al),
                   al.vector(CHUNK, slots(c.stages)) if delta else None,
                   al.pipe(c.stages, 2 * self.qk_tile.bytes + n * self.v_tile.bytes, 4 * n),
                   al.pipe(2, 0, 4 * n, producers=4))
        tk.init_block(lambda: [x.init() for x in (s.tokens, s.scores)])
        part, head, block = cute.arch.block_idx()
        g, batch, state, tokens = self.sequences.of_block(g, block)
        t = Task(batch, head, head // g.heads_per_k, head // g.heads_per_v, part * n, state, tokens)
        few, some, many = c.registers
        tk.assign((tk.Role(lambda _: self.produce(g, s, t), few, warps=1),
                   tk.Role(lambda _: self.make_scores(g, s, t), some),
                   tk.Role(lambda wg: self.state.keep(g, s, t, wg), many, n)))

    def shared_of_delta(self, al, levels):
        """L takes the room of the levels' operands where that is large enough."""
        if not self.solved:
            return None
        if not self.aliased:
            return self.delta.shared(al)
        lower = cute.make_tensor(cute.recast_ptr(levels.staged.iterator, cute.make_swizzle(0, 4, 3), dtype=Float32),
                                 cute.make_layout(CHUNK * PITCH))
        return DeltaShared(al.tile(self.p_tile, 2), lower, al.vector(CHUNK, 2), al.vector(CHUNK, 2))

    @cute.jit
    def produce(self, g, s, t):
        ring = s.tokens.ring()
        tk.prefetch(g.q, g.k, g.v, g.o)
        for i in cutlass.range(chunks(self.spec, g, t), unroll=1):
            chunk = order(self.spec, g, t, i)
            if const_expr(self.solved):
                put_beta(g, s.beta, t, chunk, i)
            prefetch_rows(g.g[t.batch, None, t.head, None], g.tokens, self.spec.head_dim, order(self.spec, g, t, i + 1))
            sem = s.tokens.acquire(ring)
            tk.load_async(s.k[ring.stage], g.k, (t.batch, t.head_k, chunk, 0), sem)
            tk.load_async(s.q[ring.stage], g.q, (t.batch, t.head_k, chunk, 0), sem)
            for wg in cutlass.range_constexpr(self.config.groups):
                tk.load_async(s.v[wg][ring.stage], g.v, (t.batch, t.head_v, chunk, t.part + wg), sem)
            ring.advance()

    @cute.jit
    def make_scores(self, g, s, t):
        """P of each chunk, L's inverse, and operands that meet the state: by one product, by one that has the pairs of
        each block of 16 tokens, or by levels."""
        ring, out = s.tokens.ring(), s.scores.ring()
        mine = self.columns.begin()
        of_delta = (tk.rv(), Taken(tk.cv(8).tensor), tk.rt(CHUNK, self.dtype)) if self.solved else None
        c = self.scores.registers()
        self.read(g, t, order(self.spec, g, t, 0), mine)
        for i in cutlass.range(chunks(self.spec, g, t), unroll=1):
            following = order(self.spec, g, t, i + 1)
            s.tokens.wait(ring)
            s.scores.acquire_empty(out)
            if const_expr(self.solved):
                take_beta(s.beta, i, of_delta[1].found)
            if const_expr(self.l2norm.there):
                self.l2norm.find((s.q[ring.stage], s.k[ring.stage]), s.l2norm, out.stage, g.scale)
            else:
                self.delta.factors(g, s.delta, of_delta, None, out.stage)
            # one stage with the delta rule, whose inverse has barriers behind the last look at it
            place = s.q[ring.stage], s.k[ring.stage], s.products[None, Int32(0) if self.solved else out.stage]
            apart = Boolean(False)
            if const_expr(self.whole.there):
                found = s.whole.found[None, out.stage]
                self.whole.find(mine, place[2], found)
                tk.sync(SCORES_BARRIER, tk.WARPGROUP)
                if const_expr(self.l2norm.there):
                    self.l2norm.factors(of_delta[1].found, s.l2norm, s.delta.erase[None, out.stage],
                                       s.delta.beta[None, out.stage])
                if self.whole.holds(found):
                    self.at_once(g, s, (c, mine, place, out.stage), (t, following), False)
                else:
                    if self.whole.holds(found, BLOCKS):
                        apart = Boolean(True)
                        self.at_once(g, s, (c, mine, place, out.stage), (t, following), True)
                    else:
                        self.by_levels(g, s, c, mine, place, out.stage)
                        self.store(s, c, out.stage)
                        self.whole.put_ends(place[2], s.whole, out.stage, False)
                        self.read(g, t, following, mine)
            else:
                self.by_levels(g, s, c, mine, place, out.stage)
                self.store(s, c, out.stage)
                self.read(g, t, following, mine)
            self.delta.put(s.delta, c.lower, of_delta, None, out.stage)
            self.delta.invert(s.delta, c.lower, of_delta, out.stage, apart if self.whole.there else None)
            tk.publish()
            s.scores.commit(out)
            ring.advance()
            out.advance()

    @cute.jit
    def at_once(self, g, s, of: Constexpr, following: Constexpr, blocks: Constexpr[bool]):
        """A chunk by `Whole`: scores, and the next one's gates are on their way. of: registers, a thread's columns,
        place, stage. following: (the task, the next chunk)."""
        c, mine, place, stage = of
        if const_expr(self.l2norm.there):
            g = replace(g, scale=self.l2norm.of_queries(s.l2norm, stage))
        self.scores.put_whole(s, mine, place, stage, blocks)
        tk.publish()  # waits for loads, too: none is asked for shortly before
        tk.sync(SCORES_BARRIER, tk.WARPGROUP)
        if const_expr(not self.crowded):
            self.read(g, *following, mine)
        if const_expr(blocks):
            self.whole.join_steps(place[2], s.whole, stage)
        self.scores.multiply_whole(g, s, c, place, stage)
        self.store(s, c, stage)
        if const_expr(self.crowded):
            self.read(g, *following, mine)

    @cute.jit
    def by_levels(self, g, s, c, mine, place, stage):
        """A chunk whose decays `Whole` does not hold for."""
        if const_expr(self.l2norm.there):
            g = replace(g, scale=self.l2norm.of_queries(s.l2norm, stage))
        if const_expr(self.scores.one_other):
            s = replace(s, others=(s.started[stage], s.started[stage]))
        self.columns.decays(mine, place[2])
        self.scores.begin(c)
        tk.sync(SCORES_BARRIER, tk.WARPGROUP)
        for near in cutlass.range_constexpr(2):
            self.scores.add_levels(g, s, c, mine, place, near == 1)
        if const_expr(self.scores.one_other):
            tk.sync(SCORES_BARRIER, tk.WARPGROUP)
        self.scores.scale_in_place(s, mine, place, stage)
        if const_expr(self.solved):
            tk.sync(SCORES_BARRIER, tk.WARPGROUP)  # L goes where the levels' operands were

    def store(self, s, c, stage):
        """P, before registers are needed for the next gates."""
        if self.scored:
            tk.store(s.p[stage], c.p)

    def read(self, g, t, chunk, mine):
        """Behind the last chunk, of the first one: it is not used."""
        self.columns.read(g.g[t.batch, None, t.head, None], g.tokens, self.spec.head_dim, cutlass.max(chunk, 0), mine)
