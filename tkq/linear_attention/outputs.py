"""A chunk's outputs on their way to global memory."""
import cutlass.cute as cute

import tkq.tile as tk


@cute.jit
def put(to, tiles, x, at, barrier, wg):
    """What a warpgroup has, transposed, through shared memory: outputs before have left it. to: where, by TMA. at,
    barrier: the first warpgroup's place there and named barrier; the others have the next ones, and the next tiles."""
    tile, leader = tiles[wg], tk.first_warp_of_group()
    if leader:
        tk.store_wait()
    tk.sync(barrier + wg, tk.WARPGROUP)
    tk.store_T(tile, x)
    tk.publish()
    tk.sync(barrier + wg, tk.WARPGROUP)
    if leader:
        tk.store_async(to, tile, (*at[:3], at[3] + wg))
