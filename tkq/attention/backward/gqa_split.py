"""Splits the query heads of one K/V head into several tasks, so that the working set stays in L2. dK and dV partial
sums are passed from task to task in order; the last one writes.

Deadlock-free: a task waits only on tasks claimed before it."""
from typing import NamedTuple

import cutlass
import cutlass.cute as cute
from cutlass import Constexpr, Float32, Int32, Int64

import tkq.tile as tk
from tkq.attention.common.counters import signal, wait_count

WARP = 32


class DkvPartials(NamedTuple):
    """Of each 64 keys of each K/V head: sums (4, lane, quad, warp, dK or dV, place) fp32, dK and dV so far, as the
    warpgroup has them; counts (warp of place,) int32, zero in the beginning: how many parts are in them."""

    sums: cute.Tensor
    counts: cute.Tensor

    @staticmethod
    def of(start: cute.Pointer, blocks, width) -> "DkvPartials":
        """start: of fp32. blocks: of 128 keys, of all K/V heads."""
        slots, quads = 2 * blocks, width // 8
        counts = cute.make_tensor(cute.recast_ptr(start, dtype=Int32), cute.make_layout((4 * slots,)))
        sums = cute.make_tensor((start + 4 * slots).align(16), cute.make_layout(
            (4, WARP, quads, 4, 2, slots), stride=(1, 4, 128, 128 * quads, 512 * quads, 1024 * quads)))
        return DkvPartials(sums, counts)


@cute.jit
def pass_on_dkv(dkv_partials: DkvPartials, place, head, splits_per_kv_head, tiles: Constexpr):
    """Add the partial sums of the parts before to the tiles dK and dV, and pass them on. head: which of
    ``splits_per_kv_head`` parts this is. A warpgroup, each warp by itself. Is this the last part?"""
    warp = tk.warp_id() % 4
    at = place * 4 + warp
    sums = dkv_partials.sums[None, None, None, None, None, Int64(place)]
    if head > 0:
        wait_count(dkv_partials.counts, at, head)
        for i in cutlass.range_constexpr(len(tiles)):
            _add(tiles[i], sums, i, warp)
    if head < splits_per_kv_head - 1:
        tk.nap("store")
        for i in cutlass.range_constexpr(len(tiles)):
            _store(tiles[i], sums, i, warp)
        signal(dkv_partials.counts, at)
    return head == splits_per_kv_head - 1


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
