"""dQ policy "serial": key blocks of a head run last to first. The last stores, middle ones add, the first adds its own
part and writes dQ. No zeroing before, no conversion kernel after.

Deadlock-free: a block waits only on blocks claimed before it. Waits are rare: in a causal problem a block begins with
the tiles that it is the last to see."""
from dataclasses import dataclass

import cutlass
import cutlass.cute as cute
from cutlass import Constexpr, Int32, Int64, const_expr

import tkq.tile as tk
from tkq.attention.backward.config import BackwardConfig
from tkq.attention.backward.dq_tile import DqTile, store_or_add
from tkq.attention.backward.helper_warps import columns
from tkq.attention.backward.spec import BackwardSpec
from tkq.attention.backward.state import DqSerialOperands
from tkq.attention.common.counters import load_acquire
from tkq.attention.common.query_mask import key_blocks_of
from tkq.attention.common.sequences import with_batch
from tkq.attention.common.tile_order import serial_heads

TOGETHER = 4  # tiles that one fence signals


@dataclass(frozen=True)
class DqSerialState:
    """Registers of the warpgroup that makes dQ. Each (1,): ready, tiles from the next on that this block may add to;
    first, where the counts of the tiles are that have been sent and not signalled, and sent, how many these are."""

    dq: tk.RegTile
    ring: tk.Ring  # of dS
    kv: tk.Ring
    sums: tk.Ring  # of what comes back from the accumulator
    ready: cute.Tensor
    first: cute.Tensor
    sent: cute.Tensor


