"""How a flex kernel's warp looks at a mask, on a CPU: `Look` by its own code, with arrays of 32 numbers, one of each
lane, in place of the DSL's numbers."""
import operator
from types import SimpleNamespace

import numpy

from tkq.attention.flex import emit, look

LANES = numpy.arange(32)


class Number:
    """As the DSL's, of a whole warp."""

    kind = None

    def __init__(self, x):
        self.v = numpy.broadcast_to(getattr(x, "v", x), 32).astype(self.kind)

    def _with(self, other, of):
        return type(self)(of(self.v, type(self)(other).v))

    def __rshift__(self, n):
        return self._with(n, operator.rshift)

    def __lshift__(self, n):
        assert (type(self)(n).v < 8 * self.v.itemsize).all(), "a shift by all bits gives anything"
        return self._with(n, operator.lshift)

    def __mod__(self, n):
        return self._with(n, numpy.fmod)

    def __neg__(self):
        return type(self)(-self.v)

    def __invert__(self):
        return type(self)(~self.v)


def _operators():
    def add(name, of):
        setattr(Number, f"__{name}__", lambda a, b: a._with(b, of))
        setattr(Number, f"__r{name}__", lambda a, b: type(a)(b)._with(a, of))

    def compare(name, of):
        setattr(Number, f"__{name}__", lambda a, b: Boolean(of(a.v, type(a)(b).v)))

    for name in ("add", "sub", "mul", "and_", "or_", "xor", "floordiv"):
        add(name.strip("_"), getattr(operator, name))
    for name in ("lt", "le", "gt", "ge", "eq", "ne"):
        compare(name, getattr(operator, name))


_operators()


class Boolean(Number):
    kind = bool


class Int32(Number):
    kind = numpy.int32


class Int64(Number):
    kind = numpy.int64


class Uint32(Number):
    kind = numpy.uint32


class Float32(Number):
    kind = numpy.float32


class Memory:
    """A captured tensor: each lane may read another element; none outside."""

    def __init__(self, x):
        self.values = x.numpy()
        self.shape = self.values.shape
        self.type = {"int64": Int64, "float32": Float32}.get(str(self.values.dtype), Int32)

    def __getitem__(self, place):
        assert all((i.v >= 0).all() and (i.v < size).all() for i, size in zip(place, self.shape))
        return self.type(self.values[tuple(i.v for i in place)])


def select(condition, a, b):
    return type(a)(numpy.where(condition.v, a.v, type(a)(b).v))


ARCH = SimpleNamespace(shuffle_sync=lambda x, lane: type(x)(x.v[numpy.broadcast_to(getattr(lane, "v", lane), 32)]),
                       popc=lambda x: Int32(numpy.bitwise_count(x.v.astype(numpy.uint32))),
                       shuffle_sync_bfly=lambda x, offset: type(x)(x.v[LANES ^ offset]))
NAMES = dict(
    Boolean=Boolean, Int32=Int32, Int64=Int64, Uint32=Uint32, Float32=Float32, select=select,
    _KINDS={"bool": Boolean, "i32": Int32, "i64": Int64, "f32": Float32},
    _PLAIN={**emit._PLAIN, "where": lambda c, a, b: select(c, a, b)},
    cutlass=SimpleNamespace(min=lambda a, b: select(a < b, a, type(a)(b)),
                            max=lambda a, b: select(a > b, a, type(a)(b))),
    cute=SimpleNamespace(arch=ARCH, make_rmem_tensor=lambda shape, kind: [None] * shape[0]),
    tk=SimpleNamespace(lane_id=lambda: Int32(LANES)))


class LookOnLanes(look.Look):
    def each_part(self, n, look_at):
        for part in range(n):
            look_at(Int32(part))

    def each_number(self, left, look_for):
        while left[0].v.any():
            look_for(Int32(int((left[0].v != 0) @ (1 << LANES)) - (1 << 32) * int(left[0].v[31] != 0)))


def seen(monkeypatch, traced, along, of, place, width):
    """(16, width) bool: which elements of a warp's rows of a tile a mask lets through. of: (b, h); place: the first row
    and column; along: what columns are."""
    for module in (look, emit):
        for name, value in NAMES.items():
            if hasattr(module, name):
                monkeypatch.setattr(module, name, value)
    row, col = place
    words = [None, None]
    inputs = dict(b=(Int32(of[0]), 0), h=(Int32(of[1]), 0))
    captured = tuple(map(Memory, traced.tensors)), tuple(Int32(n) for n in traced.numbers)
    first = Int32(row + LANES // 4), Int32(col + LANES % 4 * 2)
    on_lanes = LookOnLanes(traced.graph, along)
    on_lanes.look(captured, inputs, first, width, words, on_lanes.of_rows(captured, inputs, first[0]))
    found = numpy.zeros((16, width), bool)
    for r in range(2):
        for j in range(width // 4):
            found[LANES // 4 + 8 * r, LANES % 4 * 2 + 8 * (j // 2) + j % 2] = words[r].v >> j & 1
    return found
