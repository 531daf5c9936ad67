"""dQ policy "first_store": the first block to contribute to a tile stores its partial sum; later blocks add. Saves
zeroing the accumulator.

Zeroing writes the accumulator and, once it has left L2, reads it again: half as many bytes as the statistics and dQ
take together. Each dQ tile has a state word:

  0                       unclaimed
  1 + block               claimed by that block of keys
  + STORED for each warp  rows stored; at 4 * STORED the tile may be added to

A warp reads the word before it waits for dS and claims an unclaimed tile once it has dS. Claiming is per block: its
four warps synchronise at every wgmma, so per-warp claims could deadlock. Deadlock-free in any order of tasks: between a
claim and the last of its stores no warp waits for another block. The helper warps only convert finished tiles."""
import cutlass
import cutlass.cute as cute
from cutlass import Int32

import tkq.tile as tk
from tkq.attention.backward.dq_tile import DqTile, store_or_add
from tkq.attention.common.counters import load_acquire, wait_count, words_of

STORED = 1 << 24  # added to a tile's state word by each warp that has stored its rows
THERE = 4 * STORED


class FirstStoreDq:
    """What a dQ warpgroup does with one tile (``DqByQueryHead``). These roles of ``BackwardKernel`` are others:

      1 warpgroup (dQ)         read the tile's state word | claim it if unclaimed, else wait until it is stored
                               | dQ = dS K | store, and signal the word; or add | next tile .. | when a query head's
                               last tile has arrived, signal the head added | next head ..
      helper warps (warps 1-3) next tile to convert | wait until its head has been added | write its dQ | ..

      in global memory         begins   is added to by
      word, of a tile          0        the block that claims it (1 + its number); its dQ warps, once they have stored
                                        (STORED, 4 times)
      added, of a query head   0        every dQ warp of every block of keys (4 times the blocks)

    The words are what ``Counters`` has as ``ready``. The kernel before clears all of these, in each launch.
    """

    def __init__(self, tile: DqTile, scheduler):
        self.tile, self.scheduler = tile, scheduler

    @cute.jit
    def add_tile(self, g, s, t, dq, ring, head, m):
        number = self.scheduler.tile_number(g, t, head, m)
        seen = cute.arch.make_warp_uniform(load_acquire(words_of(g), Int32(number)))
        s.ds_pipe.wait(ring)
        first = self.is_first(g, t, Int32(number), seen)
        self.send_dq(g, s, dq, ring, number, first)
        self.signal_if(g, Int32(number), first)
        ring.advance()

    @cute.jit
    def is_first(self, g, t, number, seen):
        """Is the tile this block's, so that its rows are to be stored? Else all of them are there when this returns."""
        found, mine = seen, t.block + 1
        if seen < THERE:
            found = claimed(words_of(g), number, mine)
            if owner(found) != mine:
                wait_count(words_of(g), number, THERE)
        cute.arch.fence_proxy("async.global")
        return (seen < THERE) & (owner(found) == mine)

    @cute.jit
    def signal_if(self, g, number, first):
        """What this warp has stored is there."""
        if first:
            tk.store_wait(read=False)
            cute.arch.sync_warp()
            if tk.lane_id() == 0:
                cute.arch.red(words_of(g).iterator + number, Int32(STORED), op="add", dtype="s32", sem="release",
                              scope="gpu")

    def send_dq(self, g, s, dq, ring, number, first):
        """dS K, to or onto the accumulator's tile ``number``."""
        warp = tk.warp_id() % 4

        def send(address):
            self.tile.send_rows(s.dq[None, None, None, warp], dq,
                                lambda src, size: store_or_add(first, address + warp * size, src, size))

        self.tile.each_part(g, s, dq, ring, number, send)


@cute.jit
def claimed(words, number, mine):
    """The tile's state word; ``mine`` where it was unclaimed. A whole warp."""
    found = Int32(0)
    if tk.lane_id() == 0:
        found = Int32(cute.arch.atomic_cas(words.iterator + number, cmp=Int32(0), val=mine, sem="relaxed", scope="gpu"))
    found = cute.arch.shuffle_sync(found, 0)
    return cutlass.select_(found == 0, mine, found)


def owner(word):
    return word & (STORED - 1)
