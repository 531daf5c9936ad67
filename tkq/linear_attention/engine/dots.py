"""Sums of a launch's outputs times another tensor: what gates' gradients are made of."""
import cutlass
import cutlass.cute as cute
from cutlass import Float32

import tkq.tile as tk
from tkq.linear_attention.config import CHUNK


@cute.jit
def put_dots(g, dots: cute.Tensor, t, c, chunk, place):
    """A chunk's sums over a warpgroup's 64 columns: over a warp's rows by shuffles, over the warps through shared
    memory. place: (the warpgroup, its barrier)."""
    out, (wg, barrier) = g.dots, place
    for j in cutlass.range_constexpr(CHUNK // 4):
        i = j // 2 * 4 + j % 2
        mine = c.o.tensor[i] * Float32(c.x.tensor[i]) + c.o.tensor[i + 2] * Float32(c.x.tensor[i + 2])
        for offset in (4, 8, 16):
            mine = mine + cute.arch.shuffle_sync_bfly(mine, offset=offset)
        if tk.lane_id() < 4:
            dots[tk.first_col() + 8 * (j // 2) + j % 2, 4 * wg + tk.warp_id() % 4] = mine
    tk.sync(barrier, tk.WARPGROUP)
    token = tk.thread_in_warpgroup()
    if token < CHUNK and chunk * CHUNK + token < g.tokens and t.part + wg < out.shape[0]:
        of_warps = [dots[token, 4 * wg + w] for w in range(4)]
        out[t.part + wg, t.batch, chunk * CHUNK + token, t.head] = sum(of_warps[1:], of_warps[0])
