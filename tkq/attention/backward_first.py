"""Attention's backward without zeroes for dQ: who comes first with a part of a tile's dQ stores it, the others add.

Zeroes are written and, when they have left L2, read again before the first part is added: half as many bytes as the
statistics and dQ take together. Who is first is not known before: a tile's word says which block of keys has claimed it
and how many of that block's warps have stored their rows. A warp asks for it before it waits for dS, and where the tile
is nobody's it claims it once it has dS: for its block, not for itself, as the block's four warps meet at each product.
Between that and the last of their stores none of them waits for another block. So nobody waits for ever, in whatever
order tasks come."""
from typing import Any, Optional

import cuda.bindings.driver as cuda
import cutlass
import cutlass.cute as cute
from cutlass import Constexpr, Float32, Int32, Int64

import tkq.tile as tk
from tkq.attention.backward import build as build_alike
from tkq.attention.backward_add import BackwardAdding, store_or_add
from tkq.attention.backward_first_config import FirstConfig
from tkq.attention.backward_grouped import GroupedBackward
from tkq.attention.backward_post import BackwardPost, load_part
from tkq.attention.backward_sequences import Equal, stores, tile_order
from tkq.attention.backward_spec import BackwardSpec
from tkq.attention.backward_split import await_count, load_acquire
from tkq.attention.backward_state import Numbers
from tkq.attention.launch import BackwardOperands, Gradients, Sequences

STORED = 1 << 24  # a tile's word: 0; once it is claimed, 1 + the block, and so much for each warp that has stored
THERE = 4 * STORED


class FirstStores(GroupedBackward):
    """``GroupedBackward`` with nobody in the background. ``Globals.background`` is the tiles' words: int32, zero in the
    beginning."""

    def __init__(self, spec: BackwardSpec, config: FirstConfig):
        super().__init__(spec, config)
        self.background = None

    # ---- host ----------------------------------------------------------------------------------

    @cute.jit
    def __call__(self, operands: BackwardOperands, gradients: Gradients, workspace: cute.Tensor,
                 sequences: Optional[Sequences], numbers: Numbers, stream: cuda.CUstream):
        """As ``BackwardBase``'s."""
        GroupedBackward.__call__(self, operands, gradients, workspace, sequences, numbers, stream)
        q, dq = operands.q, gradients.dq
        places = Equal(q.shape[1], operands.k.shape[1], q.shape[0])
        parts = self.parts_of(workspace, places.slots(False, self.config.tile) * q.shape[2] * q.shape[0], 0)
        words = words_of(parts.counters)
        BackwardPostOfFirst(self.spec, self.config)(parts.acc, words, dq, places, numbers.scale, stream)

    def in_background(self, dq, counters, lead, processors):
        return words_of(counters)

    # ---- device --------------------------------------------------------------------------------

    def first_role(self, g, s, registers):
        return tk.Role(lambda _: self.producer(g, s), registers, warps=1)

    queries = BackwardAdding.queries

    @cute.jit
    def add_task(self, g, s, t, again: Constexpr, dq, ring, kv):
        tk.wait(s.kv_full[0], kv.phase)

        def add(_, h, m):
            number = self.tile_number(g, t, self.query_head(g, t, h), m)
            self.store_or_add_tile(g, s, t, dq, ring, number)

        self.each_tile(g, t, add)
        self.done_with(s, 0)
        self.next_keys(kv)

    @cute.jit
    def store_or_add_tile(self, g, s, t, dq, ring, number):
        seen = cute.arch.make_warp_uniform(load_acquire(self.words(g), Int32(number)))
        s.ds_pipe.wait(ring)
        first = self.is_first(g, t, Int32(number), seen)
        self.send_dq(g, s, dq, ring, number, first)
        self.tell_if(g, Int32(number), first)
        ring.advance()

    def words(self, g):
        return g.background

    @cute.jit
    def is_first(self, g, t, number, seen):
        """Is the tile this block's, so that its rows are to be stored? Else all of them are there when this returns."""
        found, mine = seen, t.block + 1
        if seen < THERE:
            found = claimed(self.words(g), number, mine)
            if owner(found) != mine:
                await_count(self.words(g), number, THERE)
        cute.arch.fence_proxy("async.global")
        return (seen < THERE) & (owner(found) == mine)

    @cute.jit
    def tell_if(self, g, number, first):
        """What this warp has stored is there."""
        if first:
            tk.store_wait(read=False)
            cute.arch.sync_warp()
            if tk.lane_id() == 0:
                cute.arch.red(self.words(g).iterator + number, Int32(STORED), op="add", dtype="s32", sem="release",
                              scope="gpu")

    def send_dq(self, g, s, dq, ring, number, first):
        """dS K, to or onto the accumulator's tile ``number``."""
        warp = tk.warp_id() % 4

        def send(address):
            self.send_rows(s.dq[None, None, None, warp], dq,
                           lambda room, size: store_or_add(first, address + warp * size, room, size))

        self.each_part(g, s, dq, ring, number, send)


class BackwardPostOfFirst(BackwardPost):
    """``BackwardPost``; dQ of a tile that is nobody's, as it sees no key, is 0."""

    @cute.jit
    def __call__(self, acc: cute.Tensor, words: cute.Tensor, dq: cute.Tensor, places: Any, scale: Float32,
                 stream: cuda.CUstream):
        self.kernel(acc, words, stores(dq, self.out, False), places, dq.shape[-2], scale).launch(
            grid=[cute.size(acc, mode=[0]), 1, 1], block=[tk.WARPGROUP * self.parts[0] * self.parts[1], 1, 1],
            stream=stream, use_pdl=True)

    @cute.kernel
    def kernel(self, acc: cute.Tensor, words: cute.Tensor, dq: tk.gl, places: Any, heads: Int32, scale: Float32):
        # the last heads first: they are in L2
        n, part = cute.size(acc, mode=[0]) - Int32(cute.arch.block_idx()[0]) - 1, tk.warpgroup_id()
        out = tk.SharedAllocator().tile(self.out, self.parts[0] * self.parts[1])[part]
        at = places.at(False, self.config.tile, *tile_order(places, self.config.tile, n, heads))
        cute.arch.griddepcontrol_wait()
        x, (rows, cols) = tk.rt_fl(self.config.dq_cols), self.parts
        tk.zero(x)
        if words[n] > 0:
            load_part(x, acc[Int64(n), None], part)
        tk.mul(x, x, scale)
        tk.store(out, x)
        tk.publish()
        tk.sync(1 + part, tk.WARPGROUP)
        if tk.first_warp_of_group():
            tk.store_async(dq, out, (at.batch_q, at.head, at.number * rows + part // cols, part % cols))
            tk.store_wait()


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


def words_of(counters):
    """What is behind the number of the next task."""
    return cute.make_tensor(counters.iterator + 1, cute.make_layout((cute.size(counters) - 1,)))


def build(spec: BackwardSpec, config: FirstConfig):
    """The kernels and their fake arguments, as ``tkq.attention.backward.build``."""
    return FirstStores(spec, config), build_alike(spec, config)[1]
