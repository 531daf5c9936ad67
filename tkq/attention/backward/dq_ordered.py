"""dQ policy "ordered": the key blocks that see a tile of queries add to its dQ one after the other, from the last block
to the first, so that dQ has the same bits in each run. The first of them stores, so that nothing is zeroed before.

The blocks of a head are claimed from the last to the first, those of several heads in turns: blocks that follow each
other in a tile's order then begin at different times, and one finds the one before it ahead. A block of a causal
problem begins at its diagonal, so that it is behind the later ones by itself."""
from typing import Any, NamedTuple

import cutlass
import cutlass.cute as cute
from cutlass import Int32, const_expr

import tkq.tile as tk
from tkq.attention.backward.config import DQ_SENDERS, BackwardConfig
from tkq.attention.backward.dq_senders import DqSenders
from tkq.attention.backward.dq_tile import DqTile, store_or_add
from tkq.attention.backward.spec import BackwardSpec
from tkq.attention.common.counters import signal, wait_count, words_of


class PartOfSender(NamedTuple):
    """For ``Pipe``, as a ``Ring``: a part of a tile of sender ``stage``, whose tiles have an even number of parts."""

    stage: Any
    phase: int


class OrderedDq:
    """These roles of ``BackwardKernel`` are others:

      1 warpgroup (dQ)      dQ = dS K, part by part, each to shared memory | next tile ..
      DQ_SENDERS (warps     wait until the blocks before are in the tile | each part, stored or added, as it comes |
      from 1 on)            wait until all have arrived, count this block in | its next tile ..
      helper warps          ``ConvertHelperWarps``; all of these too, when there is no task left

      pipe      stages      full (arrivals)                    empty (arrivals)
      dQ        DQ_SENDERS  the dQ warpgroup's warps (4)       the stage's sender (1)

      in global memory      begins  is added to by
      word, of a tile       0       the sender of each block of keys that sees it, when all parts have arrived (1)

    Senders take tiles in turns: one waits for arrivals, a microsecond or so, while the next one sends. Each has
    semaphores of its own, as one that waits for a phase must not miss two of them; and a buffer of its own, or one goes
    from sender to sender.

    Deadlock-free, whichever blocks are resident: a sender waits on blocks of keys claimed before its own, and on its
    block's dQ warpgroup, which waits on senders of earlier tiles alone.
    """

    def __init__(self, spec: BackwardSpec, config: BackwardConfig, tile: DqTile, scheduler, helper_warps):
        self.config, self.tile, self.scheduler, self.helper_warps = config, tile, scheduler, helper_warps
        self.rows, self.cols = config.dq_parts(spec.width)
        self.parts, self.part_bytes = self.rows * self.cols, 64 * config.dq_cols * 4
        self.one_buffer = config.dq_stages < DQ_SENDERS

    def pipe(self, al):
        """Of parts, drawn above."""
        return al.pipe(DQ_SENDERS, 0, 1, producers=4)

    def buffer(self, s, sender):
        """(4, lane, quads, warps): where a sender's parts are."""
        return s.dq[None, None, None, None, 0 if self.one_buffer else sender]

    # ---- the dQ warpgroup ----------------------------------------------------------------------------

    @cute.jit
    def run(self, g, s):
        dq, ring, kv = tk.rt_fl(self.config.dq_cols), s.ds_pipe.ring(), tk.ring(1)
        turn = tk.ring(DQ_SENDERS)
        self.scheduler.each_task(g, s, lambda t, _: self.make_task(g, s, t, dq, ring, kv, turn))
        self.helper_warps.run(g)

    @cute.jit
    def make_task(self, g, s, t, dq, ring, kv, turn):
        tk.wait(s.kv_full[0], kv.phase)
        self.scheduler.each_tile(g, t, lambda *_: self.make_tile(s, dq, ring, turn))
        self.scheduler.release_kv(s, 0)
        self.scheduler.next_kv(kv)

    @cute.jit
    def make_tile(self, s, dq, ring, turn):
        sender = turn.stage
        turn.advance()
        s.ds_pipe.wait(ring)
        for i in cutlass.range_constexpr(self.parts):
            self.tile.make(s, dq, ring, a_part=i // self.cols, b_part=i % self.cols)
            if const_expr(i == self.parts - 1):
                s.ds_pipe.release(ring)
            if const_expr(i == 0 and self.one_buffer):
                for other in range(DQ_SENDERS):
                    s.dq_pipe.acquire_empty(PartOfSender(other, 0))
            part = PartOfSender(sender, i % 2)
            s.dq_pipe.acquire_empty(part)
            self.tile.write_rows(self.buffer(s, sender)[None, None, None, tk.warp_id() % 4], dq)
            s.dq_pipe.commit(part)
        ring.advance()

    # ---- senders -------------------------------------------------------------------------------------

    def send(self, g, s):
        """A warp of the first warpgroup but the producer: all that it has to send, if it is a sender."""
        DqSenders(self.scheduler, self.send_tile).run(g, s)

    @cute.jit
    def send_tile(self, g, s, t, head, m, _, sender):
        number, words = self.scheduler.tile_number(g, t, head, m), words_of(g)
        before = self.scheduler.blocks_before(g, t, m)
        wait_count(words, Int32(number), before)
        cute.arch.fence_proxy("async.global")
        address = g.acc.iterator.toint() + number * (self.parts * self.part_bytes)
        for i in cutlass.range_constexpr(self.parts):
            part = PartOfSender(sender, i % 2)
            s.dq_pipe.wait(part)
            self.send_part(self.buffer(s, sender), address + i * self.part_bytes, before == 0)
            tk.store_wait()
            cute.arch.sync_warp()
            s.dq_pipe.release(part)
        tk.store_wait(read=False)
        signal(words, Int32(number))

    @cute.jit
    def send_part(self, buffer, address, first):
        if tk.lane_id() == 0:
            store_or_add(first, address, buffer.iterator.toint(), self.part_bytes)
            tk.bulk_commit()
