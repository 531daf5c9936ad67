"""The four producer warps of float8 caches: rows of 656 bytes as they are into the stage of a tile, and widened there."""
import cutlass
import cutlass.cute as cute
from cutlass import Int32, Int64

import tkq.tile as tk
from tkq.attention.decode import words
from tkq.attention.decode.copies import address_from, copy16, store16
from tkq.attention.decode.pages import Pages
from tkq.attention.decode.plan import ROWS
from tkq.attention.decode.walk import END, Walk, X
from tkq.attention.mla.copies import GROUPS, PANEL, WARP_ROWS, row_of
from tkq.attention.mla.float8 import HALF_BYTES, ROTATED, SCALE_BYTES, SCALES, load16_shared, load_f32, scaled4
from tkq.attention.mla.indices import Indices
from tkq.attention.mla.producer import announce, note
from tkq.attention.mla.tiles import lane_now, own

STEPS = WARP_ROWS // 2  # of a half of the warp's rows, two rows each
WAITING = 2 * ROWS * PANEL  # where in a stage rows are as they are: in its last two panels


def raw_chunk(row, chunk):
    """Where the 16 bytes ``chunk`` of a row of half of the columns lie, from the first row of the stage's third panel:
    in that row of the two last panels, and rows beside each other in other banks."""
    return row * PANEL + chunk // 8 * (ROWS * PANEL) + (chunk % 8 ^ (row % 2 * 4)) * 16


class PlacedProducer:
    """As `mla.producer`, in two steps. A warp copies both halves of its rows as they are into the stages that will have
    them widened, 256 bytes of a row to where its last columns belong; when they have landed, it widens each row in its
    own place. The rotated columns go straight into their tile. All rings have one counter."""

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
                for block in cutlass.range(s.first, s.end, unroll=1):
                    pair = tk.Ring(left.count, 2)
                    address, there = self.find(g, smem, s, (page, block, slot))
                    now = cute.arch.vote_ballot_sync(there)
                    smem.left_pipe.acquire_empty(left)
                    self.tell(smem, left.stage, now)
                    self.fetch(smem, smem.left, left.stage, 0, address)
                    smem.rope_pipe.acquire_empty(pair)
                    self.rotated(smem, pair.stage, address)
                    cute.arch.cp_async_mbarrier_arrive_noinc(smem.rope_pipe.full[pair.stage].ptr)
                    smem.rope_pipe.commit(pair)
                    smem.right_pipe.acquire_empty(pair)
                    self.fetch(smem, smem.right, pair.stage, 1, address)
                    page, _, _ = self.pages.find(g, s, block + 1)
                    self.widen(smem, 0, (smem.left, smem.left_pipe, left))
                    self.widen(smem, 1, (smem.right, smem.right_pipe, pair))
                    left.advance()
            self.walk.advance(g, at, s)
        announce(smem, announced, (Int32(-1),))

    @cute.jit
    def find(self, g, smem, s, of):
        """(address, is the row there?) of this lane's row. of: its page, the block, the segment's slot; all else is
        found anew, as there are no registers for it."""
        page, block, slot = of
        key = self.keys.key(block)
        seen = (tk.lane_id() < WARP_ROWS) & (key < s.length)
        there, fault = self.pages.judge(g, page, seen)
        plan = g.plan
        if cute.arch.vote_any_sync(fault):
            note(smem, slot, Int32(1))
            if tk.lane_id() == 0:
                plan[words.BAD_PAGE] = Int32(1)
        return self.pages.address(g.k, s, page, key % g.page_size, there), there

    @cute.jit
    def tell(self, smem, stage, there):
        rows = smem.there
        if tk.lane_id() == 0:
            rows[tk.warp_id() % 4, stage] = there

    def rows(self, address):
        """(row of the warp's, its address) of each group of rows that this lane copies, from the lanes that looked them
        up."""
        for group in range(GROUPS):
            yield row_of(group), address_from(address, row_of(group))

    def place(self, tile, stage):
        """The warp's rows as they are, in a stage."""
        return Int32(tile.staged.iterator.toint()) + stage * tile.type.bytes + WAITING + tk.warp_id() % 4 * (
            WARP_ROWS * PANEL)

    @cute.jit
    def fetch(self, smem, tile, stage, half: cutlass.Constexpr[int], address):
        """A half of the warp's rows as they are, the left one with all scales; one group of copies."""
        chunk, base = tk.lane_id() % 8, self.place(tile, stage)
        for row, at in self.rows(address):
            size = cutlass.select_(at != Int64(0), Int32(16), Int32(0))
            for part in range(2):
                copy16(base + raw_chunk(row, chunk) + part * (ROWS * PANEL),
                       at + Int64(chunk * 16) + (half * HALF_BYTES + part * 128), size)
        if cutlass.const_expr(half == 0):
            if tk.lane_id() < WARP_ROWS:
                to = smem.scales.iterator.toint() + tk.warp_id() % 4 * (WARP_ROWS * SCALE_BYTES)
                copy16(Int32(to) + tk.lane_id() * SCALE_BYTES, address + SCALES,
                       cutlass.select_(address != Int64(0), Int32(16), Int32(0)))
        cute.arch.cp_async_commit_group()

    def rotated(self, smem, stage, address):
        """64 columns of 16 bits: eight lanes to a row."""
        chunk, warp, tile = tk.lane_id() % 8, tk.warp_id() % 4, smem.rope
        base = Int32(tile.staged.iterator.toint()) + stage * tile.type.bytes + warp * (WARP_ROWS * PANEL)
        for row, at in self.rows(address):
            copy16(base + row * PANEL + (chunk ^ (row % 8)) * 16, at + Int64(chunk * 16) + ROTATED,
                   cutlass.select_(at != Int64(0), Int32(16), Int32(0)))

    @cute.jit
    def widen(self, smem, half: cutlass.Constexpr[int], to):
        """The half has landed: all but the youngest group of copies, which is the right half's. The fence between it and
        wgmma, which reads by another proxy, is the consumers'."""
        tile, pipe, ring = to
        cute.arch.cp_async_wait_group(1 - half)
        cute.arch.sync_warp()
        self.rows_in_place(smem, half, tile, ring.stage)
        pipe.commit(ring)

    def rows_in_place(self, smem, half, tile, stage):
        """Two rows at a time, 16 columns to a lane, times their scales: eight lanes have 64 columns of both, so that no
        two of them meet in a bank. The next two rows are read before these are written, which is to their own place."""
        lane = lane_now()
        upper, part, panel = lane >> 2 & 1, lane & 3, lane >> 3
        base = self.place(tile, stage)
        raw = base + raw_chunk(upper, 4 * panel + part)
        scales = Int32(smem.scales.iterator.toint()) + tk.warp_id() % 4 * (WARP_ROWS * SCALE_BYTES) + (
            upper * SCALE_BYTES + half * 8 + (panel >> 1) * 4)
        to = base - WAITING + panel * (ROWS * PANEL) + upper * PANEL + (2 * part ^ upper) * 16
        load = lambda step: (load16_shared(raw, step * 2 * PANEL), load_f32(scales, step * 2 * SCALE_BYTES))
        following = load(0)
        for step in range(STEPS):
            (found, scale), following = following, load(step + 1) if step + 1 < STEPS else None
            for i in range(2):
                wide = scaled4(found[2 * i], scale) + scaled4(found[2 * i + 1], scale)
                place = (2 * step % 8 ^ i) * 16  # rows are swizzled, and lie at multiples of PANEL
                store16(to ^ place, wide, step * 2 * PANEL)
