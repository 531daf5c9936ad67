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
from tkq.linear_attention.blocks.qk_tiles import BLOCKS, KEYS, QUERIES, QkTiles
from tkq.linear_attention.channels.bounded.blocks import Blocks
from tkq.linear_attention.channels.bounded.config import COLUMNS, SCORES, BoundedConfig
from tkq.linear_attention.channels.bounded.state import BoundedState
from tkq.linear_attention.channels.l2norm import L2NormShared
from tkq.linear_attention.channels.parts import Task, chunks
from tkq.linear_attention.channels.spec import ChannelSpec
from tkq.linear_attention.channels.whole import STEPS, WholeShared
from tkq.linear_attention.config import CHUNK
from tkq.linear_attention.engine.delta import DeltaShared
from tkq.linear_attention.engine.fields import Globals
from tkq.linear_attention.engine.packed import Sequences, any_strides, numbers
from tkq.linear_attention.overlap.segments import OverlappingSegments
from tkq.runtime.compile import fake
from tkq.tile.dtypes import element_type

SCORES_BARRIER = 4  # named barriers: of the scores' warpgroups, one each, behind those of the state's


class Operands(NamedTuple):
    """q, k: (B, S, H, K). v: (B, S, Hv, V). o: (B, S, HO, V), HO a multiple of H and Hv. x: (B, S, HO, K), as q: what
    gates are made of. beta: (B, S, HO). A_log: (HO,), bias: (HO * K,), fp32. initial, final: (B, HO, K, V) or None.
    cu: None, or (N + 1,), where N packed sequences begin and end: then B is 1, and states are N.
    reach: None, or (B, N - 1, HO) int32, of N segments of each sequence (see `OverlappingSegments`)."""

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
    qk_tiles: tk.SharedTile  # what gates are made of, then keys with what decays from a block's middle; queries
    v: tk.SharedTile  # of each stage those of the state's warpgroups
    o: tk.SharedTile
    p: tk.SharedTile
    whole: WholeShared
    firsts: cute.Tensor  # of each scores' warpgroup, for each block and column: what its first half decays by
    delta: DeltaShared
    lengths: L2NormShared
    tokens: tk.Pipe
    scores: tk.Pipe


