"""The gated delta rule (Yang et al., 2024) block by block, forward and in its gradients: K of 64 or 128, V above 64."""
import itertools
from dataclasses import dataclass, replace
from typing import Any

import cuda.bindings.driver as cuda
import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32, const_expr

import tkq.tile as tk
from tkq.linear_attention.blocks.config import BlocksConfig
from tkq.linear_attention.blocks.gradients import BlockGradients
from tkq.linear_attention.blocks.pairs import EDGE
from tkq.linear_attention.blocks.qk_tiles import BLOCKS, KEYS, QUERIES, QkTiles
from tkq.linear_attention.blocks.scores import BlockScores, Factors
from tkq.linear_attention.blocks.state import BlockState
from tkq.linear_attention.config import CHUNK, LinearConfig
from tkq.linear_attention.engine.fields import Globals, Task
from tkq.linear_attention.engine.kernel import LinearAttention
from tkq.linear_attention.engine.operands import Operands
from tkq.linear_attention.engine.packed import Sequences
from tkq.linear_attention.engine.segmented import Segmented, visited
from tkq.linear_attention.overlap.segments import OverlappingSegments
from tkq.linear_attention.spec import LinearSpec
from tkq.tile.dtypes import element_type


@dataclass(frozen=True)
class Shared:
    qk_tiles: tk.SharedTile  # of keys and queries
    v: tuple  # of each warpgroup of the state
    o: Any
    p: tk.SharedTile  # blocks of 16 x 16 on the diagonal
    inverse: tk.SharedTile  # likewise
    lower: cute.Tensor
    factors: Factors
    keys: Any  # reversed: -N', as p
    pieces: Any  # with updates, and reversed: of each warpgroup what comes out, by blocks
    x: Any  # reversed: what was kept, of each stage and warpgroup, by blocks
    dots: Any
    tokens: tk.Pipe
    scores: tk.Pipe