class SerialDq:
    """Each warp by itself: wait for earlier contributions | for dS | dQ = dS K | .. of the first block: + the sums so
    far, which come meanwhile, write dQ | of others: store or add, and raise the counts of several tiles at once."""

    def __init__(self, spec: BackwardSpec, config: BackwardConfig, tile: DqTile, scheduler):
        self.spec, self.config, self.tile, self.scheduler = spec, config, tile, scheduler
        self.all_serial = spec.varlen or not (spec.right and config.longest_first)  # no heads whose longest come first

    def operands(self, dq, counters, right, heads, l2_section, tail_heads, tiles) -> DqSerialOperands:
        """In the host function. heads: of K and V, of all batches. tiles: of a K/V head's query heads."""
        counts = cute.make_tensor(counters.iterator + 1, cute.make_layout((cute.size(counters) - 1,)))
        if self.all_serial:
            serial = Int32(1 << 30), Int32((1 << 31) - 1)
        else:
            first = serial_heads(heads, l2_section, tail_heads)
            serial = first, first * tiles
        return DqSerialOperands(with_batch(dq, self.spec.varlen), counts, *serial, right)

    @cute.jit
    def run(self, g, s):
        ints = [cute.make_rmem_tensor((1,), Int32) for _ in range(3)]
        c = DqSerialState(tk.rt_fl(self.config.dq_cols), s.ds_pipe.ring(), tk.ring(1), tk.ring(1), *ints)
        cute.arch.griddepcontrol_wait()  # counts and accumulators are zero
        self.scheduler.each_task(g, s, lambda t, reload_task: self.serial_task(g, s, t, c))

    @cute.jit
    def serial_task(self, g, s, t, c):
        tk.wait(s.kv_full[0], c.kv.phase)
        c.sent[0] = Int32(0)
        self.scheduler.each_tile(g, t, lambda _, h, m: self.serial_step(g, s, t, c, h, m))
        self.signal(g, c, 0)
        tk.store_wait(read=False)  # additions outside the serial reduction
        self.scheduler.release_kv(s, 0)
        self.scheduler.next_kv(c.kv)

    @cute.jit
    def serial_step(self, g, s, t, c, h, m):
        rows, cols = self.config.dq_parts(self.spec.width)
        head = self.scheduler.query_head(g, t, h)
        number, warp = self.scheduler.tile_number(g, t, head, m), tk.warp_id() % 4
        at = Int32(number) * 4 + warp
        last = self.last_block(g, t, m)
        serial = t.sequence * g.kv_heads + t.head < g.dq_serial.heads
        final, begins = serial & (t.block == 0), serial & (t.block == last)
        sums, others = final & (last > 0), serial & (t.block > 0)
        if m == t.first:  # of a head
            self.signal(g, c, 0)
            put(c.ready, Int32(0))
        if sums | (others & (t.block < last)):
            if c.ready[0] == 0:
                self.signal(g, c, 0)
                self.wait_contributions(g, t, c, m, at)
            put(c.ready, c.ready[0] - 1)
        if sums:
            self.fetch(g, s, number, warp)
        s.ds_pipe.wait(c.ring)
        if (c.sent[0] > TOGETHER) | (begins & (c.sent[0] > 1)):
            self.signal(g, c, 1)
        for i in cutlass.range_constexpr(rows * cols):
            self.tile.make(s, c.dq, c.ring, a_part=i // cols, b_part=i % cols)
            if const_expr(i == rows * cols - 1):
                s.ds_pipe.release(c.ring)
            if final:
                self.finish_part(g, s, t, c, head, m, i, sums, warp)
            else:
                self.send_part(g, s, c.dq, number, i, begins, warp)
        c.first[0] = cutlass.select_(c.sent[0] == 0, at, c.first[0])
        c.sent[0] = c.sent[0] + cutlass.select_(others, Int32(1), Int32(0))
        if sums:
            c.sums.advance()
        c.ring.advance()

    def last_block(self, g, t, m):
        """That sees tile m."""
        return key_blocks_of(self.scheduler.extent(g, t.rows_q, t.rows_k), m * self.config.tile).end - 1

    @cute.jit
    def wait_contributions(self, g, t, c, m, at):
        """Wait for the contributions to tile m that have to precede this block's: for block 0 those of all others, else
        the stored one. ready: how many tiles from m on have theirs. Each lane looks at one."""
        mine, ready = m + tk.lane_id(), Int32(0)
        there = mine < t.end
        wanted = cutlass.select_(t.block == 0, self.last_block(g, t, mine), Int32(1))
        at = cutlass.select_(there, at + 4 * tk.lane_id(), at)
        while ready == 0:
            now = there & (load_acquire(g.dq_serial.counts, at) >= wanted)
            not_yet = ~cute.arch.vote_ballot_sync(now)
            ready = cutlass.select_(not_yet == 0, Int32(32), Int32(cute.arch.popc((not_yet & -not_yet) - 1)))
        c.ready[0] = ready
        cute.arch.sync_warp()
        cute.arch.fence_proxy("async.global")

    @cute.jit
    def signal(self, g, c, but: Constexpr[int]):
        """Raise the counts of all tiles that were sent but the last ``but``, when they are there."""
        rows, cols = self.config.dq_parts(self.spec.width)
        if c.sent[0] > but:
            tk.store_wait(but * rows * cols, read=False)
            cute.arch.sync_warp()
            if tk.lane_id() < c.sent[0] - but:
                at = c.first[0] + 4 * tk.lane_id()
                cute.arch.red(g.dq_serial.counts.iterator + at, Int32(1), op="add", dtype="s32", sem="release",
                              scope="gpu")
            put(c.first, c.first[0] + 4 * (c.sent[0] - but))
            put(c.sent, Int32(but))

    def address(self, g, number, i, warp):
        """Of a warp's rows of part i of the accumulator's tile ``number``."""
        (rows, cols), bytes = self.config.dq_parts(self.spec.width), 16 * self.config.dq_cols * 4
        return g.acc.iterator.toint() + (number * (rows * cols) + i) * (4 * bytes) + Int64(warp) * bytes

    @cute.jit
    def fetch(self, g, s, number, warp):
        """The sums of the blocks before, to where others' parts leave from."""
        (rows, cols), sem = self.config.dq_parts(self.spec.width), s.dq_full[warp]
        bytes = 16 * self.config.dq_cols * 4
        cute.arch.sync_warp()
        tk.expect_bytes(sem, rows * cols * bytes)
        with cute.arch.elect_one():
            for i in cutlass.range_constexpr(rows * cols):
                tk.bulk_load(s.dq[None, None, None, warp, i].iterator.toint(), self.address(g, number, i, warp), bytes,
                             sem.ptr.toint())

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
        out = g.dq_serial.dq[batch, None, head, None]
        tk.store_narrow(columns(out, i % cols * self.config.dq_cols), c.dq,
                        first + m * self.config.tile + i // cols * 64, first + t.rows_q)

    @cute.jit
    def send_part(self, g, s, dq, number, i: Constexpr[int], begins, warp):
        """Part i of dQ, to or onto the accumulator."""
        rows, cols = self.config.dq_parts(self.spec.width)
        self.tile.send_rows(
            s.dq[None, None, None, warp, i], dq,
            lambda src, size: store_or_add(begins, self.address(g, number, i, warp), src, size), rows * cols - 1)


def put(x, value):
    x[0] = value
