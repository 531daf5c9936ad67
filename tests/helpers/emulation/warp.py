"""A warp without a GPU: what its lanes hold is an array of 32 numbers. For device functions that look things up, by
their own code (``__wrapped__`` of what cute.jit decorates), with these names in place of the DSL's."""
import functools
from types import SimpleNamespace

import numpy

LANES = 32


def plain(x):
    """A Python number, where it is one."""
    return x if numpy.ndim(x) else int(x)


class Memory:
    """int32 of global memory: a lane each may read another number."""

    def __init__(self, values):
        self.values = numpy.array(values, dtype=numpy.int64)
        self.shape = self.values.shape

    def __getitem__(self, i):
        return plain(self.values[i])


def ballot(votes):
    votes = numpy.broadcast_to(votes, LANES)
    return sum(1 << lane for lane in range(LANES) if votes[lane])


def shifted_up(x, by, mask_and_clamp=0):
    """shuffle_sync_up: each lane has what is ``by`` lanes below it, the first ones their own."""
    x, lanes = numpy.broadcast_to(x, LANES), numpy.arange(LANES)
    return x[numpy.where(lanes < by, lanes, lanes - by)]


ARCH = SimpleNamespace(
    shuffle_sync_up=shifted_up,
    warp_redux_sync=lambda x, kind: int({"max": numpy.max}[kind](x)),
    warp_reduction=lambda x, op: functools.reduce(op, (int(v) for v in numpy.broadcast_to(x, LANES))),
    vote_ballot_sync=ballot, popc=lambda x: bin(x & 0xffffffff).count("1"), make_warp_uniform=plain,
    shuffle_sync=lambda x, lane: int(numpy.broadcast_to(x, LANES)[lane]))
NAMES = dict(
    cutlass=SimpleNamespace(
        range=lambda *a, unroll=1: range(*a), range_constexpr=range,
        min=lambda a, b: plain(numpy.minimum(a, b)), max=lambda a, b: plain(numpy.maximum(a, b)),
        select_=lambda condition, a, b: plain(numpy.where(condition, a, b))),
    cute=SimpleNamespace(arch=ARCH), tk=SimpleNamespace(lane_id=lambda: numpy.arange(LANES)),
    Int32=lambda x: x, const_expr=lambda x: x)


def instead_of_the_dsl(monkeypatch, *modules):
    """In these modules."""
    for module in modules:
        for name, value in NAMES.items():
            if hasattr(module, name):
                monkeypatch.setattr(module, name, value)