class DeltaBlocks:
    """What `LinearAttention` computes of the delta rule's forward, with updates or without, and of its gradients, with
    the same arguments: chunks of 64 tokens are loaded and stored, and gone through in blocks of 16, so that no inverse
    is larger and no scores are made of tokens of different blocks. Inverses are made anew for gradients. Of segments
    (see `Segmented`) outputs, and the gradients' states; or, of the forward alone, `OverlappingSegments`.

      producer (a warp)        Q K V of a chunk | of the next | ..
      scores (a warpgroup)     a warp a block: P, (I + L)^-1, decays | of the next chunk | ..
      state (2 warpgroups)     of each block O' = S' Q', U, O' += U' P', S' += U' K | O to global memory | ..

      pipe      stages           full (arrivals)            empty (arrivals)
      tokens    config.stages    producer's bytes (1)       warps of the state (8), behind the scores
      scores    2                warps of the scores (4)    warps of the state (8)
    """

    def __init__(self, spec: LinearSpec, config: BlocksConfig):
        self.spec, self.config, self.sequences, self.segmented = spec, config, Sequences(spec), Segmented(spec)
        dtype = element_type(spec.dtype)
        self.qk_tiles, self.v_tile = QkTiles(spec.head_dim, dtype), tk.st(CHUNK, CHUNK, dtype)
        self.scores, self.overlap = BlockScores(spec, self.qk_tiles), OverlappingSegments(spec.overlapping)
        state = BlockGradients if spec.reverse else BlockState
        self.state = state(spec, self.sequences, self.qk_tiles, config.piece)
        self.piece = tk.st(EDGE, CHUNK, dtype)

    # ---- host ----------------------------------------------------------------------------------

    def fake_arguments(self):
        """Those of `LinearAttention`."""
        return LinearAttention(self.spec, LinearConfig()).fake_arguments()

    @cute.jit
    def __call__(self, q: cute.Tensor, others: Any, scale: Float32, ssd: Any, stream: cuda.CUstream):
        """others: those of `Operands` behind q. ssd: None."""
        of, at, n = Operands(q, *others), self.sequences, self.config.groups
        q, k, v = [at.rows(x) for x in of[:3]]
        o, dv, x, heads = None, None, None, self.segmented.heads(of)
        if const_expr(self.spec.writes):
            o = at.stores(at.rows(of.o), self.v_tile)
        if const_expr(self.spec.updates):
            dv = at.stores(at.rows(of.dv), self.v_tile)
        if const_expr(self.spec.has_x):
            x = at.loads(at.rows(of.x), self.v_tile)
        states = [x if x is None or not self.spec.state_v_first else cute.make_tensor(
            x.iterator, cute.select(x.layout, [0, 1, 3, 2])) for x in of[6:8]]
        g = Globals(
            q=at.loads(q, self.qk_tiles.type), k=at.loads(k, self.qk_tiles.type), v=at.loads(v, self.v_tile),
            o=o, dv=dv, x=x, g=of.g, beta=of.beta, initial=states[0], final=states[1], dots=of.dots, scale=scale,
            tokens=Int32(q.shape[0]), heads_per_k=heads // k.shape[2], heads_per_v=heads // v.shape[2], cu=of.cu,
            state_indices=of.state_indices, segments=self.segmented.count(of), reach=of.reach)
        blocks = self.overlap.blocks(self.segmented.blocks(of, at.blocks(of.q, of.cu)), of.reach)
        self.kernel(g).launch(grid=[-(-self.spec.value_dim // (CHUNK * n)), heads, blocks],
                              block=[tk.WARPGROUP * (n + 2), 1, 1], stream=stream, min_blocks_per_mp=1)

    # ---- device --------------------------------------------------------------------------------

    @cute.kernel
    def kernel(self, g: Globals):
        c, al = self.config, tk.SharedAllocator()
        n = c.groups
        qk_tiles = self.qk_tiles.ring(al, c.stages)
        v = tuple(al.tile(self.v_tile, c.stages) for _ in range(n))
        back, given, more = self.spec.reverse, self.spec.has_x, self.spec.has_x or self.spec.updates
        o, p, inverse, keys = (al.tile(self.v_tile, count) if count else None for count in (
            0 if back else n, 2, 2, 2 * given))
        s = Shared(qk_tiles, v, o, p, inverse, self.scores.inverse.room(al), self.scores.shared(al, 2), keys,
                   al.tile(self.piece, BLOCKS * n) if more else None,
                   al.tile(self.piece, BLOCKS * n * c.stages) if given else None,
                   al.vector(CHUNK, 4 * n) if given else None,
                   al.pipe(c.stages, self.qk_tiles.bytes + n * (1 + given) * self.v_tile.bytes, 4 * n),
                   al.pipe(2, 0, 4 * n, producers=4))
        tk.init_block(lambda: [x.init() for x in (s.tokens, s.scores)])
        part, head, block = cute.arch.block_idx()
        block, segment = self.overlap.sequence(g, block)
        g, batch, state, tokens = self.sequences.of_block(g, self.segmented.row_of(block))
        batch, first, chunks = self.segmented.of_block(g, batch, head, cute.ceil_div(tokens, CHUNK))
        t = Task(batch, state, head, head // g.heads_per_k, head // g.heads_per_v, part * n, chunks, first)
        if const_expr(self.overlap.there):
            span = self.overlap.of_segment(g, t, segment, chunks)
            t = replace(t, first=span.first, chunks=span.end - span.first, stored_from=span.stored_from)
        few, some, many = c.registers
        tk.assign((tk.Role(lambda _: self.produce(g, s, t), few, warps=1),
                   tk.Role(lambda _: self.make_scores(g, s, t), some),
                   tk.Role(lambda wg: self.state.keep(g, s, t, wg), many, n)))

    @cute.jit
    def produce(self, g, s, t):
        ring = s.tokens.ring()
        tk.prefetch(g.q, g.k, g.v, *(x for x in (g.o,) if x is not None))
        both = ((KEYS, g.q), (QUERIES, g.k)) if self.spec.reverse else ((KEYS, g.k), (QUERIES, g.q))
        for i in cutlass.range(t.chunks, unroll=1):
            sem, chunk = s.tokens.acquire(ring), self.order(t, i)
            for block, panel in itertools.product(range(BLOCKS), range(self.qk_tiles.panels)):
                for which, x in both:
                    tk.load_async(s.qk_tiles[self.qk_tiles.at(ring.stage, block, panel, which)], x,
                                  (t.batch, t.head_k, BLOCKS * chunk + block, panel), sem)
            for wg in cutlass.range_constexpr(self.config.groups):
                tk.load_async(s.v[wg][ring.stage], g.v, (t.batch, t.head_v, chunk, t.part + wg), sem)
                if const_expr(self.spec.has_x):
                    tile = s.x.stacked(BLOCKS)[ring.stage * self.config.groups + wg]
                    tk.load_async(tile, g.x, (t.batch, t.head, chunk, t.part + wg), sem)
            ring.advance()

    def order(self, t, i):
        """The i-th chunk that is visited."""
        return visited(t, i, self.spec.reverse)

    @cute.jit
    def make_scores(self, g, s, t):
        ring, out = s.tokens.ring(), s.scores.ring()
        mine = self.scores.begin(g, t)
        for i in cutlass.range(t.chunks, unroll=1):
            s.tokens.wait(ring)
            s.scores.acquire_empty(out)
            self.scores.make(g, s, t, (self.order(t, i), ring.stage, out.stage), mine)
            tk.publish()
            s.scores.commit(out)
            ring.advance()
            out.advance()
