"""Where packed sequences begin and end, whatever cu_seqlens say: within the tensors, and none before the one before it
ends.

Sequence s has the rows from the largest of cu[0] .. cu[s] to the largest of cu[0] .. cu[s + 1], each within 0 .. total.
Where cu rises that is cu[s] to cu[s + 1].
"""
from dataclasses import dataclass
from typing import Any, NamedTuple

import cutlass
import cutlass.cute as cute
from cutlass import Int32

import tkq.tile as tk

WARP = 32


class Edges(NamedTuple):
    """Of one sequence, in Q's rows and in K's."""

    begin_q: Any
    end_q: Any
    begin_k: Any
    end_k: Any


@dataclass(frozen=True)
class Bounds:
    """cu: (B + 1,) of Q or of K, of which there are ``total`` rows."""

    cu: Any
    total: Any

    def at(self, i):
        """cu[i], or its last, within the tensor."""
        return cutlass.max(cutlass.min(self.cu[cutlass.min(i, self.cu.shape[0] - 1)], self.total), 0)

    def end(self, s, begin):
        """Of sequence s, which begins there."""
        return cutlass.max(begin, self.at(s + 1))

    @cute.jit
    def highest(self, i):
        """The largest of at(0) .. at(i), i being the same for all lanes. A whole warp. Through all of cu: so the
        compiler knows that no lane leaves the loop before another."""
        found = Int32(0)
        for base in cutlass.range(0, self.cu.shape[0], WARP, unroll=1):
            found = cutlass.max(found, self.at(cutlass.min(base + tk.lane_id(), i)))
        return highest(found)

    def rising(self, first, before):
        """Lane i: the largest of ``before`` and at(first) .. at(first + i). A whole warp."""
        mine = cutlass.max(self.at(first + tk.lane_id()), before)
        for i in range(5):
            mine = cutlass.max(mine, cute.arch.shuffle_sync_up(mine, 1 << i))  # of the first lanes, their own
        return mine


def highest(x):
    """Of all lanes."""
    return cute.arch.warp_redux_sync(x, "max")


# ---- where a glance at all of cu says whether it falls anywhere ---------------------------------------------------


def edges(q: Bounds, k: Bounds, s) -> Edges:
    """Of sequence s, of each lane's or the same for all, where cu rises."""
    return Edges(q.at(s), q.at(s + 1), k.at(s), k.at(s + 1))


def fall(e: Edges):
    """Does cu fall, of Q or of K, from s to s + 1?"""
    return (e.end_q < e.begin_q) | (e.end_k < e.begin_k)


def risen(q: Bounds, k: Bounds, first) -> Edges:
    """Of sequence first + i in lane i, where cu falls somewhere. A whole warp."""
    begin_q, begin_k = (of.rising(first, of.highest(first)) for of in (q, k))
    s = first + tk.lane_id()
    return Edges(begin_q, q.end(s, begin_q), begin_k, k.end(s, begin_k))


@cute.jit
def edges_of(q: Bounds, k: Bounds, s, falls):
    """Of sequence s, the same for all lanes of a whole warp; falls: does cu fall anywhere?"""
    begin_q, begin_k = q.at(s), k.at(s)
    if falls:
        begin_q, begin_k = q.highest(s), k.highest(s)
    return Edges(begin_q, q.end(s, begin_q), begin_k, k.end(s, begin_k))
