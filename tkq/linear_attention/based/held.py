"""Register tiles to and from global memory as threads hold them: (elements, threads), each thread its own column."""
import cutlass.cute as cute

import tkq.tile as tk


def put_held(to: cute.Tensor, tiles):
    """What each thread holds of tiles to (elements, threads)."""
    thread, first = tk.thread_in_warpgroup(), 0
    for tile in tiles:
        for i in range(cute.size(tile.tensor)):
            to[first + i, thread] = tile.tensor[i]
        first += cute.size(tile.tensor)


def add_held(tiles, x: cute.Tensor):
    """Likewise tiles += x."""
    thread, first = tk.thread_in_warpgroup(), 0
    for tile in tiles:
        for i in range(cute.size(tile.tensor)):
            tile.tensor[i] = tile.tensor[i] + x[first + i, thread]
        first += cute.size(tile.tensor)
