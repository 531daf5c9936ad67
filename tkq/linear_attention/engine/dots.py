"""Sums of a launch's outputs times another tensor: what gates' gradients are made of."""
import cutlass
import cutlass.cute as cute
from cutlass import Constexpr, const_expr

import tkq.tile as tk
from tkq.linear_attention.config import CHUNK
from tkq.tile.maps import element


@cute.jit
def add_dots(dots: cute.Tensor, o: tk.RegTile, x: tk.RegTile, wg, less: Constexpr[bool] = False):
    """A chunk's sums over a warp's 16 rows, to shared memory; less: taken off those that are there. wg: the
    warpgroup."""
    for j in cutlass.range_constexpr(CHUNK // 4):
        i = j // 2 * 4 + j % 2
        mine = o.tensor[i] * element(x, i) + o.tensor[i + 2] * element(x, i + 2)
        for offset in (4, 8, 16):
            mine = mine + cute.arch.shuffle_sync_bfly(mine, offset=offset)
        if tk.lane_id() < 4:
            at = tk.first_col() + 8 * (j // 2) + j % 2, 4 * wg + tk.warp_id() % 4
            dots[at] = dots[at] - mine if const_expr(less) else mine


@cute.jit
def write_dots(g, dots: cute.Tensor, t, chunk, place):
    """Those of the four warps, over 64 columns, to global memory. place: (the warpgroup, its barrier)."""
    out, (wg, barrier) = g.dots, place
    tk.sync(barrier, tk.WARPGROUP)
    token = tk.thread_in_warpgroup()
    if token < CHUNK and chunk * CHUNK + token < g.tokens and t.part + wg < out.shape[0]:
        of_warps = [dots[token, 4 * wg + w] for w in range(4)]
        out[t.part + wg, t.batch, chunk * CHUNK + token, t.head] = sum(of_warps[1:], of_warps[0])
