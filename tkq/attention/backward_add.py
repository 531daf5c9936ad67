"""The warpgroup of attention's backward that adds dQ up, and how the last block of a head finishes it."""
import cutlass
import cutlass.cute as cute
from cutlass import Constexpr, Int32, Uint32, const_expr

import tkq.tile as tk
from tkq.attention.backward_base import BackwardBase
from tkq.attention.backward_post import load_part
from tkq.tile import WARPGROUP

DQ_BARRIER, LAST_BARRIER = 1, 2  # named barriers; a subclass may have those from FREE_BARRIER on
FREE_BARRIER = 3


class BackwardAdding(BackwardBase):
    """dQ = dS K, tile by tile, added to an accumulator in global memory: fp32, in the order in which the registers lie,
    of each part, of each warp, 16 bytes of every lane side by side, then the next 16.

    With ``post=False`` each block counts itself when it has added all; the last one of a K/V head, whose accumulators
    are in L2 then, makes dQ of them with its two warpgroups that have nothing else to do."""

    @cute.jit
    def queries(self, g, s):
        if const_expr(self.spec.adds_dq):
            dq, ring, kv = tk.rt_fl(self.config.dq_cols), s.ds_pipe.ring(), tk.ring(1)
            cute.arch.griddepcontrol_wait()  # the accumulator is zero
            self.each_task(g, s, lambda t, again: self.add_task(g, s, t, again, dq, ring, kv))
            # who reads the accumulator in this launch needs all of it; the next kernel waits for the whole launch
            tk.store_wait(read=g.counters is None)
            if const_expr(g.counters is not None):
                self.sign_off(g, s, self.task(g, s))

    @cute.jit
    def add_task(self, g, s, t, again: Constexpr, dq, ring, kv):
        tk.wait(s.kv_full[0], kv.phase)
        if const_expr(self.background is not None):
            self.background.await_ready(g, t)

        def add(_, h, m):
            s.ds_pipe.wait(ring)
            self.add_dq(g, s, dq, ring, self.tile_number(g, t, self.query_head(g, t, h), m))
            ring.advance()

        self.each_tile(g, t, add)
        self.done_with(s, 0)
        self.next_keys(kv)
        if const_expr(self.background is not None):
            self.background.sign_off(g, again())

    @cute.jit
    def add_dq(self, g, s, dq, ring, number):
        """The accumulator's tile ``number`` += dS K."""
        rows, cols = self.config.dq_parts(self.spec.width)
        part_bytes = 64 * self.config.dq_cols * 4
        address = g.acc.iterator.toint() + number * (rows * cols * part_bytes)
        for i in cutlass.range_constexpr(rows * cols):
            self.make_dq(s, dq, ring, a_part=i // cols, b_part=i % cols)
            if const_expr(i == rows * cols - 1):
                self.release_ds(s, ring)
            if const_expr(self.config.dq_add == "bulk"):
                self.bulk_add_part(s, dq, address + i * part_bytes, i % self.config.dq_buffers)
            else:
                self.add_part(dq, address + i * part_bytes)

    def make_dq(self, s, dq, ring, **parts):
        """A part of dS K."""
        for half in range(self.halves):
            mma = tk.mma_AtB if half else tk.mm_AtB
            mma(dq, s.ds[self.halves * ring.stage + half], s.k[half], **parts)
        tk.mma_wait(0)

    def release_ds(self, s, ring):
        s.ds_pipe.release(ring)

    def add_part(self, dq, address):
        """From registers."""
        x, quads = dq.tensor, self.config.dq_cols // 8
        mine = address + tk.warp_id() % 4 * (quads * 512) + tk.lane_id() * 16
        for j in range(quads):
            tk.red_add4(mine + j * 512, *[x[4 * j + e] for e in range(4)])

    @cute.jit
    def bulk_add_part(self, s, dq, address, buffer):
        """By way of shared memory, each warp by itself."""
        warp, lane, pieces = tk.warp_id() % 4, tk.lane_id(), self.config.dq_pieces
        quads = self.config.dq_cols // 8
        each = quads // pieces
        room = s.dq[None, None, None, warp, buffer]
        mine = cute.make_tensor(dq.tensor.iterator, cute.make_layout((4, quads)))
        for piece in cutlass.range_constexpr(pieces):
            tk.store_wait(self.config.dq_buffers * pieces - 1)  # what was there has left
            cute.arch.sync_warp()
            for j in cutlass.range_constexpr(piece * each, (piece + 1) * each):
                cute.autovec_copy(mine[None, j], room[None, lane, j])
            tk.publish()
            cute.arch.sync_warp()
            if lane == 0:
                first = piece * each * 512
                tk.bulk_add(address + warp * (quads * 512) + first, room.iterator.toint() + first, each * 512)
                tk.bulk_commit()

    # ---- the last block of a head ------------------------------------------------------------------

    @cute.jit
    def sign_off(self, g, s, t):
        """All that this block adds is in the accumulator. Is it the last of its K/V head? The others are told."""
        cute.arch.fence_acq_rel_gpu()  # each thread's additions come before the count
        tk.sync(DQ_BARRIER, WARPGROUP)
        counter, last = g.counters.iterator + (t.batch_k * g.kv_heads + t.head), s.last
        others = Uint32(g.blocks * self.config.cluster - 1)
        if tk.thread_in_warpgroup() == 0:
            last[0, 0] = Int32(tk.count_up(counter.toint(), others) == others)
            cute.arch.fence_acq_rel_gpu()  # the count comes before what anyone here reads of others' additions
        tk.sync_arrive(LAST_BARRIER, 3 * WARPGROUP)

    @cute.jit
    def finish_dq(self, g, s, t, wg, barrier):
        """After all products and writing out: two warpgroups (wg 0 and 1) make dQ if this block is the last."""
        if const_expr(g.counters is not None):
            tk.sync(LAST_BARRIER, 3 * WARPGROUP)
            if s.last[0, 0] != 0:
                cute.arch.fence_acq_rel_gpu()
                self.convert(g, s, t, wg, barrier)

    @cute.jit
    def convert(self, g, s, t, wg, barrier):
        """dQ of all query heads of the block's K/V head from the accumulator: parts in turns, as many at once as Q's
        tiles, which nobody needs any more, have room for."""
        rows, cols = self.config.dq_parts(self.spec.width)
        at_once = min(self.config.stages * self.q_tile.bytes // (2 * self.dq_tile.bytes), 4)
        x, out = [tk.rt_fl(self.config.dq_cols) for _ in range(at_once)], s.q.scratch(self.dq_tile)
        first = self.tile_number(g, t, self.query_head(g, t, 0), 0)
        parts = g.heads_per_kv * g.tiles * (rows * cols)
        for i in cutlass.range(wg * at_once, parts, 2 * at_once, unroll=1):
            for n in cutlass.range_constexpr(at_once):
                if i + n < parts:
                    load_part(x[n], g.acc[first + (i + n) // (rows * cols), None], (i + n) % (rows * cols))
            tk.store_wait()  # the tiles are free again
            tk.sync(barrier, WARPGROUP)
            for n in cutlass.range_constexpr(at_once):
                tk.mul(x[n], x[n], g.scale)
                tk.store(out[wg * at_once + n], x[n])
            tk.publish()
            tk.sync(barrier, WARPGROUP)
            if tk.first_warp_of_group():
                for n in cutlass.range_constexpr(at_once):
                    if i + n < parts:
                        tile, part = (i + n) // (rows * cols), (i + n) % (rows * cols)
                        head, m = self.query_head(g, t, tile // g.tiles), tile % g.tiles
                        tk.store_async(g.dq, out[wg * at_once + n],
                                       (t.batch_q, head, m * rows + part // cols, part % cols))
