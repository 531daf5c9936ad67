"""Attention's backward in pairs of blocks, which add dQ up half as often."""
import cutlass
import cutlass.cute as cute
from cutlass import Constexpr, Float32, Int32, Uint32, const_expr

import tkq.tile as tk
from tkq.attention.backward import AttentionBackward
from tkq.attention.backward_state import Pair
from tkq.attention.backward_tasks import claim

OWN, OTHER = 0, 1  # tiles whose dQ this block makes, and the other one


class PairBackward(AttentionBackward):
    """As ``AttentionBackward``; the two blocks of a cluster, with 128 keys each, go through the same tiles, and take
    turns to make a tile's dQ, for the keys of both:

      tile       0                          1                          2 ..
      block 0    dS, dQ = dS K + dS1 K1     dS to block 1              dS, dQ ..
      block 1    dS to block 0              dS, dQ = dS K + dS0 K0     dS to block 0 ..

    Each has the other's keys too. What is added to the accumulator in global memory, fp32, is what bounds the kernel
    without pairs. dS goes from shared memory to shared memory by bulk copies, each warp's own 16 keys as soon as they
    are written.

      semaphore     full (arrivals)                         empty (arrivals)
      own dS        every warp with keys (8)                the dQ warpgroup's warps (4)
      other's dS    bytes from there (1, the dQ warpgroup)  there: the dQ warpgroup's warps here (4)
    """

    def pair(self, al):
        return Pair(k=al.tile(self.kv_tile, self.halves), ds=al.tile(self.ds_tile, self.halves),
                    number=al.vector(1, 1, Int32), told=al.semaphores(2), k_full=al.semaphores(),
                    full=al.semaphores(2), empty=al.semaphores(2))

    @cute.jit
    def next_task(self, g, s, turn):
        """Both blocks' producers: the first one asks, and tells the other."""
        number = Int32(0)
        if tk.cluster_rank() == 0:
            number = claim(g.next, 0)
            tk.wait(s.pair.told[1], turn.phase ^ 1)
            with cute.arch.elect_one():
                tk.store_remote(s.pair.number.iterator, (number.bitcast(Float32),), s.pair.told[0], Int32(1))
        else:
            tk.expect_bytes(s.pair.told[0], 4)
            tk.wait(s.pair.told[0], turn.phase)
            number = cute.arch.make_warp_uniform(s.pair.number[0, 0])
            cute.arch.sync_warp()
            tk.arrive_at(s.pair.told[1], Int32(0))
        turn.advance()
        return number

    # ---- the warpgroups with keys ------------------------------------------------------------------

    def hand_over(self, s, c):
        count, rank = Int32(c.ds_ring.count[0]), tk.cluster_rank()
        kind = (count ^ rank) & 1  # OWN or OTHER: also dS's place in the ring
        tk.wait(s.pair.empty[kind], (count >> 1) & 1 ^ 1)
        tk.store(s.ds[2 * kind + c.wg], c.ds)
        tk.publish()
        cute.arch.sync_warp()
        self.tell(kind == OWN, s.pair.full, *[x.tensor.iterator.toint() for x in (s.pair.ds[c.wg],
                                                                                 s.ds[2 * OTHER + c.wg])], rank ^ 1)

    @cute.jit
    def tell(self, own, full, dst, src, peer):
        """The own dQ warpgroup that the warp's keys of dS are there; or send them."""
        if own:
            tk.arrive(full[OWN])
        else:
            self.send_keys(full[OTHER], dst, src, peer)

    def send_keys(self, full, dst, src, peer):
        """This warp's 16 rows, in each panel of 64 columns."""
        row_bytes = self.ds_tile.swizzle
        with cute.arch.elect_one():
            for panel in range(self.config.tile * 2 // row_bytes):
                first = (panel * 64 + tk.warp_id() % 4 * 16) * row_bytes
                tk.bulk_send(dst + first, src + first, 16 * row_bytes, full.ptr.toint(), peer)

    def wait_for_dq(self, s, c):
        own = (Int32(c.ds_ring.count[0]) - tk.cluster_rank() + 1) >> 1  # tiles whose dQ was made here
        tk.wait(s.pair.empty[OWN], (own - 1) & 1)

    # ---- dQ ----------------------------------------------------------------------------------------

    @cute.jit
    def add_task(self, g, s, t, again: Constexpr, dq, ring, kv):
        """ring: counts the tiles of the tasks before; the blocks take turns with all of them."""
        tiles, rank, before = t.end - t.first, tk.cluster_rank(), Int32(ring.count[0])
        tk.wait(s.kv_full[0], kv.phase)
        tk.wait(s.pair.k_full, kv.phase)
        if const_expr(self.background is not None):
            self.background.await_ready(g, t)
        for i in cutlass.range((rank ^ before) & 1, g.heads_per_kv * tiles, 2, unroll=1):
            self.expect(s.pair.full[OTHER])
            phase = ((before + i) >> 1) & 1
            for kind in cutlass.range_constexpr(2):
                tk.wait(s.pair.full[kind], phase)
            if const_expr(self.config.last_first):
                h, m = i % g.heads_per_kv, t.end - 1 - i // g.heads_per_kv
            else:
                h, m = i // tiles, t.first + i % tiles
            self.add_dq(g, s, dq, None, self.tile_number(g, t, self.query_head(g, t, h), m))
        ring.count[0] = Uint32(before + g.heads_per_kv * tiles)
        self.done_with(s, 0)
        self.next_keys(kv)
        if const_expr(self.background is not None):
            self.background.sign_off(g, again())

    @cute.jit
    def expect(self, full):
        if tk.first_warp_of_group():
            tk.expect_bytes(full, self.halves * self.ds_tile.bytes)

    def make_dq(self, s, dq, ring, **parts):
        mma = tk.mm_AtB
        for ds, keys in ((s.ds, s.k), (s.pair.ds, s.pair.k)):
            for half in range(self.halves):
                mma(dq, ds[half], keys[half], **parts)  # the own dS is in the first place of its ring
                mma = tk.mma_AtB
        tk.mma_wait(0)

    def release_ds(self, s, ring):
        tk.arrive(s.pair.empty[OWN])
        tk.arrive_at(s.pair.empty[OTHER], tk.cluster_rank() ^ 1)
