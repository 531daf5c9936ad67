"""The four producer warps of float8 caches: rows of 656 bytes as they are into a tile's stage, and widened there."""
import cutlass
import cutlass.cute as cute
from cutlass import Int32, Int64, Uint32

import tkq.tile as tk
from tkq.attention.decode import words
from tkq.attention.decode.copies import copy16
from tkq.attention.decode.pages import Pages
from tkq.attention.decode.plan import ROWS
from tkq.attention.decode.walk import END, Walk, X
from tkq.attention.mla.copies import GROUPS, PANEL, WARP_ROWS
from tkq.attention.mla.float8 import (
    HALF_BYTES,
    ROTATED,
    SCALE_BYTES,
    SCALES,
    WAITING,
    load8_shared,
    raw_chunk,
    row_copied,
    rows_in_stage,
    scales_of,
    store8_shared,
    widen_half,
)
from tkq.attention.mla.indices import Indices
from tkq.attention.mla.producer import announce, note
from tkq.attention.mla.tiles import lane_now, own


def size_of(address):
    """Bytes of a copy of 16: none of a row that is not there."""
    return cutlass.select_(address != Int64(0), Int32(16), Int32(0))


class Float8Producer:
    """As `mla.producer`, in two steps. A warp copies both halves of its rows as they are into the stages that will have
    them widened, 256 bytes of a row to where its last columns belong; when a half has landed, the warp widens it in its
    place. The rotated columns go straight into their tile, and are handed over with the right half. All rings have one
    counter, and where the next block's rows lie waits in shared memory: no register holds it while rows are widened.

      before  rows are looked up, and their scales copied | begin(first): the left half is copied
      block i right(i) is copied | rows of i + 1 are looked up | left(i) is widened | begin(i + 1) | right(i) is widened

    Deadlock-free: begin(i + 1) waits for what reads left(i - 2), and so for the scores of block i - 1, whose halves
    were all handed over before.
    """

    def __init__(self, spec, config):
        self.pages = (Indices if spec.sparse else Pages)(spec, config)
        self.spec, self.keys, self.walk = spec, Pages(spec, config), Walk(spec)

    @cute.jit
    def run(self, g, smem):
        left, announced = smem.left_pipe.ring(), smem.segment_pipe.ring()
        at = self.walk.begin(g)
        while at[X] < at[END]:
            s = own(g, self.walk.segment(g, at))._replace(head=Int32(0))
            if s.first < s.end:
                slot = announced.stage
                announce(smem, announced, (s.first, s.end, s.batch, s.tile, s.length, Int32(s.inside), s.splits,
                                           self.walk.slot(g, s, s.split)))
                note(smem, slot, Int32(0))
                found, _, _ = self.pages.find(g, s, s.first)
                self.look(g, smem, s, (found, s.first, slot, left))
                found, _, _ = self.pages.find(g, s, s.first + 1)
                self.begin(smem, left)
                for block in cutlass.range(s.first, s.end, unroll=1):
                    pair = self.pair(smem, left)
                    smem.right_pipe.acquire_empty(pair)
                    rows = self.rows(smem, lane_now())
                    self.fetch(smem.right, pair.stage, 1, rows)
                    self.rotated(smem, pair.stage, rows)
                    cute.arch.cp_async_commit_group()
                    self.look(g, smem, s, (found, block + 1, slot, after(left)))
                    found, _, _ = self.pages.find(g, s, block + 2)
                    self.widen(smem, 0, pair.stage, (smem.left, smem.left_pipe, left))
                    if block + 1 < s.end:
                        self.begin(smem, after(left))
                    else:
                        cute.arch.cp_async_commit_group()
                    self.widen(smem, 1, pair.stage, (smem.right, smem.right_pipe, pair))
                    left.advance()
            self.walk.advance(g, at, s)
        announce(smem, announced, (Int32(-1),))

    def pair(self, smem, left):
        """The place of a block in all rings but that of left halves."""
        return tk.Ring(left.count, smem.right_pipe.stages)

    @cute.jit
    def look(self, g, smem, s, of):
        """Of a block: which of the warp's rows are there; their addresses, 0 where there is none, to shared memory; and
        copies of their scales, of both halves. of: what was found of this lane's row, the block, the segment's slot,
        the place in the ring of left halves. The scores have read what they are told here of the block three before:
        the right half of that one was given back. A table that lies behind the segment's end is one of the same
        task."""
        found, block, slot, left = of
        lane, key, plan, told = tk.lane_id(), self.keys.key(block), g.plan, smem.there
        there, fault = self.pages.judge(g, found, (lane < WARP_ROWS) & (key < s.length))
        if cute.arch.vote_any_sync(fault):
            note(smem, slot, Int32(1))
            if lane == 0:
                plan[words.BAD_PAGE] = Int32(1)
        rows = cute.arch.vote_ballot_sync(there)
        if lane == 0:
            told[tk.warp_id() % 4, left.stage] = rows
        page, row = self.place(g, found, key)
        address = self.keys.address(g.k, s, page, row, there)
        cute.arch.sync_warp()  # all lanes have read those of the block before
        if lane < WARP_ROWS:
            store8_shared(self.address_of(smem, lane), address)
        if (lane < WARP_ROWS) & (block < s.end):
            copy16(scales_of(smem, self.pair(smem, left).stage) + lane * SCALE_BYTES, address + SCALES,
                   size_of(address))
        cute.arch.sync_warp()

    def place(self, g, found, key):
        """(page, row of it) of a key. found: the row of the cache that a list has, or the page of a table."""
        page, row = divmod(found if self.spec.sparse else key, g.rows_per_page)
        return page if self.spec.sparse else found, row

    def address_of(self, smem, row):
        """Where the address of a row of this warp lies."""
        return Int32(smem.addresses.iterator.toint()) + (tk.warp_id() % 4 * WARP_ROWS + row) * 8

    def rows(self, smem, lane):
        """(lane, (row of the warp's, its address) of each group of rows that this lane copies)."""
        rows = [row_copied(lane, group) for group in range(GROUPS)]
        return lane, [(row, load8_shared(self.address_of(smem, row))) for row in rows]

    @cute.jit
    def begin(self, smem, left):
        """The left half of a block is copied."""
        rows = self.rows(smem, lane_again())
        smem.left_pipe.acquire_empty(left)
        self.fetch(smem.left, left.stage, 0, rows)
        cute.arch.cp_async_commit_group()

    def fetch(self, tile, stage, half, of):
        """A half of the warp's rows as they are."""
        (lane, rows), base = of, rows_in_stage(tile, stage) + WAITING
        chunk = lane & 7
        for row, at in rows:
            for part in range(2):
                copy16(base + raw_chunk(row, chunk) + part * (ROWS * PANEL),
                       at + Int64(chunk * 16) + (half * HALF_BYTES + part * 128), size_of(at))

    def rotated(self, smem, stage, of):
        """64 columns of 16 bits: eight lanes to a row."""
        (lane, rows), base = of, rows_in_stage(smem.rope, stage)
        chunk = lane & 7
        for row, at in rows:
            copy16(base + row * PANEL + (chunk ^ (row & 7)) * 16, at + Int64(chunk * 16) + ROTATED, size_of(at))

    @cute.jit
    def widen(self, smem, half: cutlass.Constexpr[int], scales, to):
        """The half has landed: all but the youngest group of copies. The fence between it and wgmma, which reads by
        another proxy, is the consumers'."""
        tile, pipe, ring = to
        cute.arch.cp_async_wait_group(1)
        cute.arch.sync_warp()
        widen_half(scales_of(smem, scales), half, tile, ring.stage)
        pipe.commit(ring)


def lane_again():
    """The lane, from another register than `lane_now`: what follows from that one would else be kept while rows are
    widened."""
    return cute.arch.thread_idx()[0] % 32


def after(ring):
    """The place behind it."""
    following = tk.Ring(cute.make_rmem_tensor((1,), Uint32), ring.stages)
    following.count[0] = ring.count[0] + Uint32(1)
    return following
