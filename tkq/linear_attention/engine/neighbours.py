"""Outputs of neighbouring heads, added up where they are made: the part of `LinearAttention` that knows of them."""
from typing import Any, NamedTuple, Optional

import cutlass
import cutlass.cute as cute
from cutlass import Constexpr, const_expr

import tkq.tile as tk
from tkq.linear_attention.spec import LinearSpec
from tkq.tile.maps import element


class NeighbourShared(NamedTuple):
    """inbox: what the other block sends, and its pipe: full where it is, empty where it is sent from. less: for each of
    the state's warpgroups, when what is taken off has come. Each None where it is not needed."""

    inbox: Optional[tk.SharedTile]
    pipe: Optional[tk.Pipe]
    less: Optional[tk.Semaphore]


class Neighbours:
    """Summed, the blocks of two neighbouring heads, which share a query or a key, are a cluster, and their outputs are
    those of both:

        first head     columns 0 .. 63: kept    columns 64 .. 127: sent ->
        second head    columns 0 .. 63: sent    columns 64 .. 127: kept

    A warpgroup of the state sends what it has to that of the other block, in 16 bits, or adds to its own, in fp32, what
    it is sent, and writes it. What one sends is half of what a head has, and neither order nor time changes a sum of
    two. Deadlock-free: a block sends a chunk's outputs when it has computed them, and waits but for the other block to
    have taken those before.

    With less, another tensor of the outputs' shape is taken off, or with dot added, in fp32: it comes, a chunk
    before it is needed, to where the outputs are about to be."""

    def __init__(self, spec: LinearSpec, tile: tk.st, barrier: int):
        """tile: of outputs. barrier: the first of those of the state's warpgroups."""
        self.summed, self.less, self.tile, self.barrier = spec.summed, spec.less, tile, barrier
        self.there = self.summed or self.less
        self.sign = 1.0 if spec.dot else -1.0
        self.cluster = 2 if self.summed else 1

    # ---- host ----------------------------------------------------------------------------------

    def launched(self):
        """The launch's clusters: blocks of heads."""
        return [1, 2, 1] if self.summed else None

    def outputs(self, heads):
        """How many heads the outputs have."""
        return heads // self.cluster

    # ---- device --------------------------------------------------------------------------------

    def shared(self, al: tk.SharedAllocator, groups: int) -> Any:
        """Room for it in shared memory; None without."""
        if not self.there:
            return None
        inbox, pipe = (al.tile(self.tile), al.pipe(1, self.tile.bytes, 4)) if self.summed else (None, None)
        return NeighbourShared(inbox, pipe, al.semaphores(groups) if self.less else None)

    def initialise(self, shared, groups: int):
        """One thread, inside `init_block`."""
        if self.summed:
            shared.pipe.init()
        if self.less:
            for wg in range(groups):
                tk.init(shared.less[wg], 1)

    def end(self):
        """No block leaves while the other may still write to it."""
        if self.summed:
            tk.cluster_sync()

    def head(self, t):
        """Of the outputs."""
        return t.head // 2 if self.summed else t.head

    def ring(self) -> Any:
        """How many outputs a warpgroup has written, or sent; None without."""
        return tk.ring(1) if self.there else None

    def keeps(self, t, wg):
        """Does a warpgroup of the state write outputs, of both heads?"""
        return t.head % 2 == wg % 2

    @cute.jit
    def ask(self, g, s, t, chunk, wg):
        """What is taken off a chunk's outputs is on its way, to where those before have left."""
        if const_expr(self.less):
            if tk.warp_id() % 4 == 0 and (not self.summed or self.keeps(t, wg)):
                tk.store_wait()
                sem = s.neighbours.less[wg]
                tk.expect_bytes(sem, self.tile.bytes)
                tk.load_async(s.o[wg], g.less, (t.batch, self.head(t), chunk, t.part + wg), sem)

    @cute.jit
    def give(self, s, t, x: tk.RegTile, at: Any):
        """x, a chunk's outputs of this head, to the other block, if it is that which writes them. at: (the warpgroup,
        the ring). What is done from here to `put` is done while they are on their way."""
        wg, ring = at
        if const_expr(self.summed):
            if not self.keeps(t, wg):
                self.send(s.neighbours, s.o[wg], t, x, (self.barrier + wg, ring))

    @cute.jit
    def put(self, s, t, x: tk.RegTile, spare: tk.RegTile, at: Any, put: Constexpr, less: Constexpr[bool]):
        """The same outputs, with those of the other head, to global memory by `put`, if they were not given. spare:
        registers of 16 bits. less: is something taken off these?"""
        wg, ring = at
        if const_expr(not self.there):
            put(x)
        elif const_expr(not self.summed):
            self.take_off(s, x, spare, at, less)
            put(x)
        else:
            if self.keeps(t, wg):
                self.take_off(s, x, spare, at, less)
                self.receive(s.neighbours, t, x, spare, ring)
                put(x)
        if const_expr(self.there):
            ring.advance()

    @cute.jit
    def take_off(self, s, x: tk.RegTile, spare: tk.RegTile, at: Any, less: Constexpr[bool]):
        if const_expr(self.less and less):
            wg, ring = at
            tk.wait(s.neighbours.less[wg], ring.phase)
            tk.load_T(spare, s.o[wg])
            for i in cutlass.range_constexpr(cute.size(x.tensor)):
                x.tensor[i] = x.tensor[i] + self.sign * element(spare, i)

    @cute.jit
    def receive(self, shared, t, x: tk.RegTile, spare: tk.RegTile, ring):
        """The other head's outputs are added."""
        full, empty = shared.pipe.full[0], shared.pipe.empty[0]
        if tk.warp_id() % 4 == 0:
            tk.expect_bytes(full, self.tile.bytes)
        tk.wait(full, ring.phase)
        tk.load_T(spare, shared.inbox[0])
        cute.arch.sync_warp()
        tk.arrive_at(empty, self.other(t))
        for i in cutlass.range_constexpr(cute.size(x.tensor)):
            x.tensor[i] = x.tensor[i] + element(spare, i)

    @cute.jit
    def send(self, shared, tile: tk.SharedTile, t, x: tk.RegTile, at: Any):
        """By way of a tile of this block, which those before have left. at: (the warpgroup's barrier, the ring)."""
        barrier, ring = at
        shared.pipe.acquire_empty(ring)
        tk.store_T(tile, x)
        tk.publish()
        tk.sync(barrier, tk.WARPGROUP)
        if tk.warp_id() % 4 == 0:
            with cute.arch.elect_one():
                tk.bulk_send(shared.inbox[0].tensor.iterator.toint(), tile.tensor.iterator.toint(), self.tile.bytes,
                             shared.pipe.full[0].ptr.toint(), self.other(t))

    def other(self, t):
        """The other block, by its number in the cluster."""
        return t.head % 2 ^ 1
