"""The warpgroup of attention's backward that adds dQ up."""
import cutlass
import cutlass.cute as cute
from cutlass import Constexpr, const_expr

import tkq.tile as tk
from tkq.attention.backward.kernel import BackwardBase


class DqAtomic(BackwardBase):
    """dQ = dS K, tile by tile, added to an accumulator in global memory: fp32, in the order in which the registers lie,
    of each part, of each warp, 16 bytes of every lane side by side, then the next 16."""

    @cute.jit
    def dq_warpgroup(self, g, s):
        if const_expr(self.spec.adds_dq):
            dq, ring, kv = tk.rt_fl(self.config.dq_cols), s.ds_pipe.ring(), tk.ring(1)
            cute.arch.griddepcontrol_wait()  # the accumulator is zero
            self.each_task(g, s, lambda t, reload_task: self.add_task(g, s, t, reload_task, dq, ring, kv))
            tk.store_wait()  # of what is read; the next kernel waits for the whole launch

    @cute.jit
    def add_task(self, g, s, t, reload_task: Constexpr, dq, ring, kv):
        tk.wait(s.kv_full[0], kv.phase)
        if const_expr(self.helper_warps is not None):
            self.helper_warps.wait_ready(g, t)

        def add(_, h, m):
            s.ds_pipe.wait(ring)
            self.add_dq(g, s, dq, ring, self.tile_number(g, t, self.query_head(g, t, h), m))
            ring.advance()

        self.each_tile(g, t, add)
        self.release_kv(s, 0)
        self.next_kv(kv)
        if const_expr(self.helper_warps is not None):
            self.helper_warps.signal_added(g, reload_task())

    @cute.jit
    def add_dq(self, g, s, dq, ring, number):
        """The accumulator's tile ``number`` += dS K."""
        self.each_part(g, s, dq, ring, number, lambda address: self.add_part(s, dq, address))

    @cute.jit
    def each_part(self, g, s, dq, ring, number, send: Constexpr, last: Constexpr = lambda: None):
        """``send(address)`` for each part of dS K, which is in dq then, and its place in the accumulator's tile
        ``number``. ``last()`` when dS and K have been read."""
        rows, cols = self.config.dq_parts(self.spec.width)
        part_bytes = 64 * self.config.dq_cols * 4
        address = g.acc.iterator.toint() + number * (rows * cols * part_bytes)
        for i in cutlass.range_constexpr(rows * cols):
            self.make_dq(s, dq, ring, a_part=i // cols, b_part=i % cols)
            if const_expr(i == rows * cols - 1):
                s.ds_pipe.release(ring)
                last()
            send(address + i * part_bytes)

    def make_dq(self, s, dq, ring, **parts):
        """A part of dS K."""
        for half in range(self.kv_tiles):
            mma = tk.mma_AtB if half else tk.mm_AtB
            mma(dq, s.ds[self.kv_tiles * ring.stage + half], s.k[half], **parts)
        tk.mma_wait(0)

    def add_part(self, s, dq, address):
        """From registers, or by way of shared memory."""
        if self.config.dq_reduce == "bulk":
            warp = tk.warp_id() % 4
            self.send_rows(s.dq[None, None, None, warp], dq,
                           lambda room, size: tk.bulk_add(address + warp * size, room, size))
        else:
            x, quads = dq.tensor, self.config.dq_cols // 8
            mine = address + tk.warp_id() % 4 * (quads * 512) + tk.lane_id() * 16
            for j in range(quads):
                tk.red_add4(mine + j * 512, *[x[4 * j + e] for e in range(4)])

    @cute.jit
    def send_rows(self, room, dq, send: Constexpr, pending: Constexpr[int] = 0):
        """A warp's rows of a part by way of its room in shared memory, out of which all but the last ``pending`` of its
        parts have to have left: ``send(address of the room, bytes)`` by one lane."""
        lane, quads = tk.lane_id(), self.config.dq_cols // 8
        tk.store_wait(pending)
        cute.arch.sync_warp()
        mine = cute.make_tensor(dq.tensor.iterator, cute.make_layout((4, quads)))
        for j in cutlass.range_constexpr(quads):
            cute.autovec_copy(mine[None, j], room[None, lane, j])
        tk.publish()
        cute.arch.sync_warp()
        if lane == 0:
            send(room.iterator.toint(), quads * 512)
            tk.bulk_commit()


@cute.jit
def store_or_add(first, to, room, size: Constexpr[int]):
    """From shared memory: the first contributor stores, later ones add."""
    if first:
        tk.bulk_store(to, room, size)
    else:
        tk.bulk_add(to, room, size)
