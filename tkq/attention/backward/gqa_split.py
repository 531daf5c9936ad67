"""Query heads that share a K/V head, in parts with tasks of their own: dK and dV of a block of keys go from the first
part's task to the second's, and so on, and the last one writes them. So the sums have an order, and what is at work at
once is as little as if each part had keys of its own.

Nobody waits for ever: a part's task is claimed after those of the parts before it."""
from typing import NamedTuple

import cutlass
import cutlass.cute as cute
from cutlass import Constexpr, Float32, Int32, Int64

import tkq.tile as tk
from tkq.attention.common.counters import await_count, tell

WARP = 32


class Handed(NamedTuple):
    """Of each 64 keys of each K/V head: sums (4, lane, quad, warp, dK or dV, place) fp32, dK and dV so far, as the
    warpgroup has them; counts (warp of place,) int32, zero in the beginning: how many parts are in them."""

    sums: cute.Tensor
    counts: cute.Tensor

    @staticmethod
    def of(start: cute.Pointer, blocks, width) -> "Handed":
        """start: of fp32. blocks: of 128 keys, of all K/V heads."""
        places, quads = 2 * blocks, width // 8
        counts = cute.make_tensor(cute.recast_ptr(start, dtype=Int32), cute.make_layout((4 * places,)))
        sums = cute.make_tensor((start + 4 * places).align(16), cute.make_layout(
            (4, WARP, quads, 4, 2, places), stride=(1, 4, 128, 128 * quads, 512 * quads, 1024 * quads)))
        return Handed(sums, counts)


@cute.jit
def hand_on(handed: Handed, place, head, share, tiles: Constexpr):
    """Add what has been handed on to the tiles dK and dV, and hand them on. head: which of ``share`` parts this is. A
    warpgroup, each warp by itself. Is this the last one, which has nobody to hand them to?"""
    warp = tk.warp_id() % 4
    at = place * 4 + warp
    sums = handed.sums[None, None, None, None, None, Int64(place)]
    if head > 0:
        await_count(handed.counts, at, head)
        for i in cutlass.range_constexpr(len(tiles)):
            _add(tiles[i], sums, i, warp)
    if head < share - 1:
        tk.nap("store")
        for i in cutlass.range_constexpr(len(tiles)):
            _store(tiles[i], sums, i, warp)
        tell(handed.counts, at)
    return head == share - 1


def _quads(tile):
    return cute.make_tensor(tile.tensor.iterator, cute.make_layout((4, tile.cols // 8)))


def _add(tile, sums, i, warp):
    """From L2, where another block put it."""
    mine, theirs = _quads(tile), cute.make_rmem_tensor((4,), Float32)
    atom = cute.make_copy_atom(cute.nvgpu.CopyG2ROp(), Float32, num_bits_per_copy=128,
                               load_cache_mode=cute.nvgpu.LoadCacheMode.GLOBAL)
    for j in range(tile.cols // 8):
        cute.copy(atom, sums[None, tk.lane_id(), j, warp, i], theirs)
        for e in range(4):
            mine[e, j] = mine[e, j] + theirs[e]


def _store(tile, sums, i, warp):
    mine = _quads(tile)
    for j in range(tile.cols // 8):
        cute.autovec_copy(mine[None, j], sums[None, tk.lane_id(), j, warp, i])


# ---- counters ----------------------------------------------------------------------------------------
