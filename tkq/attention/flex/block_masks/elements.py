"""A mask on the elements of a block: is some of it seen, is all?"""
from collections.abc import Callable

import cutlass
import cutlass.cute as cute
from cutlass import Boolean, Constexpr, Int32, const_expr

import tkq.tile as tk
from tkq.attention.flex.block_masks.parts import Parts
from tkq.attention.flex.emit import Emitted, from_lane, select

COLUMNS = 2  # keys of a lane in a step


class Elements:
    """A warp goes over a block in steps of 32 queries and 64 keys, until it has met a seen and an unseen element. What
    depends on keys alone is made once in a step; what depends on queries alone a lane makes for one of them, from whom
    the others take it. Behind the last query and key it looks at the last again, which changes nothing."""

    def __init__(self, graph):
        self.graph, self.parts = graph, Parts(graph)

    @cute.jit
    def look(self, mask: Constexpr, of: Constexpr, queries: Constexpr, keys: Constexpr):
        """(is some seen, is all), the same in all lanes."""
        row, column, some, every, on = Int32(0), Int32(0), Boolean(False), Boolean(True), Boolean(True)
        lanes = const_expr(self.parts.LANES)
        while on:
            seen = self.step(mask, of, queries, keys, (row, column))
            some = some | cute.arch.vote_any_sync(seen != Int32(0))
            every = every & cute.arch.vote_all_sync(seen == Int32(lanes * COLUMNS))
            row = row + lanes
            if row > queries.more:
                row, column = Int32(0), column + lanes * COLUMNS
            on = (column <= keys.more) & (every | (some == Boolean(False)))
        return some, every

    def step(self, mask, of, queries, keys, place):
        """How many of its elements of a step a lane sees."""
        row, column = place
        mine, at = Emitted(self.graph, mask), (queries.at(row + tk.lane_id()), 0)
        values = {i: mine.node_at(i, **of, q=at) for i in self.parts.loaded("q")}
        columns = [(keys.at(column + tk.lane_id() + self.parts.LANES * c), 0) for c in range(COLUMNS)]
        graphs = [Emitted(self.graph, mask) for _ in columns]
        for graph, kv in zip(graphs, columns):
            graph.prepare("q", **of, kv=kv)
        seen = cute.make_rmem_tensor((1,), Int32)
        seen[0] = Int32(0)

        def row_of(r):
            q = queries.at(row + r), 0
            taken = {i: from_lane(value, r) for i, value in values.items()}
            for graph, kv in zip(graphs, columns):
                for i, value in taken.items():
                    graph.know(i, value, **of, q=q)
                seen[0] = seen[0] + select(graph.at(**of, q=q, kv=kv), Int32(1), Int32(0))

        self.each(row_of)
        return seen[0]

    @cute.jit
    def each(self, row_of: Constexpr[Callable]):
        for r in cutlass.range(self.parts.LANES, unroll=8):
            row_of(r)
