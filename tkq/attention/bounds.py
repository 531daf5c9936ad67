"""Where packed sequences begin and end, whatever cu_seqlens say: within the tensors, and none before the one before it
ends.

Sequence s has the rows from the largest of cu[0] .. cu[s] to the largest of cu[0] .. cu[s + 1], each within 0 .. total.
Where cu rises that is cu[s] to cu[s + 1], and nothing is searched for: the code that goes through all sequences for
other reasons asks on its way whether cu falls anywhere (``fall``), and only then are the largest ones computed.
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

    @cute.jit
    def rising(self, first):
        """Lane i: the largest of at(0) .. at(first + i). A whole warp."""
        before, mine = Int32(0), self.at(first + tk.lane_id())
        for base in cutlass.range(0, cutlass.min(first, self.cu.shape[0]), WARP, unroll=1):
            before = cutlass.max(before, self.at(cutlass.min(base + tk.lane_id(), first)))
        for i in cutlass.range_constexpr(5):
            below = cute.arch.shuffle_sync_up(mine, 1 << i, mask_and_clamp=0)
            mine = cutlass.max(mine, cutlass.select_(tk.lane_id() >= 1 << i, below, Int32(0)))
        return cutlass.max(mine, cute.arch.warp_reduction(before, lambda a, b: cutlass.max(a, b)))


def edges(q: Bounds, k: Bounds, s) -> Edges:
    """Of sequence s, of each lane's or the same for all, where cu rises."""
    return Edges(q.at(s), q.at(s + 1), k.at(s), k.at(s + 1))


def fall(e: Edges):
    """Does cu fall, of Q or of K, from s to s + 1?"""
    return (e.end_q < e.begin_q) | (e.end_k < e.begin_k)


def risen(q: Bounds, k: Bounds, first) -> Edges:
    """Of sequence first + i in lane i, where cu falls somewhere. A whole warp."""
    return Edges(q.rising(first), q.rising(first + 1), k.rising(first), k.rising(first + 1))


@cute.jit
def edges_of(q: Bounds, k: Bounds, s, falls):
    """Of sequence s, the same for all lanes of a whole warp; falls: does cu fall anywhere?"""
    begin_q, end_q, begin_k, end_k = edges(q, k, s)
    if falls:
        begin_q, end_q, begin_k, end_k = [cute.arch.shuffle_sync(of_lanes, 0) for of_lanes in risen(q, k, s)]
    return Edges(begin_q, end_q, begin_k, end_k)


@cute.jit
def edges_of_lanes(q: Bounds, k: Bounds):
    """(of sequence i in lane i, does cu fall?), where there are fewer than 32. A whole warp."""
    begin_q, end_q, begin_k, end_k = edges(q, k, tk.lane_id())
    falls = cute.arch.vote_ballot_sync((end_q < begin_q) | (end_k < begin_k)) != 0
    if falls:
        begin_q, end_q, begin_k, end_k = risen(q, k, Int32(0))
    return Edges(begin_q, end_q, begin_k, end_k), falls
