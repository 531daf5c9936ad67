"""Sums of a launch's outputs times another tensor: what gates' gradients are made of."""
import cutlass
import cutlass.cute as cute
from cutlass import Constexpr, const_expr

import tkq.tile as tk
from tkq.linear_attention.config import CHUNK
from tkq.tile.maps import element

HALF = CHUNK // 8  # of a lane's columns


@cute.jit
def add_dots(dots: cute.Tensor, o: tk.RegTile, x: tk.RegTile, wg, times: Constexpr[float] = 0.0):
    """A chunk's sums over a warp's 16 rows, to shared memory. times: they are multiplied by it and added to those
    that are there; 0: they are put there as they are. wg: the warpgroup. Of the eight lanes that share columns each
    ends with the sum of one in eight: what a lane does not go on with, it gives to another."""
    quad = tk.lane_id() // 4
    for half in cutlass.range_constexpr(2):
        mine = []
        for j in cutlass.range_constexpr(half * HALF, half * HALF + HALF):
            i = j // 2 * 4 + j % 2
            mine.append(o.tensor[i] * element(x, i) + o.tensor[i + 2] * element(x, i + 2))
        for bit in (4, 2, 1):
            upper = quad & bit != 0
            mine = [cutlass.select_(upper, mine[bit + i], mine[i]) + cute.arch.shuffle_sync_bfly(
                cutlass.select_(upper, mine[i], mine[bit + i]), offset=4 * bit) for i in range(bit)]
        at = tk.first_col() + 8 * (HALF // 2 * half + quad // 2) + quad % 2, 4 * wg + tk.warp_id() % 4
        dots[at] = dots[at] + times * mine[0] if const_expr(times != 0.0) else mine[0]


@cute.jit
def write_dots(g, dots: cute.Tensor, t, chunk, place):
    """Those of the four warps, over 64 columns, to global memory. place: (the warpgroup, its barrier)."""
    out, (wg, barrier) = g.dots, place
    tk.sync(barrier, tk.WARPGROUP)
    token = tk.thread_in_warpgroup()
    if token < CHUNK and chunk * CHUNK + token < g.tokens and t.part + wg < out.shape[0]:
        of_warps = [dots[token, 4 * wg + w] for w in range(4)]
        out[t.part + wg, t.batch, chunk * CHUNK + token, t.head] = sum(of_warps[1:], of_warps[0])
