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
    load8_shared,
    row_copied,
    rows_in_stage,
    scales_of,
    store8_shared,
    vector,
    widen_half,
)
from tkq.attention.mla.indices import Indices
from tkq.attention.mla.producer import announce, note
from tkq.attention.mla.tiles import lane_now, own

SIXTEEN = 0xFFFF  # one bit for each of a warp's rows


def size_of(address):
    """Bytes of a copy of 16: none of a row that is not there."""
    return cutlass.select_(address != Int64(0), Int32(16), Int32(0))


class Float8Producer:
    """As `mla.producer`, in two steps. A warp copies both halves of its rows as they are into the stages that will have
    them widened, each 16 columns to where the first 8 of them belong; when a half has landed, the warp widens it in
    its place. The rotated columns go straight into their tile. All rings have one counter, and where the next block's
    rows lie waits in shared memory: no register holds it while rows are widened.

      before  begin(first): left, rotated columns
      block i right(i) is copied | rows of i + 1 are looked up | left(i) is widened | begin(i + 1) | right(i) is widened

    Deadlock-free: begin(i + 1) waits for what reads left(i - 2), and so for the scores of block i - 1, whose halves
    were all handed over before.
    """

    def __init__(self, spec, config):
        self.pages = (Indices if spec.sparse else Pages)(spec, config)
        self.keys, self.walk = Pages(spec, config), Walk(spec)

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
                page, _, _ = self.pages.find(g, s, s.first)
                self.look(g, smem, s, (page, s.first, slot))
                page, _, _ = self.pages.find(g, s, s.first + 1)
                self.begin(smem, left)
                for block in cutlass.range(s.first, s.end, unroll=1):
                    pair = tk.Ring(left.count, smem.right_pipe.stages)
                    smem.right_pipe.acquire_empty(pair)
                    self.fetch(smem.right, pair.stage, 1, self.rows(smem, lane_now()))
                    cute.arch.cp_async_commit_group()
                    self.look(g, smem, s, (page, block + 1, slot))
                    page, _, _ = self.pages.find(g, s, block + 2)
                    self.widen(smem, 0, pair.stage, (smem.left, smem.left_pipe, left))
                    if block + 1 < s.end:
                        self.begin(smem, after(left))
                    else:
                        cute.arch.cp_async_commit_group()
                    self.widen(smem, 1, pair.stage, (smem.right, smem.right_pipe, pair))
                    left.advance()
            self.walk.advance(g, at, s)
        announce(smem, announced, (Int32(-1),))

    @cute.jit
    def look(self, g, smem, s, of):
        """The addresses of the warp's rows of a block, 0 where there is none, to shared memory. of: the page of this
        lane's row, the block, the segment's slot. A table that lies behind the segment's end is one of the same
        task."""
        page, block, slot = of
        key = self.keys.key(block)
        seen = (tk.lane_id() < WARP_ROWS) & (key < s.length)
        there, fault = self.pages.judge(g, page, seen)
        plan = g.plan
        if cute.arch.vote_any_sync(fault):
            note(smem, slot, Int32(1))
            if tk.lane_id() == 0:
                plan[words.BAD_PAGE] = Int32(1)
        address = self.pages.address(g.k, s, page, key % g.page_size, there)
        cute.arch.sync_warp()  # all lanes have read those of the block before
        if tk.lane_id() < WARP_ROWS:
            store8_shared(self.address_of(smem, tk.lane_id()), address)
        cute.arch.sync_warp()

    def address_of(self, smem, row):
        """Where the address of a row of this warp lies."""
        return Int32(smem.addresses.iterator.toint()) + (tk.warp_id() % 4 * WARP_ROWS + row) * 8

    def rows(self, smem, lane):
        """(lane, (row of the warp's, its address) of each group of rows that this lane copies)."""
        rows = [row_copied(lane, group) for group in range(GROUPS)]
        return lane, [(row, load8_shared(self.address_of(smem, row))) for row in rows]

    @cute.jit
    def begin(self, smem, left):
        """Of a block: which rows are there, the left half, and the rotated columns."""
        pair, lane = tk.Ring(left.count, smem.rope_pipe.stages), lane_again()
        rows, address = self.rows(smem, lane), load8_shared(self.address_of(smem, lane % WARP_ROWS))
        smem.left_pipe.acquire_empty(left)
        self.tell(smem, left.stage, lane, address)
        self.fetch(smem.left, left.stage, 0, rows)
        self.fetch_scales(smem, pair.stage, lane, address)
        cute.arch.cp_async_commit_group()
        smem.rope_pipe.acquire_empty(pair)
        self.rotated(smem, pair.stage, rows)
        cute.arch.cp_async_mbarrier_arrive_noinc(smem.rope_pipe.full[pair.stage].ptr)
        smem.rope_pipe.commit(pair)

    @cute.jit
    def tell(self, smem, stage, lane, address):
        """Which of the warp's rows are there, by the address of this lane's."""
        rows, there = smem.there, cute.arch.vote_ballot_sync(address != Int64(0)) & Int32(SIXTEEN)
        if lane == 0:
            rows[tk.warp_id() % 4, stage] = there

    def fetch(self, tile, stage, half, of):
        """A half of the warp's rows as they are."""
        (lane, rows), base = of, rows_in_stage(tile, stage)
        chunk = (lane >> 3 & 1) * 4 + (lane & 3)
        for row, at in rows:
            for part in range(2):
                copy16(base + vector(row, chunk) + part * 2 * (ROWS * PANEL),
                       at + Int64(chunk * 16) + (half * HALF_BYTES + part * 128), size_of(at))

    @cute.jit
    def fetch_scales(self, smem, stage, lane, address):
        """All of the rows' scales, of both halves."""
        if lane < WARP_ROWS:
            copy16(scales_of(smem, stage) + lane * SCALE_BYTES, address + SCALES, size_of(address))

    def rotated(self, smem, stage, of):
        """64 columns of 16 bits: eight lanes to a row."""
        (lane, rows), base = of, rows_in_stage(smem.rope, stage)
        chunk = (lane & 3) * 2 + (lane >> 3 & 1)
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
