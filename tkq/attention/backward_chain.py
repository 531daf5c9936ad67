"""dQ of a tile, from the first block of keys that has a part of it to the last, without zeroes before and a kernel
behind: the last block that sees the tile begins its accumulator, those before it add, the first one finishes.

Blocks of a K/V head are claimed from the last to the first, and a block waits only for those behind it: so nobody waits
for ever. Nor, for the most part, at all: of causal ones a block begins with the tiles that it is the last to see."""
from dataclasses import dataclass

import cutlass
import cutlass.cute as cute
from cutlass import Constexpr, Int32, Int64, const_expr

import tkq.tile as tk
from tkq.attention.backward_add import BackwardAdding
from tkq.attention.backward_background import columns
from tkq.attention.backward_split import await_count
from tkq.attention.query_ranges import key_range


@dataclass(frozen=True)
class ChainState:
    """Registers of the warpgroup that makes dQ. told: (1,) which of ``counts`` to raise when what was sent is there,
    or -1."""

    dq: tk.RegTile
    ring: tk.Ring  # of dS
    kv: tk.Ring
    sums: tk.Ring  # of what comes back from the accumulator
    told: cute.Tensor


class Chained(BackwardAdding):
    """Each warp by itself: wait for the tile's count | for dS | dQ = dS K | .. of the first block: + accumulator,
    which comes while dQ is made, write dQ | of others: store or add, and raise the count when the next tile's dS is
    there."""

    @cute.jit
    def queries(self, g, s):
        c = ChainState(tk.rt_fl(self.config.dq_cols), s.ds_pipe.ring(), tk.ring(1), tk.ring(1),
                       cute.make_rmem_tensor((1,), Int32))
        c.told[0] = Int32(-1)
        cute.arch.griddepcontrol_wait()  # counts and accumulators are zero
        self.each_task(g, s, lambda t, again: self.chain_task(g, s, t, c))
        tk.store_wait()

    @cute.jit
    def chain_task(self, g, s, t, c):
        tk.wait(s.kv_full[0], c.kv.phase)
        self.each_tile(g, t, lambda _, h, m: self.chain_step(g, s, t, c, h, m))
        self.settle(g, c)
        self.done_with(s, 0)
        self.next_keys(c.kv)

    @cute.jit
    def chain_step(self, g, s, t, c, h, m):
        rows, cols = self.config.dq_parts(self.spec.width)
        head = self.query_head(g, t, h)
        number, warp = self.tile_number(g, t, head, m), tk.warp_id() % 4
        at = Int32(number) * 4 + warp
        last = key_range(self.extent(g, t.rows_q, t.rows_k), m * self.config.tile).end - 1
        chained = t.sequence * g.kv_heads + t.head < g.chain.heads
        final, begins = chained & (t.block == 0), chained & (t.block == last)
        wanted = cutlass.select_(final, last, cutlass.select_(chained & (t.block < last), Int32(1), Int32(0)))
        if wanted > 0:
            await_count(g.chain.counts, at, wanted)
            cute.arch.fence_proxy("async.global")
        sums = final & (last > 0)
        if sums:
            self.fetch(g, s, number, warp)
        s.ds_pipe.wait(c.ring)
        self.settle(g, c)
        for i in cutlass.range_constexpr(rows * cols):
            self.make_dq(s, c.dq, c.ring, a_part=i // cols, b_part=i % cols)
            if const_expr(i == rows * cols - 1):
                s.ds_pipe.release(c.ring)
            if final:
                self.finish_part(g, s, t, c, head, m, i, sums, warp)
            else:
                self.send_part(g, s, c.dq, number, i, begins, warp)
        c.told[0] = cutlass.select_(chained & (t.block > 0), at, Int32(-1))
        if sums:
            c.sums.advance()
        c.ring.advance()

    @cute.jit
    def settle(self, g, c):
        """Until what this warp has sent is there; then say so."""
        tk.store_wait(read=False)
        if c.told[0] >= 0:
            if tk.lane_id() == 0:
                cute.arch.red(g.chain.counts.iterator + c.told[0], Int32(1), op="add", dtype="s32", sem="release",
                              scope="gpu")
        c.told[0] = Int32(-1)
        cute.arch.sync_warp()

    def address(self, g, number, i, warp):
        """Of a warp's rows of part i of the accumulator's tile ``number``, and how many bytes they are."""
        (rows, cols), bytes = self.config.dq_parts(self.spec.width), 16 * self.config.dq_cols * 4
        return g.acc.iterator.toint() + (number * (rows * cols) + i) * (4 * bytes) + Int64(warp) * bytes, bytes

    @cute.jit
    def fetch(self, g, s, number, warp):
        """The sums of the blocks before, to where others' parts leave from."""
        (rows, cols), sem = self.config.dq_parts(self.spec.width), s.dq_full[warp]
        cute.arch.sync_warp()
        tk.expect_bytes(sem, rows * cols * 16 * self.config.dq_cols * 4)
        with cute.arch.elect_one():
            for i in cutlass.range_constexpr(rows * cols):
                address, bytes = self.address(g, number, i, warp)
                tk.bulk_load(s.dq[None, None, None, warp, i].iterator.toint(), address, bytes, sem.ptr.toint())

    @cute.jit
    def finish_part(self, g, s, t, c, head, m, i: Constexpr[int], sums, warp):
        """Write part i of dQ."""
        (_, cols), quads = self.config.dq_parts(self.spec.width), self.config.dq_cols // 8
        if sums:
            if const_expr(i == 0):
                tk.wait(s.dq_full[warp], c.sums.phase)
            mine = cute.make_tensor(c.dq.tensor.iterator, cute.make_layout((4, quads)))
            theirs = cute.make_rmem_tensor((4,), cutlass.Float32)
            for j in cutlass.range_constexpr(quads):
                cute.autovec_copy(s.dq[None, tk.lane_id(), j, warp, i], theirs)
                for e in cutlass.range_constexpr(4):
                    mine[e, j] = mine[e, j] + theirs[e]
        tk.mul(c.dq, c.dq, g.scale)
        batch, first = (0, t.batch_q - t.rows_q) if const_expr(self.spec.varlen) else (t.sequence, Int32(0))
        out = g.chain.dq[batch, None, head, None]
        tk.store_narrow(columns(out, i % cols * self.config.dq_cols), c.dq,
                        first + m * self.config.tile + i // cols * 64, first + t.rows_q)

    @cute.jit
    def send_part(self, g, s, dq, number, i: Constexpr[int], begins, warp):
        """Part i of dQ, to or onto the accumulator."""
        quads, lane = self.config.dq_cols // 8, tk.lane_id()
        room = s.dq[None, None, None, warp, i]
        mine = cute.make_tensor(dq.tensor.iterator, cute.make_layout((4, quads)))
        for j in cutlass.range_constexpr(quads):
            cute.autovec_copy(mine[None, j], room[None, lane, j])
        tk.publish()
        cute.arch.sync_warp()
        if lane == 0:
            address, bytes = self.address(g, number, i, warp)
            if begins:
                tk.bulk_store(address, room.iterator.toint(), bytes)
            else:
                tk.bulk_add(address, room.iterator.toint(), bytes)
            tk.bulk_commit()
