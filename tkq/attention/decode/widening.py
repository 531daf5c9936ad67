"""The producer warps of a float8 cache: its rows through registers into shared memory, widened to fp16 on the way."""
import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32, Int64, const_expr

import tkq.tile as tk
from tkq.attention.decode.copies import address_from, load16, prefetch, store16, widen4
from tkq.attention.decode.pages import Looked, Pages
from tkq.attention.decode.plan import padded
from tkq.attention.decode.walk import Walk

WARP, PIECE = 32, 16  # lanes; e4m3 of one load
PANEL = 128  # bytes of a row in a panel of a tile
LINE = 128  # bytes that L2 brings at a time


class WideningProducer:
    """As `Producer`, for e4m3: a lane loads 16 numbers, which are two vectors of a tile in fp16.

    A tile's loads are on their way while the one before is widened: K of block i + 1 is asked for as soon as K of block
    i is stored, then V likewise; block i + 2 comes into L2 meanwhile. Eight lanes
    have four neighbouring pieces of two rows each, whose swizzled vectors lie in eight different groups of banks.

      widening, for each piece: 1 load, 8 conversions of two, 2 stores: 11 instructions for 16 bytes, and 6 of addresses
    """

    def __init__(self, spec, config):
        self.spec, self.config, self.walk, self.pages = spec, config, Walk(spec), Pages(spec, config)

    @cute.jit
    def run(self, g, smem):
        k_ring, v_ring = smem.k_pipe.ring(), smem.v_pipe.ring()
        k_held, v_held = (cute.make_rmem_tensor((4 * self.pieces(d),), Int32)
                          for d in (self.spec.head_dim, self.spec.head_dim_v))
        scales = cute.make_rmem_tensor((2,), Float32)
        self.walk.each_segment(g, lambda s: self.segment(g, smem, ((k_ring, v_ring), (k_held, v_held), scales), s))

    @cute.jit
    def segment(self, g, smem, regs, s):
        """regs: rings of K and V, what is held of K and V, and the scales of K's block."""
        (k_ring, v_ring), (k_held, v_held), scales = regs
        own = s._replace(length=cutlass.min(s.length, s.end * self.config.keys))  # keys of other parts stay out
        place, step = self.start(g, own)
        first, place = self.find(g, own, place, step, s.first)
        second, place = self.find(g, own, place, step, s.first + 1)
        third, place = self.find(g, own, place, step, s.first + 2)
        now = self.look(g, own, first)
        self.load(k_held, now.k, self.spec.head_dim)
        self.load_scales(g, s, scales, now)
        self.load(v_held, now.v, self.spec.head_dim_v)
        soon = self.look(g, own, second)
        page, row, seen = third
        for block in cutlass.range(s.first, s.end, unroll=1):
            later = self.look(g, own, (page, row, seen))
            (page, row, seen), place = self.find(g, own, place, step, block + 3)
            smem.k_pipe.acquire_empty(k_ring)
            self.pages.tell(g, smem, k_ring.stage, now.there, now.fault)
            self.tell_scales(smem, k_ring.stage, scales)
            self.store(smem.k, k_ring, k_held, self.spec.head_dim)
            self.done(smem.k_pipe, k_ring)
            self.load(k_held, soon.k, self.spec.head_dim)
            self.load_scales(g, s, scales, soon)
            smem.v_pipe.acquire_empty(v_ring)
            self.store(smem.v, v_ring, v_held, self.spec.head_dim_v)
            self.done(smem.v_pipe, v_ring)
            self.load(v_held, soon.v, self.spec.head_dim_v)
            now, soon = soon, later

    def start(self, g, s):
        return self.pages.start(g, s.first) if self.spec.paged else ((Int32(0), Int32(0)), None)

    def find(self, g, s, place, step, block):
        """(what `Pages.find` finds, the place of the next block's row)."""
        if not self.spec.paged:
            return self.pages.find(g, s, block), place
        return self.pages.at(g, s, place, block), self.pages.after(g, place, step)

    def look(self, g, s, found):
        """A block's rows, from what `Pages.find` found; they begin to come into L2."""
        (page, row, _), (here, fault) = found, self.pages.judge(g, found[0], found[2])
        k, v = self.pages.address(g.k, s, page, row, here), self.pages.address(g.v, s, page, row, here)
        for at, columns in ((k, self.spec.head_dim), (v, self.spec.head_dim_v)):
            for line in range(-(-columns // LINE)):
                prefetch(at + Int64(line * LINE), Int32(here))
        return Looked(k, v, Int32(page), row, cute.arch.vote_ballot_sync(here), fault)

    def pieces(self, columns):
        """Of a tile, that a lane has."""
        return self.config.rows_per_warp * padded(columns) // (PIECE * WARP)

    def steps(self, columns):
        """(row, panel) of each load beside the lane's own: a load of a warp takes 32 pieces, of as many panels of 64
        columns as are neighbours, and of 8, 4 or 2 rows."""
        panels, together = padded(columns) // 64, self.together(columns)
        rows = 8 // together
        return [(i // (panels // together) * rows, i % (panels // together) * together)
                for i in range(self.pieces(columns))]

    def together(self, columns):
        """Panels of one load."""
        panels = padded(columns) // 64
        return panels if panels in (1, 2, 4) else 1

    def own(self, columns):
        """(row, panel, piece of the panel) of a lane in each load: eight lanes have four pieces of two rows."""
        lane, together = tk.lane_id(), self.together(columns)
        return lane // 8 // together * 2 + lane % 8 // 4, lane // 8 % together, lane % 4

    def load(self, held, address, columns):
        """A tile's pieces of this lane are asked for. address: of the lane's row."""
        own_row, own_panel, part = self.own(columns)
        for i, (row, panel) in enumerate(self.steps(columns)):
            at = address_from(address, own_row + row)
            some = at != Int64(0)
            if columns % 64:
                some = some & ((own_panel + panel) * 4 + part < columns // PIECE)
            words = load16(at + Int64((own_panel + panel) * 64 + part * PIECE), Int32(some))
            for e in range(4):
                held[4 * i + e] = words[e]

    def store(self, tile, ring, held, columns):
        """The lane's pieces, widened, to where TMA would put them: vector v of a row lies at v ^ row % 8."""
        keys, rows = self.config.keys, self.config.rows_per_warp
        own_row, own_panel, part = self.own(columns)
        base = Int32(tile.staged.iterator.toint()) + tk.warp_id() % 4 * (rows * PANEL) + (
            own_row * PANEL + own_panel * (keys * PANEL)) + ring.stage * (keys * padded(columns) * 2)
        place = (2 * part ^ own_row) * 16
        at = {v: base + (place ^ (v * 16)) for v in sorted({row % 8 ^ half for row, _ in self.steps(columns)
                                                            for half in range(2)})}
        for i, (row, panel) in enumerate(self.steps(columns)):
            wide = [half for e in range(4) for half in widen4(held[4 * i + e])]
            for half in range(2):
                store16(at[row % 8 ^ half], wide[4 * half:4 * half + 4], offset=row * PANEL + panel * keys * PANEL)

    def done(self, pipe, ring):
        """The warp's part is there. The fence between it and wgmma, which reads by another proxy, is the consumers':
        here it would wait for the loads that are on their way."""
        pipe.commit(ring)
        ring.advance()

    def load_scales(self, g, s, scales, of):
        """Of this lane's row of K and of V; 0 where there is no row."""
        if const_expr(self.spec.scales == "token"):
            for i in range(2):
                scales[i] = Float32(0.0)
            self.look_up(g, s, scales, of)

    @cute.jit
    def look_up(self, g, s, scales, of):
        if of.k != Int64(0):
            scales[0] = g.k_descale[of.page, of.row, s.head]
            scales[1] = g.v_descale[of.page, of.row, s.head]

    @cute.jit
    def tell_scales(self, smem, stage, scales):
        """The rows' scales, and the largest of the warp's rows of V."""
        if const_expr(self.spec.scales == "token"):
            rows, lane, shared, keys = self.config.rows_per_warp, tk.lane_id(), smem.scales, self.config.keys
            warp, top = tk.warp_id() % 4, cute.arch.fmax(scales[1], -scales[1])
            for step in cutlass.range_constexpr(5):
                top = cute.arch.fmax(top, cute.arch.shuffle_sync_bfly(top, offset=1 << step))
            if lane < rows:
                for i in cutlass.range_constexpr(2):
                    shared[i * keys + warp * rows + lane, stage] = scales[i]
            if lane == 0:
                shared[2 * keys + warp, stage] = top