class BoundedAttention:
    """As `ChannelAttention` with the delta rule and `l2norm`, of gates

        g = bound * sigmoid(exp(A_log) * (x + bias))

    that are never so low that a block of 16 tokens needs more than one product: every chunk goes block by block, and no
    other way is in the kernel. A warp of the scores has a block: rows with their factors, P, L and its inverse are its
    alone, so that its warpgroup meets once a chunk, for what the state decays by between blocks. Two such warpgroups
    work in ping-pong, every other chunk each; each has a stage, and loads what it is going to need itself.

      scores 0 (a warpgroup)   Q K V X of chunk 0: decays, rows, P, inverse | of chunk 2 | ..
      scores 1 (a warpgroup)   of chunk 1 | of chunk 3 | ..
      state (2 warpgroups)     of each block S' K' and S' Q', U, O' += U' P', S' += U' K | O to global memory | ..

      pipe      stages   full (arrivals)             empty (arrivals)
      tokens    2        bytes, by a warpgroup (1)   warps of the state (8)
      scores    2        warps that make them (4)    warps of the state (8)
    """

    def __init__(self, spec: ChannelSpec, config: BoundedConfig):
        self.spec, self.config, self.sequences = spec, config, Sequences(spec)
        self.dtype = element_type(spec.dtype)
        self.k_tile, self.v_tile = tk.st(CHUNK, COLUMNS, self.dtype), tk.st(CHUNK, CHUNK, self.dtype)
        self.qk_tiles = QkTiles(COLUMNS, self.dtype)
        self.blocks = Blocks(spec, self.qk_tiles, SCORES_BARRIER)
        self.overlap = OverlappingSegments(spec.reach)
        self.state = BoundedState(spec, (self.sequences, self.qk_tiles, self.overlap), config.piece)

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
                            self.overlap.fake_reach(B, HO))
        return operands.q, tuple(operands[1:]), Float32(1.0), Float32(0.0)

    @cute.jit
    def __call__(self, q: cute.Tensor, others: Any, scale: Float32, bound: Float32, stream: cuda.CUstream):
        """others: those of `Operands` behind q."""
        of = Operands(q, *others)
        at, n = self.sequences, self.config.groups
        q, k, v, o, x = [at.rows(x) for x in of[:5]]
        g = Globals(
            q=at.loads(q, self.qk_tiles.type), k=at.loads(k, self.k_tile), v=at.loads(v, self.v_tile),
            o=at.stores(o, self.v_tile), x=at.loads(x, self.qk_tiles.type), beta=of.beta, initial=of.initial,
            final=of.final, scale=scale, tokens=Int32(q.shape[0]), heads_per_k=o.shape[2] // k.shape[2],
            heads_per_v=o.shape[2] // v.shape[2], cu=of.cu, reach=of.reach,
            own=OfGates(of.A_log, of.bias, bound))
        blocks = self.overlap.blocks(at.blocks(of.q, of.cu), of.reach)
        self.kernel(g).launch(grid=[-(-self.spec.value_dim // (CHUNK * n)), o.shape[2], blocks],
                              block=[tk.WARPGROUP * (SCORES + n), 1, 1], stream=stream, min_blocks_per_mp=1)

    # ---- device --------------------------------------------------------------------------------

    @cute.kernel
    def kernel(self, g: Globals):
        al, n = tk.SharedAllocator(), self.config.groups
        k, qk_tiles = al.tile(self.k_tile, SCORES), self.qk_tiles.ring(al, SCORES)
        v, o, p, inverse = (al.tile(self.v_tile, count) for count in (n * SCORES, n, SCORES, SCORES))
        s = Shared(k, qk_tiles, v, o, p, WholeShared(None, al.vector(STEPS * COLUMNS, SCORES)),
                   al.vector((STEPS - 1) * COLUMNS, SCORES),
                   DeltaShared(inverse, self.blocks.inverse.room(al, SCORES),
                               *(al.vector(CHUNK, SCORES) for _ in range(2))),
                   L2NormShared(al.vector(CHUNK, SCORES), None),
                   al.pipe(SCORES, self.k_tile.bytes + self.qk_tiles.bytes + n * self.v_tile.bytes, 4 * n),
                   al.pipe(SCORES, 0, 4 * n, producers=4))
        tk.init_block(lambda: [x.init() for x in (s.tokens, s.scores)])
        part, head, block = cute.arch.block_idx()
        block, segment = self.overlap.sequence(g, block)
        g, batch, state, tokens = self.sequences.of_block(g, block)
        t = Task(batch, head, head // g.heads_per_k, head // g.heads_per_v, part * n, state, tokens)
        some, many = self.config.registers
        tk.assign((tk.Role(lambda wg: self.make_scores(g, s, t, (segment, wg)), some, SCORES),
                   tk.Role(lambda wg: self.state.keep(g, s, t, (segment, wg)), many, n)))

    @cute.jit
    def make_scores(self, g, s, t, of):
        """By a warpgroup of scores: what the state needs of every other chunk. of: the segment, the warpgroup."""
        segment, wg = of
        span = self.overlap.of_block(g, t, segment, chunks(self.spec, g, t))
        ring = tk.ring(SCORES, wg)  # of tokens and of what is made of them
        if tk.warp_id() % 4 == 0:
            tk.prefetch(g.q, g.k, g.v, g.x)
        mine = self.blocks.begin(g, t)
        self.blocks.ask(g, t, span.first + wg, mine)
        for chunk in cutlass.range(span.first + wg, span.end, SCORES, unroll=1):
            if tk.warp_id() % 4 == 0:
                self.load(g, s, t, chunk, ring)
            s.tokens.wait(ring)
            s.scores.acquire_empty(ring)
            self.blocks.make(g, s, t, (chunk, wg), mine)
            s.scores.commit(ring)
            for _ in cutlass.range_constexpr(SCORES):
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
        for block, panel in itertools.product(range(BLOCKS), range(self.qk_tiles.panels)):
            for which, x, head in ((KEYS, g.x, t.head), (QUERIES, g.q, t.head_k)):
                found.append((s.qk_tiles[self.qk_tiles.at(stage, block, panel, which)], x,
                              (t.batch, head, BLOCKS * chunk + block, panel)))
        return found + [(s.v[stage * self.config.groups + wg], g.v, (t.batch, t.head_v, chunk, t.part + wg))
                        for wg in range(self.config.groups)]
