"""dQ policy "ordered": the key blocks that see a tile of queries add to its dQ one after the other, from the last block
to the first, so that dQ has the same bits in each run. The first of them stores, so that nothing is zeroed before.

The blocks of a head are claimed from the last to the first, those of several heads in turns: blocks that follow each
other in a tile's order then begin at different times, and one finds the one before it ahead. A block of a causal
problem begins at its diagonal, so that it is behind the later ones by itself."""
import cutlass
import cutlass.cute as cute
from cutlass import Int32, const_expr

import tkq.tile as tk
from tkq.attention.backward.config import BackwardConfig
from tkq.attention.backward.dq_tile import DqTile, store_or_add
from tkq.attention.backward.spec import BackwardSpec
from tkq.attention.common.counters import signal, wait_count, words_of


class OrderedDq:
    """These roles of ``BackwardKernel`` are others:

      1 warpgroup (dQ)     dQ = dS K, part by part, each to shared memory | next tile ..
      dq_senders (warps    number of blocks in the tile | wait until all later ones are | each part, stored or added, as
      1 and on)            it comes | wait until all have arrived, count this block in | its next tile ..
      helper warps         ``ConvertHelperWarps``; senders too, when there is no task left

      pipe      stages     full (arrivals)             empty (arrivals)
      dQ        dq_stages  the dQ warpgroup's warps (4)  the tile's sender (1)

      in global memory     begins   is added to by
      word, of a tile      0        the sender of each block of keys that sees it, when its part has arrived (1)

    With two senders one waits for arrivals, of a microsecond or so, while the other sends the next tile.

    Deadlock-free, whichever blocks are resident: a sender waits on blocks of keys claimed before its own, and on its
    block's dQ warpgroup, which waits on senders of the tiles before alone.
    """

    def __init__(self, spec: BackwardSpec, config: BackwardConfig, tile: DqTile, scheduler):
        self.config, self.tile, self.scheduler = config, tile, scheduler
        self.grid = config.dq_parts(spec.width)
        self.parts = self.grid[0] * self.grid[1]  # of a tile
        self.part_bytes = 64 * config.dq_cols * 4

    # ---- the dQ warpgroup ----------------------------------------------------------------------------

    @cute.jit
    def run(self, g, s):
        dq, ring, out, kv = tk.rt_fl(self.config.dq_cols), s.ds_pipe.ring(), s.dq_pipe.ring(), tk.ring(1)
        self.scheduler.each_task(g, s, lambda t, _: self.make_task(g, s, t, dq, ring, out, kv))

    @cute.jit
    def make_task(self, g, s, t, dq, ring, out, kv):
        tk.wait(s.kv_full[0], kv.phase)
        self.scheduler.each_tile(g, t, lambda *_: self.make_tile(s, dq, ring, out))
        self.scheduler.release_kv(s, 0)
        self.scheduler.next_kv(kv)

    @cute.jit
    def make_tile(self, s, dq, ring, out):
        s.ds_pipe.wait(ring)
        for i in cutlass.range_constexpr(self.parts):
            self.tile.make(s, dq, ring, a_part=i // self.grid[1], b_part=i % self.grid[1])
            if const_expr(i == self.parts - 1):
                s.ds_pipe.release(ring)
            s.dq_pipe.acquire_empty(out)
            self.tile.write_rows(s.dq[None, None, None, tk.warp_id() % 4, out.stage], dq)
            s.dq_pipe.commit(out)
            out.advance()
        ring.advance()

    # ---- senders -------------------------------------------------------------------------------------

    @cute.jit
    def send(self, g, s):
        """A warp of the first warpgroup but the producer: all that it has to send, if it is a sender."""
        number = tk.warp_id() - 1
        if number < self.config.dq_senders:
            out, turn = s.dq_pipe.ring(), tk.ring(self.config.dq_senders)
            cute.arch.griddepcontrol_wait()  # the words are zero
            self.scheduler.each_task(g, s, lambda t, _: self.scheduler.each_tile(
                g, t, lambda _, h, m: self.send_in_turn(g, s, t, h, m, out, turn, number)))

    @cute.jit
    def send_in_turn(self, g, s, t, h, m, out, turn, number):
        if turn.stage == number:
            self.send_tile(g, s, t, self.scheduler.query_head(g, t, h), m, out)
        else:
            for _ in cutlass.range_constexpr(self.parts):
                out.advance()
        turn.advance()

    @cute.jit
    def send_tile(self, g, s, t, head, m, out):
        number, words = self.scheduler.tile_number(g, t, head, m), words_of(g)
        later = self.scheduler.blocks_seen(g, t.rows_q, t.rows_k, m) - 1 - t.block
        wait_count(words, Int32(number), later)
        cute.arch.fence_proxy("async.global")
        address = g.acc.iterator.toint() + number * (self.parts * self.part_bytes)
        for i in cutlass.range_constexpr(self.parts):
            s.dq_pipe.wait(out)
            self.send_part(s.dq[None, None, None, None, out.stage], address + i * self.part_bytes, later == 0)
            tk.store_wait()
            cute.arch.sync_warp()
            s.dq_pipe.release(out)
            out.advance()
        tk.store_wait(read=False)
        signal(words, Int32(number))

    @cute.jit
    def send_part(self, staging, address, first):
        if tk.lane_id() == 0:
            store_or_add(first, address, staging.iterator.toint(), self.part_bytes)
            tk.bulk_commit()
