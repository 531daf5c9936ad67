"""The four producer warps of float8 caches: rows of 656 bytes as they are into the stage of a tile, and widened there."""
import cutlass
import cutlass.cute as cute
from cutlass import Int32, Int64, Uint32, const_expr
from cutlass.cutlass_dsl import T, dsl_user_op

import tkq.tile as tk
from tkq.attention.decode import words
from tkq.attention.decode.copies import copy16, prefetch, store16
from tkq.attention.decode.pages import Pages
from tkq.attention.decode.plan import ROWS
from tkq.attention.decode.walk import END, Walk, X
from tkq.attention.mla.copies import GROUPS, PANEL, WARP_ROWS
from tkq.attention.mla.float8 import HALF_BYTES, ROTATED, SCALE_BYTES, SCALES, load16_shared, load_f32, scaled4
from tkq.attention.mla.indices import Indices
from tkq.attention.mla.producer import announce, note
from tkq.attention.mla.spec import ROW_BYTES
from tkq.attention.mla.tiles import lane_now, own
from tkq.tile.assembly import ptx

LINE = 128  # bytes that L2 brings at a time
STEPS = HALF_BYTES // 2 // 16  # of 16 columns: a lane has half of half of a row


def row_copied(lane, group):
    """Which of the warp's rows a lane copies, in the group: eight lanes that copy at a time have four vectors each of
    two rows, which lie in banks of their own."""
    return 4 * group + (lane >> 4) * 2 + (lane >> 2 & 1)


def vector(row, chunk):
    """Where in the warp's rows the first 8 of 16 columns of half of a row lie as bf16, and all 16 of them as e4m3:
    swizzled as TMA would write them."""
    return (chunk >> 2) * (ROWS * PANEL) + row * PANEL + ((chunk & 3) * 2 ^ (row & 7)) * 16


def after(ring):
    """The place behind it."""
    following = tk.Ring(cute.make_rmem_tensor((1,), Uint32), ring.stages)
    following.count[0] = ring.count[0] + Uint32(1)
    return following


