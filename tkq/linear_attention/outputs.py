"""A chunk's outputs on their way to global memory."""
import cutlass.cute as cute
from cutlass import Constexpr, const_expr

import tkq.tile as tk


@cute.jit
def put(to, tiles, x, at, barrier, wg, free: Constexpr[bool] = False):
    """What a warpgroup has, transposed, through shared memory. to: where, by TMA. at, barrier: the first warpgroup's
    place there and named barrier; the others have the next ones, and the next tiles. free: the warpgroup has waited
    for outputs before (`ready`)."""
    tile = tiles[wg]
    if const_expr(not free):
        ready(barrier + wg)
    tk.store_T(tile, x)
    tk.publish()
    tk.sync(barrier + wg, tk.WARPGROUP)
    if tk.first_warp_of_group():
        tk.store_async(to, tile, (*at[:3], at[3] + wg))


@cute.jit
def put_double_buffered(to, tiles, x, at, barrier, wg):
    """Likewise, double-buffered: a warpgroup has two tiles, for even chunks and for odd ones, and its warps meet once.
    """
    tile = tiles[2 * wg + at[2] % 2]
    tk.store_T(tile, x)
    tk.publish()
    if tk.first_warp_of_group():
        tk.store_wait()  # what the chunk before has sent: its tile is that of the next chunk
    tk.sync(barrier + wg, tk.WARPGROUP)
    if tk.first_warp_of_group():
        tk.store_async(to, tile, (*at[:3], at[3] + wg))


@cute.jit
def ready(barrier):
    """What a warpgroup has sent has left shared memory. barrier: its named barrier."""
    if tk.first_warp_of_group():
        tk.store_wait()
    tk.sync(barrier, tk.WARPGROUP)
