"""Outputs of two neighbouring heads, added up where they are made: the part of `TokenRows` that knows of them."""
from typing import Any, NamedTuple

import cutlass
import cutlass.cute as cute
from cutlass import Float32

import tkq.tile as tk
from tkq.linear_attention.config import CHUNK
from tkq.tile.maps import element

WORDS = 4  # that a thread sends at once


class Exchanged(NamedTuple):
    """inbox: (4, 128, pieces, warpgroups), what those of the other block send, 16 bytes of each thread in a piece.
    pipe: full where it is there, empty where it is sent from; a stage for each warpgroup."""

    inbox: cute.Tensor
    pipe: tk.Pipe


class HeadPairs:
    """Summed, the blocks of two neighbouring heads are a cluster. A warpgroup of the outputs keeps the half of the
    columns that has its block's number, which comes first in its tiles, sends the other half, in 16 bits, to the same
    threads of the other block, and adds what it is sent, in fp32. Neither order nor time changes a sum of two.
    Deadlock-free: a chunk's half is given before the other one is waited for, and waits but for that of two chunks
    before to have been taken."""

    def __init__(self, there: bool, dtype: Any):
        self.there, self.dtype = there, dtype
        self.bytes = 2 * CHUNK * CHUNK
        self.cluster = 2 if there else 1

    def shared(self, al: tk.SharedAllocator, groups: int) -> Any:
        """Room for it; None without."""
        if not self.there:
            return None
        layout = cute.make_layout((WORDS, tk.WARPGROUP, self.bytes // (4 * WORDS * tk.WARPGROUP), groups))
        return Exchanged(al.allocate_tensor(Float32, layout, 128), al.pipe(groups, self.bytes, 4))

    def initialise(self, shared):
        """One thread, inside `init_block`."""
        if self.there:
            shared.pipe.init()

    def columns(self, t, n: int):
        """Which 64 of V's columns a block's n-th ones are."""
        return n ^ t.head % 2 if self.there else n

    def pipes(self, shared):
        """Those that outputs have a ring of."""
        return (shared.pipe,) if self.there else ()

    def end(self):
        """No block leaves while the other may still write to it."""
        if self.there:
            tk.cluster_sync()

    @cute.jit
    def give(self, shared, t, x: tk.RegTile, ring):
        """The other half of x's columns is on its way to the other block. ring: of the chunk; a stage is a
        warpgroup's."""
        other, inbox, pipe = t.head % 2 ^ 1, shared.inbox[None, None, None, ring.stage], shared.pipe
        full = pipe.full[ring.stage]
        sent = tk.rt(CHUNK, self.dtype)
        tk.copy(sent, tk.columns(x, CHUNK, CHUNK))
        words = cute.recast_tensor(sent.tensor, Float32)
        pipe.acquire_empty(ring)
        for i in cutlass.range_constexpr(cute.size(words) // WORDS):
            to = inbox[None, tk.thread_in_warpgroup(), i].iterator
            tk.store_remote(to, [words[WORDS * i + k] for k in range(WORDS)], full, other)
        if tk.warp_id() % 4 == 0:
            tk.expect_bytes(full, self.bytes)

    @cute.jit
    def take(self, shared, t, x: tk.RegTile, ring):
        """The own half of x's columns += what the other block gives."""
        other, inbox, pipe = t.head % 2 ^ 1, shared.inbox[None, None, None, ring.stage], shared.pipe
        found = tk.rt(CHUNK, self.dtype)
        words = cute.recast_tensor(found.tensor, Float32)
        tk.wait(pipe.full[ring.stage], ring.phase)
        for i in cutlass.range_constexpr(cute.size(words) // WORDS):
            piece = inbox[None, tk.thread_in_warpgroup(), i].load()
            for k in cutlass.range_constexpr(WORDS):
                words[WORDS * i + k] = piece[k]
        tk.arrived(found)
        tk.arrive_at(pipe.empty[ring.stage], other)
        for i in cutlass.range_constexpr(CHUNK // 2):
            x.tensor[i] = x.tensor[i] + element(found, i)
