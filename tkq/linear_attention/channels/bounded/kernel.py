"""Kimi's delta rule (KDA: Kimi Linear, 2025) as its layer calls it, without gradients: q and k of any length, gates as
a projection gives them, decays with a lower bound that `Whole` holds for in each block of 16 tokens."""
import itertools
from dataclasses import dataclass
from typing import Any, NamedTuple, Optional

import cuda.bindings.driver as cuda
import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32

import tkq.tile as tk
from tkq.linear_attention.blocks.units import BLOCKS, KEYS, QUERIES, Units
from tkq.linear_attention.channels.bounded.blocks import Blocks
from tkq.linear_attention.channels.bounded.config import COLUMNS, TEAMS, BoundedConfig
from tkq.linear_attention.channels.bounded.state import BoundedState
from tkq.linear_attention.channels.bounded.walk import Walks
from tkq.linear_attention.channels.parts import Task
from tkq.linear_attention.channels.spec import ChannelSpec
from tkq.linear_attention.channels.units import UnitShared
from tkq.linear_attention.channels.whole import STEPS, WholeShared
from tkq.linear_attention.config import CHUNK
from tkq.linear_attention.engine.delta import DeltaShared
from tkq.linear_attention.engine.fields import Globals
from tkq.linear_attention.engine.packed import Sequences, any_strides, numbers
from tkq.runtime.compile import fake
from tkq.tile.dtypes import element_type

TEAM_BARRIER = 4  # named barriers: of the scores' warpgroups, one each, behind those of the state's


class Operands(NamedTuple):
    """q, k: (B, S, H, K). v: (B, S, Hv, V). o: (B, S, HO, V), HO a multiple of H and Hv. x: (B, S, HO, K), as q: what
    gates are made of. beta: (B, S, HO). A_log: (HO,), bias: (HO * K,), fp32. initial, final: (B, HO, K, V) or None.
    cu: None, or (N + 1,), where N packed sequences begin and end: then B is 1, and states are N.
    reach: None, or (B, N - 1, HO) int32, of N segments of each sequence (see `walk.Walks`)."""

    q: cute.Tensor
    k: cute.Tensor
    v: cute.Tensor
    o: cute.Tensor
    x: cute.Tensor
    beta: cute.Tensor
    A_log: cute.Tensor
    bias: cute.Tensor
    initial: Optional[cute.Tensor]
    final: Optional[cute.Tensor]
    cu: Optional[cute.Tensor]
    reach: Optional[cute.Tensor]


class OfGates(NamedTuple):
    """Of `Globals`: what gates are made of x with."""

    A_log: cute.Tensor
    bias: cute.Tensor
    bound: Float32


@dataclass(frozen=True)
class Shared:
    k: tk.SharedTile
    units: tk.SharedTile  # what gates are made of, then keys with what decays from a block's middle; queries
    v: tk.SharedTile  # of each stage those of the state's warpgroups
    o: tk.SharedTile
    p: tk.SharedTile
    whole: WholeShared
    firsts: cute.Tensor  # of each team, for each block and column: what its first half decays by
    delta: DeltaShared
    lengths: UnitShared
    tokens: tk.Pipe
    scores: tk.Pipe


