"""The kernel that lists the tiles of ragged queries: each is planned as a sequence."""
from typing import NamedTuple

import cuda.bindings.driver as cuda
import cutlass
import cutlass.cute as cute
from cutlass import Int32

from tkq.attention.decode import words
from tkq.runtime.compile import fake


class Listing(NamedTuple):
    """queries: of a tile, at most. total: rows of q. tiles: that there may be. at: where the list begins in the
    plan."""

    queries: Int32
    total: Int32
    tiles: Int32
    at: Int32


class Lister:
    """A thread finds one tile: the sequence that it is of, by the tiles of those before, its first query and how many.

    A tile's keys are those up to its last query's own. A sequence whose queries are not rows of q has none. Of the last
    tile the length is -1 where there is such a sequence: the planner says so."""

    THREADS = 128

    def fake_arguments(self):
        ints = lambda: fake.tensor("int32", (fake.sym(),), align=4)
        return ints(), (ints(), ints(), ints()), Listing(*[Int32(1)] * len(Listing._fields))

    @cute.jit
    def __call__(self, cu: cute.Tensor, others: tuple, listing: Listing, stream: cuda.CUstream):
        seqlens, lengths, plan = others
        self.kernel(cu, seqlens, lengths, plan, listing).launch(
            grid=[cute.ceil_div(listing.tiles, self.THREADS), 1, 1], block=[self.THREADS, 1, 1], stream=stream)

    @cute.kernel
    def kernel(self, cu: cute.Tensor, seqlens: cute.Tensor, lengths: cute.Tensor, plan: cute.Tensor, listing: Listing):
        self.thread(cute.arch.block_idx()[0] * self.THREADS + cute.arch.thread_idx()[0], (cu, seqlens, lengths, plan),
                    listing)

    @cute.jit
    def thread(self, tile: Int32, tensors: tuple, listing: Listing):
        """What one thread does: the tests run it on a CPU, one after the other."""
        cu, seqlens, lengths, plan = tensors
        if tile < listing.tiles:
            before, bad, length, found = Int32(0), Int32(0), Int32(0), [Int32(0)] * words.LISTED
            source, row, queries = found
            for b in cutlass.range(seqlens.shape[0], unroll=1):
                first, end = cu[b], cu[b + 1]
                fine = (first >= 0) & (first <= end) & (end <= listing.total)
                many = cutlass.select_(fine, (end - first + listing.queries - 1) // listing.queries, Int32(0))
                if tile >= before and tile < before + many:
                    source, row = b, first + (tile - before) * listing.queries
                    queries = cutlass.min(end - row, listing.queries)
                    own = seqlens[b] - (end - row - queries)
                    length = cutlass.select_(seqlens[b] < 0, Int32(-1), cutlass.max(own, 0))
                before += many
                bad = cutlass.select_(fine, bad, Int32(1))
            if bad != 0 and tile == listing.tiles - 1:
                length = Int32(-1)
            lengths[tile] = length
            at = listing.at + tile * words.LISTED
            plan[at], plan[at + 1], plan[at + 2] = source, row, queries
