"""Attention's backward without zeroes for dQ: who comes first with a part of a tile's dQ stores it, the others add.

Zeroes are written and, when they have left L2, read again before the first part is added: half as many bytes as the
statistics and dQ take together. Who is first is not known before: a tile's word says which block of keys has claimed it
and how many of that block's warps have stored their rows. A warp asks for it before it waits for dS, and where the tile
is nobody's it claims it once it has dS: for its block, not for itself, as the block's four warps meet at each product.
Between that and the last of their stores none of them waits for another block. So nobody waits for ever, in whatever
order tasks come. The background, which has no zeroes to make, only finishes dQ: nothing waits for it."""
import cutlass
import cutlass.cute as cute
from cutlass import Int32

import tkq.tile as tk
from tkq.attention.backward.dkv import build as build_alike
from tkq.attention.backward.dq_atomic import store_or_add
from tkq.attention.backward.dq_first_store_config import FirstConfig
from tkq.attention.backward.gqa import GroupedBackward
from tkq.attention.backward.helper_warps import FinishesTiles
from tkq.attention.backward.spec import BackwardSpec
from tkq.attention.common.counters import await_count, load_acquire, words_of

STORED = 1 << 24  # a tile's word: 0; once it is claimed, 1 + the block, and so much for each warp that has stored
THERE = 4 * STORED


class FirstStores(GroupedBackward):
    """See ``AttentionBackward``, of which these roles are others:

      1 warpgroup (dQ)         ask for the tile's word | claim it, if it is nobody's, else wait until the tile is there
                               | dQ = dS K | stored, and the word told; or added | next tile .. | when a query head's
                               last tile has arrived, sign the head off | next head ..
      background (warps 1-3)   the next tile to finish | wait until all have signed its head off | write its dQ | ..

      in global memory         begins   is added to by
      word, of a tile          0        the block that claims it (1 + its number); its dQ warps, once they have stored
                                        (STORED, 4 times)
      added, of a query head   0        every dQ warp of every block of keys (4 times the blocks)

    The words are what ``Counters`` has as ``ready``. The kernel before clears all of these, in each launch.
    """

    def __init__(self, spec: BackwardSpec, config: FirstConfig):
        super().__init__(spec, config)
        self.background = FinishesTiles(spec, config, self.turn)

    @cute.jit
    def add_tile(self, g, s, t, dq, ring, head, m):
        number = self.tile_number(g, t, head, m)
        seen = cute.arch.make_warp_uniform(load_acquire(words_of(g), Int32(number)))
        s.ds_pipe.wait(ring)
        first = self.is_first(g, t, Int32(number), seen)
        self.send_dq(g, s, dq, ring, number, first)
        self.tell_if(g, Int32(number), first)
        ring.advance()

    @cute.jit
    def is_first(self, g, t, number, seen):
        """Is the tile this block's, so that its rows are to be stored? Else all of them are there when this returns."""
        found, mine = seen, t.block + 1
        if seen < THERE:
            found = claimed(words_of(g), number, mine)
            if owner(found) != mine:
                await_count(words_of(g), number, THERE)
        cute.arch.fence_proxy("async.global")
        return (seen < THERE) & (owner(found) == mine)

    @cute.jit
    def tell_if(self, g, number, first):
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
            self.send_rows(s.dq[None, None, None, warp], dq,
                           lambda room, size: store_or_add(first, address + warp * size, room, size))

        self.each_part(g, s, dq, ring, number, send)


@cute.jit
def claimed(words, number, mine):
    """What a tile's word is, ``mine`` if it was nobody's. A whole warp."""
    found = Int32(0)
    if tk.lane_id() == 0:
        found = Int32(cute.arch.atomic_cas(words.iterator + number, cmp=Int32(0), val=mine, sem="relaxed", scope="gpu"))
    found = cute.arch.shuffle_sync(found, 0)
    return cutlass.select_(found == 0, mine, found)


def owner(word):
    return word & (STORED - 1)


def build(spec: BackwardSpec, config: FirstConfig):
    """The kernels and their fake arguments, as ``tkq.attention.backward.dkv.build``."""
    return FirstStores(spec, config), build_alike(spec, config)[1]
