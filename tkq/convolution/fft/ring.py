"""The filters' spectra in shared memory, of the heads that a block's tiles belong to, one after the other."""
import cutlass
import cutlass.cute as cute
from cutlass import Float16, Float32, Int32

import tkq.tile as tk
from tkq.tile import vectors, woven


class SpectraRing:
    """Heads count from the block's first one on. Each has a place, by turns; as long as there is room for two, the next
    one's is loaded while the one before is used, and warpgroups go on to it by themselves.

    Warp 0 loads, between its warpgroup's tiles; warps say when they are done with a head. It never waits for one that
    waits for it: a head is loaded before the ones behind it, once all have gone on from the one that had its place, for
    which they need no load but those before."""

    def __init__(self, spec, config):
        self.spec, self.warps = spec, 4 * config.warpgroups
        self.places = 2 if spec.blocks == 1 else 1
        self.words, self.dtype = spec.head_words, Float32 if spec.exact else Float16

    def allocate(self, al):
        self.memory = al.allocate_tensor(Int32, cute.make_layout((self.words, self.places)), 16)
        self.full, self.empty = al.semaphores(self.places), al.semaphores(self.places)

    def initialise(self):
        """By one thread."""
        for i in range(self.places):
            tk.init(self.full[i], 1)
            tk.init(self.empty[i], self.warps)

    @cute.jit
    def begin(self, spectra: cute.Tensor, first, last):
        """The block's first and last head; their loads begin."""
        self.spectra, self.first, self.last = spectra, first, last - first
        self.at, self.asked = cute.make_rmem_tensor((1,), Int32), cute.make_rmem_tensor((1,), Int32)
        self.at[0], self.asked[0] = Int32(0), Int32(-1)
        for n in cutlass.range_constexpr(self.places):
            self.ask(Int32(n))

    @cute.jit
    def ask(self, to):
        """Warp 0: the load of a head, if there is one and it has not been asked for."""
        asked = self.asked
        if tk.warp_id() == 0:
            if asked[0] < cutlass.min(to, self.last):
                n = asked[0] + 1
                place, turn = n % self.places, n // self.places
                if turn > 0:
                    tk.wait(self.empty[place], (turn - 1) & 1)
                tk.expect_bytes(self.full[place], 4 * self.words)
                with cute.arch.elect_one():
                    there = vectors.run_at(self.spectra, (self.first + n, 0), self.words).iterator.toint()
                    tk.bulk_load(self.memory[None, place].iterator.toint(), there, 4 * self.words,
                                 self.full[place].ptr.toint())
                asked[0] = n

    @cute.jit
    def enter(self, head):
        """A warpgroup goes on to a head, the one that it is at or the next one; its table is there then."""
        self.ask(self.at[0] + self.places - 1)
        at = self.at
        if at[0] < head - self.first:
            self.next(at)
        self.arrived(at)

    def arrived(self, at):
        """Its table is there."""
        tk.wait(self.full[at[0] % self.places], (at[0] // self.places) & 1)

    @cute.jit
    def leave(self):
        """A warpgroup has no more tiles: of those behind its last one there are fewer than a head has."""
        at = self.at
        if at[0] < self.last:
            self.next(at)

    @cute.jit
    def next(self, at):
        """From a head whose table is there, be it one of which the warpgroup has no tile: a turn of its place is known
        by parity alone, so that with this head's load on its way the next one's would seem to be there."""
        self.arrived(at)
        tk.arrive(self.empty[at[0] % self.places])
        at[0] = at[0] + 1
        self.ask(at[0])

    def table(self, part: int):
        """Of the head that the warpgroup is at, `tkq.tile.woven.woven_factors`."""
        there = self.memory.iterator + (self.at[0] % self.places * self.words + part * self.spec.table_words)
        there = cute.recast_ptr(there.align(16), dtype=self.dtype)
        return cute.make_tensor(there, woven.woven_factors(self.dtype))

    def scale(self):
        """What products with it are multiplied by."""
        return self.memory[self.words - 4, self.at[0] % self.places].bitcast(Float32)
