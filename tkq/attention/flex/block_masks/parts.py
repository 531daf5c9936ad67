"""Bounds of what depends on a query alone, or on a key alone, over a block's queries or keys: a warp looks at them."""
from collections.abc import Callable
from typing import Any, NamedTuple

import cutlass
import cutlass.cute as cute
from cutlass import Boolean, Constexpr, Float32, Int32, Int64, Uint32

import tkq.tile as tk
from tkq.attention.flex.block_masks.bounds import LIMITS, Bounds, parts
from tkq.attention.flex.emit import Emitted, select

LEAST = -LIMITS["i32"]


class Range(NamedTuple):
    """Some of the queries or keys: the first and, behind it, ``more``."""

    first: Any
    more: Any

    def at(self, i):
        """The i-th, or the last."""
        return self.first + cutlass.min(i, self.more)


class Parts:
    """``bounds.parts`` of a graph. A lane looks at each 32nd query or key."""

    LANES = 32  # of a warp

    def __init__(self, graph):
        self.graph, self.axes = graph, parts(graph)

    def of(self, axis: str) -> list:
        """Those that depend on "q", on "kv", or on neither ("")."""
        return [i for i, on in self.axes.items() if on == axis]

    def loaded(self, axis: str) -> list:
        """Those of an axis that are more than its index."""
        return [i for i in self.of(axis) if self.graph.nodes[i].op != "input"]

    def alike(self, captured, of) -> dict:
        """{part: its bounds}, of those that all queries and keys share. of: the inputs b and h."""
        graph = Emitted(self.graph, captured)
        return {i: _bounds(self.graph.nodes[i].type, _ends(graph.node_at(i, **of))) for i in self.of("")}

    def along(self, axis: str, captured, of, span: Range) -> dict:
        """{part: its bounds}, of those of ``axis``."""
        mine, nodes = self.loaded(axis), self.graph.nodes
        found = {i: Bounds(Int64(span.first), Int64(span.first) + Int64(span.more)) for i in self.of(axis)}
        held = {i: cute.make_rmem_tensor((2,), Int64 if nodes[i].type == "i64" else Int32) for i in mine}
        for i, ends in held.items():
            limit, kind = LIMITS["i64" if nodes[i].type == "i64" else "i32"], ends.element_type
            ends[0], ends[1] = kind(limit - 1), kind(-limit)

        def look_at(n):
            graph, at = Emitted(self.graph, captured), (span.at(self.LANES * n + tk.lane_id()), 0)
            for i, ends in held.items():
                low, high = _ends(graph.node_at(i, **of, **{axis: at}))
                ends[0], ends[1] = cutlass.min(ends[0], low), cutlass.max(ends[1], high)

        if mine:
            self.each(span.more // self.LANES + 1, look_at)
        for i, ends in held.items():
            least, most = (_least, _most) if nodes[i].type == "i64" else (_least_narrow, _most_narrow)
            found[i] = _bounds(nodes[i].type, (least(ends[0]), most(ends[1])))
        return found

    @cute.jit
    def each(self, n, look_at: Constexpr[Callable]):
        for i in cutlass.range(n, unroll=4):
            look_at(i)


def _bounds(type, ends):
    if type == "bool":
        return Bounds(ends[0] != Int32(0), ends[1] != Int32(0))
    return Bounds(*(Int64(x) for x in ends))


def _ends(value):
    """(least, greatest) that a value may be taken for, as int32, of int64 as it is: a float by its place in their
    order, both zeros at 0; NaN, which is nowhere in it, may be anywhere."""
    kind = type(value)
    if kind is Boolean:
        value = select(value, Int32(1), Int32(0))
    if kind is not Float32:
        return value, value
    place, nan = place_of(value), value != value
    return select(nan, Int32(LEAST), place), select(nan, Int32(-LEAST - 1), place)


def place_of(x):
    """Of a float in their order, both zeros at 0."""
    bits = x.bitcast(Int32)
    bits = select(bits == Int32(LEAST), Int32(0), bits)
    return select(bits < Int32(0), bits ^ Int32(-LEAST - 1), bits)


def _least_narrow(x):
    return Int32(cute.arch.warp_redux_sync(x, "min"))


def _most_narrow(x):
    return Int32(cute.arch.warp_redux_sync(x, "max"))


def _words(x):
    return Int32(x >> Int64(32)), Uint32(x & Int64(0xffffffff))


def _least(x):
    """Of a warp's int64: the least high words, and among them the least low one."""
    high, low = _words(x)
    first = _least_narrow(high)
    rest = Uint32(cute.arch.warp_redux_sync(select(high == first, low, Uint32(0xffffffff)), "umin"))
    return (Int64(first) << Int64(32)) | Int64(rest)


def _most(x):
    high, low = _words(x)
    first = _most_narrow(high)
    rest = Uint32(cute.arch.warp_redux_sync(select(high == first, low, Uint32(0)), "umax"))
    return (Int64(first) << Int64(32)) | Int64(rest)
