"""dQ policy "ordered" without a place in shared memory: as ``dq_ordered``, but the dQ warpgroup stores or adds from its
registers, when a warp that waits for the blocks before says that it may. Above head_dim 128, where a tile of dQ is 64
KB, its way through shared memory would take a third of its bandwidth, and the room of P's and dS's second stages.

A kernel behind converts dQ: with helper warps that do, 0.94 to 1.01 of its speed (H200, S 1024 to 16384)."""
import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32, const_expr

import tkq.tile as tk
from tkq.attention.backward.config import DQ_SENDERS, BackwardConfig
from tkq.attention.backward.dq_senders import DqSenders
from tkq.attention.backward.dq_tile import DqTile
from tkq.attention.backward.spec import BackwardSpec
from tkq.attention.common.counters import signal, wait_count, words_of


class OrderedDqFromRegisters:
    """These roles of ``BackwardKernel`` are others:

      1 warpgroup (dQ)      dQ = dS K, part by part | before the first leaves, wait for the tile's turn | store or add
                            each | say that all have left | next tile ..
      DQ_SENDERS (warps     wait until the blocks before are in the tile | give it its turn | wait until all parts have
      from 1 on)            left, and then until they have arrived; count this block in | its next tile ..
      the kernel behind     ``BackwardPostprocess``

      pipe      stages      full (arrivals)            empty (arrivals)
      turn      DQ_SENDERS  the stage's sender (1)     the dQ warpgroup's warps (4)

      in global memory      begins  is added to by
      word, of a tile       0       the sender of each block of keys that sees it, when all parts have arrived (1)

    Senders take tiles in turns: one waits for arrivals, a microsecond or so, while the dQ warpgroup is at the next tile
    and another sender has given that its turn.

    Deadlock-free, whichever blocks are resident: a sender waits on blocks of keys claimed before its own, and on its
    block's dQ warpgroup, which waits on senders of earlier tiles and its own alone.
    """

    def __init__(self, spec: BackwardSpec, config: BackwardConfig, tile: DqTile, scheduler, helper_warps):
        self.config, self.tile, self.scheduler, self.helper_warps = config, tile, scheduler, helper_warps
        self.rows, self.cols = config.dq_parts(spec.width)
        self.parts, self.part_bytes = self.rows * self.cols, 64 * config.dq_cols * 4

    def pipe(self, al):
        """Of turns, drawn above."""
        return al.pipe(DQ_SENDERS, 0, 4)

    # ---- the dQ warpgroup ----------------------------------------------------------------------------

    @cute.jit
    def run(self, g, s):
        dq, ring, kv = tk.rt_fl(self.config.dq_cols), s.ds_pipe.ring(), tk.ring(1)
        turn = s.dq_pipe.ring()
        self.scheduler.each_task(g, s, lambda t, _: self.make_task(g, s, t, dq, ring, kv, turn))

    @cute.jit
    def make_task(self, g, s, t, dq, ring, kv, turn):
        tk.wait(s.kv_full[0], kv.phase)
        self.scheduler.each_tile(g, t, lambda _, h, m: self.make_tile(g, s, t, h, m, dq, ring, turn))
        self.scheduler.release_kv(s, 0)
        self.scheduler.next_kv(kv)

    @cute.jit
    def make_tile(self, g, s, t, h, m, dq, ring, turn):
        number = self.scheduler.tile_number(g, t, self.scheduler.query_head(g, t, h), m)
        first = self.scheduler.blocks_before(g, t, m) == 0
        warp_bytes = 16 * self.config.dq_cols * 4
        address = (g.acc.iterator.toint() + number * (self.parts * self.part_bytes) + tk.warp_id() % 4 * warp_bytes
                   + tk.lane_id() * 16)
        s.ds_pipe.wait(ring)
        for i in cutlass.range_constexpr(self.parts):
            self.tile.make(s, dq, ring, a_part=i // self.cols, b_part=i % self.cols)
            if const_expr(i == self.parts - 1):
                s.ds_pipe.release(ring)
            if const_expr(i == 0):
                s.dq_pipe.wait(turn)
            self.put(address + i * self.part_bytes, dq, first)
        cute.arch.sync_warp()
        s.dq_pipe.release(turn)
        turn.advance()
        ring.advance()

    @cute.jit
    def put(self, address, dq, first):
        """A thread's elements of a part: the first contributor stores, later ones add."""
        x, quads = dq.tensor, self.config.dq_cols // 8
        if first:
            mine = cute.make_tensor(x.iterator, cute.make_layout((4, quads)))
            to = cute.make_ptr(Float32, address, cute.AddressSpace.gmem, assumed_align=16)
            theirs = cute.make_tensor(to, cute.make_layout((4, quads), stride=(1, 128)))
            for j in cutlass.range_constexpr(quads):
                cute.autovec_copy(mine[None, j], theirs[None, j])
        else:
            for j in cutlass.range_constexpr(quads):
                tk.red_add4(address + j * 512, *[x[4 * j + e] for e in range(4)])

    # ---- senders -------------------------------------------------------------------------------------

    def send(self, g, s):
        """A warp of the first warpgroup but the producer: all tiles that it gives their turn, if it is a sender."""
        DqSenders(self.scheduler, self.send_tile).run(g, s)

    @cute.jit
    def send_tile(self, g, s, t, head, m, turn, _):
        number, words = self.scheduler.tile_number(g, t, head, m), words_of(g)
        wait_count(words, Int32(number), self.scheduler.blocks_before(g, t, m))
        s.dq_pipe.commit(turn)
        tk.wait(s.dq_pipe.empty[turn.stage], turn.phase)
        signal(words, Int32(number))
