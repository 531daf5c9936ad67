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
        """As ``TileScheduler.each_tile``. In the place of a tile behind the queries' last one stands that: a listed
        block may go on where the queries do not, and ``FlexDkv`` makes zeros of it."""
        for h in cutlass.range(g.heads_per_kv, unroll=1):
            of = t.batch_k, self.query_head(g, t, h), t.block
            counts = g.queries.counts(*of)
            for i in cutlass.range(counts.all, unroll=1):
                work(h + i, h, cutlass.min(g.queries.at(*of, i, counts.masked), g.tiles - 1))

    @cute.jit
    def visit(self, g, s, t, c, step: Constexpr):
        """``step(g, s, t, c, (query head, tile), masked)`` for each tile of each query head, in the order of
        ``each_tile``."""
        for h in cutlass.range(g.heads_per_kv, unroll=1):
            self.visit_head(g, s, t, c, h, step)

    @cute.jit
    def visit_head(self, g, s, t, c, h, step: Constexpr):
        """Of the task's h-th query head."""
        of = t.batch_k, self.query_head(g, t, h), t.block
        counts = g.queries.counts(*of)
        masked = Int32(0)
        if const_expr(self.masks):
            masked = counts.masked
            for i in cutlass.range(masked, unroll=1):
                step(g, s, t, c, (of[1], g.queries.at(*of, i, masked)), True)
        for i in cutlass.range(masked, counts.all, unroll=1):
            step(g, s, t, c, (of[1], g.queries.at(*of, i, counts.masked)), False)