class BoundedAttention:
    """As `ChannelAttention` with the delta rule and `unit`, of gates

        g = bound * sigmoid(exp(A_log) * (x + bias))

    that are never so low that a block of 16 tokens needs more than one product: every chunk goes block by block, and no
    other way is in the kernel. A warp of the scores has a block: rows with their factors, P, L and its inverse are its
    alone, so that its warpgroup meets once a chunk, for what the state decays by between blocks. Two such warpgroups
    (teams) take chunks in turns; each has a stage, and loads what it is going to need itself.

      team 0 (a warpgroup)     Q K V X of chunk 0: decays, rows, P, inverse | of chunk 2 | ..
      team 1 (a warpgroup)     of chunk 1 | of chunk 3 | ..
      state (2 warpgroups)     of each block S' K' and S' Q', U, O' += U' P', S' += U' K | O to global memory | ..

      pipe      stages   full (arrivals)           empty (arrivals)
      tokens    2        bytes, by a team (1)      warps of the state (8)
      scores    2        warps of a team (4)       warps of the state (8)
    """

    def __init__(self, spec: ChannelSpec, config: BoundedConfig):
        self.spec, self.config, self.sequences = spec, config, Sequences(spec)
        self.dtype = element_type(spec.dtype)
        self.qk_tile, self.v_tile = tk.st(CHUNK, COLUMNS, self.dtype), tk.st(CHUNK, CHUNK, self.dtype)
        self.units = Units(COLUMNS, self.dtype)
        self.blocks = Blocks(spec, self.units, TEAM_BARRIER)
        self.walks = Walks(spec)
        self.state = BoundedState(spec, (self.sequences, self.units, self.walks), config.piece)

    # ---- host ----------------------------------------------------------------------------------

    def fake_arguments(self):
        """Compiled for any B, S and heads, and strides of q, k, v, x and o that are multiples of 16 bytes."""
        spec, (B, S, H, HV, HO) = self.spec, (fake.sym() for _ in range(5))
        K, V = spec.head_dim, spec.value_dim
        states = fake.sym() if spec.packed else B, HO, K, V

        def operand(heads, cols):
            return fake.tensor(spec.dtype, (B, S, heads, cols), (*(fake.sym64(divisibility=8) for _ in range(3)), 1))

        operands = Operands(operand(H, K), operand(H, K), operand(HV, V), operand(HO, V), operand(HO, K),
                            any_strides(spec.delta, (B, S, HO)), fake.tensor("fp32", (HO,), align=4),
                            fake.tensor("fp32", (fake.sym(divisibility=COLUMNS),)), any_strides(spec.initial, states),
                            any_strides(spec.final, states), numbers(spec.packed),
                            fake.tensor("int32", (B, fake.sym(), HO), align=4) if spec.reach else None)
        return operands.q, tuple(operands[1:]), Float32(1.0), Float32(0.0)

    @cute.jit
    def __call__(self, q: cute.Tensor, others: Any, scale: Float32, bound: Float32, stream: cuda.CUstream):
        """others: those of `Operands` behind q."""
        of = Operands(q, *others)
        at, n = self.sequences, self.config.groups
        q, k, v, o, x = [at.rows(x) for x in of[:5]]
        g = Globals(
            q=at.loads(q, self.units.type), k=at.loads(k, self.qk_tile), v=at.loads(v, self.v_tile),
            o=at.stores(o, self.v_tile), x=at.loads(x, self.units.type), beta=of.beta, initial=of.initial,
            final=of.final, scale=scale, tokens=Int32(q.shape[0]), heads_per_k=o.shape[2] // k.shape[2],
            heads_per_v=o.shape[2] // v.shape[2], cu=of.cu, reach=of.reach,
            own=OfGates(of.A_log, of.bias, bound))
        blocks = self.walks.blocks(at.blocks(of.q, of.cu), of.reach)
        self.kernel(g).launch(grid=[-(-self.spec.value_dim // (CHUNK * n)), o.shape[2], blocks],
                              block=[tk.WARPGROUP * (TEAMS + n), 1, 1], stream=stream, min_blocks_per_mp=1)

    # ---- device --------------------------------------------------------------------------------

    @cute.kernel
    def kernel(self, g: Globals):
        al, n = tk.SharedAllocator(), self.config.groups
        k, units = al.tile(self.qk_tile, TEAMS), self.units.ring(al, TEAMS)
        v, o, p, inverse = (al.tile(self.v_tile, count) for count in (n * TEAMS, n, TEAMS, TEAMS))
        s = Shared(k, units, v, o, p, WholeShared(None, al.vector(STEPS * COLUMNS, TEAMS)),
                   al.vector((STEPS - 1) * COLUMNS, TEAMS),
                   DeltaShared(inverse, self.blocks.inverse.room(al, TEAMS),
                               *(al.vector(CHUNK, TEAMS) for _ in range(2))),
                   UnitShared(al.vector(CHUNK, TEAMS), None),
                   al.pipe(TEAMS, self.qk_tile.bytes + self.units.bytes + n * self.v_tile.bytes, 4 * n),
                   al.pipe(TEAMS, 0, 4 * n, producers=4))
        tk.init_block(lambda: [x.init() for x in (s.tokens, s.scores)])
        part, head, block = cute.arch.block_idx()
        block, segment = self.walks.sequence(g, block)
        g, batch, state, tokens = self.sequences.of_block(g, block)
        t = Task(batch, head, head // g.heads_per_k, head // g.heads_per_v, part * n, state, tokens)
        some, many = self.config.registers
        tk.assign((tk.Role(lambda team: self.make_scores(g, s, t, (segment, team)), some, TEAMS),
                   tk.Role(lambda wg: self.state.keep(g, s, t, (segment, wg)), many, n)))

    @cute.jit
    def make_scores(self, g, s, t, of):
        """By a team: what the state needs of every other chunk. of: the segment, the team."""
        segment, team = of
        walk = self.walks.of_block(g, t, segment)
        ring = tk.ring(TEAMS, team)  # of tokens and of what is made of them
        if tk.warp_id() % 4 == 0:
            tk.prefetch(g.q, g.k, g.v, g.x)
        mine = self.blocks.begin(g, t)
        self.blocks.ask(g, t, walk.first + team, mine)
        for chunk in cutlass.range(walk.first + team, walk.end, TEAMS, unroll=1):
            if tk.warp_id() % 4 == 0:
                self.load(g, s, t, chunk, ring)
            s.tokens.wait(ring)
            s.scores.acquire_empty(ring)
            self.blocks.make(g, s, t, (chunk, team), mine)
            s.scores.commit(ring)
            for _ in cutlass.range_constexpr(TEAMS):
                ring.advance()

    @cute.jit
    def load(self, g, s, t, chunk, ring):
        """A chunk's tokens are on their way, by a warp."""
        sem = s.tokens.acquire(ring)
        for tile, x, at in self.tokens_of(g, s, t, chunk, ring.stage):
            tk.load_async(tile, x, at, sem)

    def tokens_of(self, g, s, t, chunk, stage):
        """(a shared tile, the tensor, coordinates) of all that is loaded of a chunk."""
        found = [(s.k[stage], g.k, (t.batch, t.head_k, chunk, 0))]
        for block, panel in itertools.product(range(BLOCKS), range(self.units.panels)):
            for which, x, head in ((KEYS, g.x, t.head), (QUERIES, g.q, t.head_k)):
                found.append((s.units[self.units.at(stage, block, panel, which)], x,
                              (t.batch, head, BLOCKS * chunk + block, panel)))
        return found + [(s.v[stage * self.config.groups + wg], g.v, (t.batch, t.head_v, chunk, t.part + wg))
                        for wg in range(self.config.groups)]
