"""The producer warp of the attention kernel: which task next, and its tiles of Q, K and V."""
import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32

import tkq.tile as tk
from tkq.attention.common.mask import key_blocks_of
from tkq.attention.forward.state import Tiles, clipped, extent, field_names, unclipped
from tkq.attention.forward.tile_scheduler import Task


class Producer:
    def __init__(self, spec, config, fields=None):
        """fields: of a task, as its consumers expect them; those of the forward where not given."""
        self.spec, self.config, self.tiles = spec, config, Tiles.of(spec, config)
        self.fields = fields or field_names(spec)

    @cute.jit
    def run(self, g, smem):
        tk.prefetch(g.q, g.k, g.v, *[g.o] * (not self.config.o_from_registers))
        k_ring, v_ring, q_ring = smem.k_pipe.ring(), smem.v_pipe.ring(), tk.ring(self.config.q_stages)
        next_task_slot = tk.ring(1)
        tasks, schedule = g.tasks.begin(g.schedule)
        number = schedule.first()
        while number < schedule.tasks:
            t = tasks.find(number)
            seen = self.seen(g, t)
            end, head = seen.first + seen.blocks, t.head // g.tasks.heads_per_kv
            # Scores of keys behind the sequence are masked, whatever they are; values there are not: 0 * NaN is NaN.
            k, k_of = unclipped(self.spec, g.k, t.batch_k, t.rows_k)
            v, v_of = clipped(self.spec, g.v, t.batch_k, t.rows_k)
            k_of, v_of = (*k_of, head), (*v_of, head)
            self.load(smem.k, k, smem.k_pipe, k_ring, k_of, end - 1)
            self.load_q(g, smem, q_ring, t, seen)
            for j in cutlass.range(1, seen.blocks, unroll=1):
                self.load(smem.k, k, smem.k_pipe, k_ring, k_of, end - 1 - j)
                self.load(smem.v, v, smem.v_pipe, v_ring, v_of, end - j)
            # Not earlier: fetching 1 or 3 blocks ahead gained nothing, and working the next task out before V's last
            # load lost 2 to 3 % of causal problems.
            fetched = schedule.fetch()
            self.load(smem.v, v, smem.v_pipe, v_ring, v_of, seen.first)
            number = schedule.following(number, fetched, lambda found: self.signal(smem, found, next_task_slot))
        self.close(smem, q_ring)

    @cute.jit
    def signal(self, smem, number, next_task_slot):
        """From the first block's number to both blocks'."""
        place, (there, read) = smem.next_task_slot[0], (smem.next_task_slot[1][0], smem.next_task_slot[1][1])
        if tk.cluster_rank() == 0:
            tk.wait(read, next_task_slot.phase ^ 1)
            with cute.arch.elect_one():
                tk.store_remote(place.iterator, (number.bitcast(Float32),), there, Int32(1))
        else:
            tk.expect_bytes(there, 4)
            tk.wait(there, next_task_slot.phase)
            number = cute.arch.make_warp_uniform(place[0, 0])
            cute.arch.sync_warp()
            tk.arrive_at(read, Int32(0))
        next_task_slot.advance()
        return number

    @cute.jit
    def close(self, smem, q_ring):
        """No more tasks."""
        for w in cutlass.range_constexpr(self.config.consumers):
            i = self.acquire_q(smem, q_ring, w)
            with cute.arch.elect_one():
                smem.task[self.fields.index("blocks"), i] = Int32(0)
                cute.arch.mbarrier_arrive(smem.q_full[i].ptr)

    def seen(self, g, t: Task):
        """The key blocks of a task, the same for all blocks of a cluster."""
        rows_k = cutlass.max(t.rows_k, 1) if self.spec.varlen else t.rows_k  # where there is no key, one block of none
        e = extent(self.spec, self.config, g, t.rows_q, rows_k)
        return key_blocks_of(e, t.tile * e.tile_rows)

    def load(self, dst, src, pipe, ring, of, block):
        sem = pipe.acquire(ring)
        tk.load_async(dst[ring.stage], src, (*of, block, 0), sem)
        ring.advance()

    def acquire_q(self, smem, ring, w):
        """Wait until consumer w has done with the Q tile at the ring's position: its index."""
        i = ring.stage * self.config.consumers + w
        tk.wait(smem.q_empty[i], ring.phase ^ 1)
        return i

    def load_q(self, g, smem, ring, t, seen):
        """Each consumer's Q tile, and the task with it."""
        tile = t.tile
        if self.config.cluster > 1:
            tile = tile * self.config.cluster + tk.cluster_rank()
        known = {**t._asdict(), "tile": tile, **vars(seen)}
        q, of = unclipped(self.spec, g.q, t.batch, t.rows_q)  # rows behind the sequence are not written
        for w in range(self.config.consumers):
            i = self.acquire_q(smem, ring, w)
            with cute.arch.elect_one():
                for f, name in enumerate(self.fields):
                    smem.task[f, i] = Int32(known[name])
                cute.arch.mbarrier_arrive_and_expect_tx(smem.q_full[i].ptr, self.tiles.q.bytes)
            tk.load_async(smem.q[i], q, (*of, t.head, tile * self.config.consumers + w, 0), smem.q_full[i])
        ring.advance()
