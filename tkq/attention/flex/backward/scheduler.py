"""Which tiles of queries a block of keys meets, from the block lists, as all roles of the backward ask it."""
import cutlass
import cutlass.cute as cute
from cutlass import Constexpr, Int32, const_expr

from tkq.attention.backward.config import BackwardConfig
from tkq.attention.backward.state import Task
from tkq.attention.backward.tile_scheduler import TileScheduler
from tkq.attention.common.query_mask import tile_of_task
from tkq.attention.flex.backward.spec import FlexBackwardSpec


class FlexScheduler(TileScheduler):
    """Of each query head of a task its listed tiles, those that need the mask first. A task's ``first`` is 0, its
    ``end`` the number of tiles of all its heads."""

    def __init__(self, spec: FlexBackwardSpec, config: BackwardConfig):
        super().__init__(spec.attention, config)
        self.masks = spec.mask is not None or spec.states  # are there tiles that need one?
        self.full, graph = spec.full, spec.graph
        # do scores depend on where they are?
        self.places = graph is not None and any(depends & {"q", "kv"} for depends in graph.inputs_of())

    @cute.jit
    def find_task(self, g, i):
        """Task i. The first blocks of a head, which under a causal mask the most queries see, come first."""
        def order(index, blocks, heads, _):
            return tile_of_task(index, blocks, heads, g.l2_section, True, g.tail_heads)

        at = g.layout.at(True, self.config.block, i, g.kv_heads, order)
        first, tiles, none = g.layout.first_tile(at, self.config.tile, g.heads, g.tiles), Int32(0), Int32(0)
        for h in cutlass.range(g.heads_per_kv, unroll=1):
            tiles = tiles + g.queries.counts(at.batch, at.head * g.heads_per_kv + h, at.number).all
        return Task(at.sequence, at.rows_q, at.rows_k, at.batch_q, at.batch_k, first, at.head, at.number, none, none,
                    tiles, tiles)

    @cute.jit
    def each_tile(self, g, t, work: Constexpr):
        """As ``TileScheduler.each_tile``. A listed block may go on where the queries do not: there are as many tiles
        as blocks need, and P of the last ones is 0."""
        before = Int32(0)  # tiles of the heads before
        for h in cutlass.range(g.heads_per_kv, unroll=1):
            of = t.batch_k, self.query_head(g, t, h), t.block
            counts, starts = g.queries.counts(*of), g.queries.starts(*of)
            for i in cutlass.range(counts.all, unroll=1):
                work(before + i, h, self.listed(g, starts, i, counts.masked))
            before = before + counts.all

    @cute.jit
    def listed(self, g, starts, i, masked):
        """The i-th tile of a visit. starts: of ``KeyTiles``."""
        tile = g.queries.from_start(starts, i, masked, True)
        if const_expr(self.full):
            if i >= masked:
                tile = g.queries.from_start(starts, i, masked, False)
        return tile

    @cute.jit
    def visit_head(self, g, s, t, c, h, step: Constexpr):
        """``step(g, s, t, c, (query head, tile), masked)`` for each tile of the task's h-th query head, in the order of
        ``each_tile``. Where no score depends on its place, tiles without the mask have no number."""
        of = t.batch_k, self.query_head(g, t, h), t.block
        counts, starts = g.queries.counts(*of), g.queries.starts(*of)
        first = Int32(0)
        # of both lists, where none is masked
        rest = lambda i: self.listed(g, starts, i, counts.masked)
        if const_expr(self.masks):
            first, rest = counts.masked, lambda i: g.queries.from_start(starts, i, counts.masked, False)
            self.steps(lambda i: g.queries.from_start(starts, i, counts.masked, True), Int32(0), first,
                       lambda tile: step(g, s, t, c, (of[1], tile), True), True)
        self.steps(rest, first, counts.all, lambda tile: step(g, s, t, c, (of[1], tile), False), self.places)

    @cute.jit
    def steps(self, tile_at: Constexpr, first, end, step: Constexpr, asks: Constexpr[bool]):
        """asks: it matters which tiles. The next one's number is on its way meanwhile."""
        if const_expr(asks):
            tile = Int32(0)
            if first < end:
                tile = tile_at(first)
            for i in cutlass.range(first, end, unroll=1):
                now = cute.arch.make_warp_uniform(tile)
                tile = tile_at(cutlass.min(i + 1, end - 1))
                step(now)
        else:
            for _ in cutlass.range(first, end, unroll=1):
                step(None)