class PlacedProducer:
    """As `mla.producer`, in two steps. A warp copies both halves of its rows as they are into the stages that will have
    them widened, 256 bytes of a row to where its last columns belong; when they have landed, it widens each row in its
    own place. The rotated columns go straight into their tile. All rings have one counter."""

    def __init__(self, spec, config):
        self.pages = (Indices if spec.sparse else Pages)(spec, config)
        self.config, self.keys, self.walk = config, Pages(spec, config), Walk(spec)

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
                if const_expr(self.config.woven):
                    self.begin(smem, left)
                    for block in cutlass.range(s.first, s.end, unroll=1):
                        pair = tk.Ring(left.count, 2)
                        smem.right_pipe.acquire_empty(pair)
                        self.fetch(smem, smem.right, pair.stage, 1, self.rows(smem))
                        self.look(g, smem, s, (page, block + 1, slot))
                        page, _, _ = self.pages.find(g, s, block + 2)
                        self.widen(smem, 0, (smem.left, smem.left_pipe, left), 1)
                        if block + 1 < s.end:
                            self.begin(smem, after(left))
                        else:
                            cute.arch.cp_async_commit_group()
                        self.widen(smem, 1, (smem.right, smem.right_pipe, pair), 1)
                        left.advance()
                else:
                    for block in cutlass.range(s.first, s.end, unroll=1):
                        pair = tk.Ring(left.count, 2)
                        self.begin(smem, left)
                        rows = self.rows(smem)
                        smem.right_pipe.acquire_empty(pair)
                        self.fetch(smem, smem.right, pair.stage, 1, rows)
                        self.look(g, smem, s, (page, block + 1, slot))
                        page, _, _ = self.pages.find(g, s, block + 2)
                        self.widen(smem, 0, (smem.left, smem.left_pipe, left), 1)
                        self.widen(smem, 1, (smem.right, smem.right_pipe, pair), 0)
                        left.advance()
            self.walk.advance(g, at, s)
        announce(smem, announced, (Int32(-1),))

    @cute.jit
    def begin(self, smem, left):
        """The left half of a block's rows, and their rotated columns."""
        pair = tk.Ring(left.count, 2)
        smem.left_pipe.acquire_empty(left)
        self.tell(smem, left.stage)
        rows = self.rows(smem)
        self.fetch(smem, smem.left, left.stage, 0, rows)
        smem.rope_pipe.acquire_empty(pair)
        self.rotated(smem, pair.stage, rows)
        cute.arch.cp_async_mbarrier_arrive_noinc(smem.rope_pipe.full[pair.stage].ptr)
        smem.rope_pipe.commit(pair)

    @cute.jit
    def look(self, g, smem, s, of):
        """The addresses of the warp's rows of a block, 0 where there is none, to shared memory, as no registers could
        hold them while rows are widened. of: the page of this lane's row, the block, the segment's slot. Behind the segment's end there is nothing to copy; a table that
        lies there is one of the same task."""
        page, block, slot = of
        key = self.keys.key(block)
        seen = (tk.lane_id() < WARP_ROWS) & (key < s.length)
        there, fault = self.pages.judge(g, page, seen)
        plan = g.plan
        if cute.arch.vote_any_sync(fault):
            note(smem, slot, Int32(1))
            if tk.lane_id() == 0:
                plan[words.BAD_PAGE] = Int32(1)
        address = self.pages.address(g.k, s, page, key % g.page_size, there & (block < s.end))
        self.bring(address)
        cute.arch.sync_warp()  # all lanes have read those of the block before
        if tk.lane_id() < WARP_ROWS:
            store8(self.address_of(smem, tk.lane_id()), address)
        cute.arch.sync_warp()

    def address_of(self, smem, row):
        """Where the address of a row of this warp lies."""
        return Int32(smem.addresses.iterator.toint()) + (tk.warp_id() % 4 * WARP_ROWS + row) * 8

    @cute.jit
    def tell(self, smem, stage):
        rows, own_row = smem.there, tk.lane_id() % WARP_ROWS
        there = cute.arch.vote_ballot_sync(load8(self.address_of(smem, own_row)) != Int64(0)) & Int32(0xFFFF)
        if tk.lane_id() == 0:
            rows[tk.warp_id() % 4, stage] = there

    def bring(self, address):
        """The rows begin to come into L2."""
        if self.config.ahead:
            for line in range(-(-ROW_BYTES // LINE)):
                prefetch(address + Int64(line * LINE), Int32(address != Int64(0)))

    def rows(self, smem):
        """(row of the warp's, its address) of each group of rows that this lane copies."""
        rows = [row_copied(lane_now(), group) for group in range(GROUPS)]
        return [(row, load8(self.address_of(smem, row))) for row in rows]

    def place(self, tile, stage):
        """The warp's rows in a stage."""
        return Int32(tile.staged.iterator.toint()) + stage * tile.type.bytes + tk.warp_id() % 4 * (WARP_ROWS * PANEL)

    def fetch(self, smem, tile, stage, half, rows):
        """A half of the warp's rows as they are, with all scales; one group of copies."""
        lane, base = lane_now(), self.place(tile, stage)
        chunk = (lane >> 3 & 1) * 4 + (lane & 3)
        for row, at in rows:
            size = cutlass.select_(at != Int64(0), Int32(16), Int32(0))
            for part in range(2):
                copy16(base + vector(row, chunk) + part * 2 * (ROWS * PANEL),
                       at + Int64(chunk * 16) + (half * HALF_BYTES + part * 128), size)
        self.fetch_scales(smem, half)
        cute.arch.cp_async_commit_group()

    @cute.jit
    def fetch_scales(self, smem, half):
        if tk.lane_id() < WARP_ROWS:
            to = smem.scales.iterator.toint() + (half * 4 + tk.warp_id() % 4) * (WARP_ROWS * SCALE_BYTES)
            address = load8(self.address_of(smem, tk.lane_id()))
            copy16(Int32(to) + tk.lane_id() * SCALE_BYTES, address + SCALES,
                   cutlass.select_(address != Int64(0), Int32(16), Int32(0)))

    def rotated(self, smem, stage, rows):
        """64 columns of 16 bits: eight lanes to a row."""
        lane, base = lane_now(), self.place(smem.rope, stage)
        chunk = (lane & 3) * 2 + (lane >> 3 & 1)
        for row, at in rows:
            copy16(base + row * PANEL + (chunk ^ (row & 7)) * 16, at + Int64(chunk * 16) + ROTATED,
                   cutlass.select_(at != Int64(0), Int32(16), Int32(0)))

    @cute.jit
    def widen(self, smem, half: cutlass.Constexpr[int], to, later: cutlass.Constexpr[int]):
        """The half has landed: all but the ``later`` youngest groups of copies. The fence between it and wgmma, which
        reads by another proxy, is the consumers'."""
        tile, pipe, ring = to
        cute.arch.cp_async_wait_group(later)
        cute.arch.sync_warp()
        self.rows_in_place(smem, half, tile, ring.stage)
        pipe.commit(ring)

    def own(self, tile, stage, step):
        """Where the columns of one of this lane's steps lie."""
        lane = lane_now()
        row, group = (lane >> 2) + (lane >> 1 & 1) * 8, lane & 1
        return self.place(tile, stage) + group * (2 * ROWS * PANEL) + vector(row, lane & 7 ^ step)

    def rows_in_place(self, smem, half, tile, stage):
        """A lane has 128 columns of a row, times their scale: 16 at a time, over themselves, and the next ones are read
        before. Eight lanes that read or write at a time have banks of their own."""
        lane = lane_now()
        row, group = (lane >> 2) + (lane >> 1 & 1) * 8, lane & 1
        scale = load_f32(Int32(smem.scales.iterator.toint()) + (
            (half * 4 + tk.warp_id() % 4) * WARP_ROWS + row) * SCALE_BYTES + (half * 8 + group * 4), 0)
        begin = [self.own(tile, stage, 0), None]

        def at(step):
            if step == 4 and begin[1] is None:
                begin[1] = self.own(tile, stage, 4)
            return begin[step // 4] ^ (step % 4 * 32)

        load = lambda step: load16_shared(at(step), 0)
        read = [load(step) for step in range(self.config.rows_ahead)]
        for step in range(STEPS):
            found = read.pop(0)
            if step + self.config.rows_ahead < STEPS:
                read.append(load(step + self.config.rows_ahead))
            for i in range(2):
                store16(at(step) ^ (i * 16), scaled4(found[2 * i], scale) + scaled4(found[2 * i + 1], scale))


@dsl_user_op
def load8(src, *, loc=None, ip=None):
    """64 bits from the shared address, when it is their turn."""
    return Int64(ptx([Int32(src)], "ld.volatile.shared.b64 $0, [$1];", "=l,r", loc, ip, T.i64()))


@dsl_user_op
def store8(dst, value, *, loc=None, ip=None):
    """64 bits to the shared address."""
    ptx([Int32(dst), Int64(value)], "st.volatile.shared.b64 [$0], $1;", "r,l", loc, ip)
