"""A warp's slice of a state, which is one piece of memory, by bulk copies to and from shared memory."""
import cutlass.cute as cute
from cutlass import Float32, Int32

import tkq.tile as tk
from tkq.linear_attention.step.plan import MOST_WARPS
from tkq.linear_attention.step.state import LaneState
from tkq.tile import vectors


class BulkSlices:
    """Each warp has a place and a semaphore of its own, which completes one phase: a wait ends when all bytes of the
    one load that was announced are there."""

    def __init__(self, state: LaneState):
        c = state.config
        self.state, self.config, self.warps = state, c, max(c.k_warps, MOST_WARPS)
        self.bytes = c.rows * c.columns * state.dtype.width // 8

    def memory(self):
        """(this warp's place, its semaphore), which is initialised. Every thread calls it."""
        warp, smem, c = tk.warp_id(), tk.SharedAllocator(), self.config
        place = smem.vector(c.rows * c.columns, self.warps, self.state.dtype)[(None, warp)]
        semaphores = smem.semaphores(self.warps)
        if c.bulk_load:
            with cute.arch.elect_one():
                tk.init(semaphores[warp], 1)
            cute.arch.mbarrier_init_fence()
            cute.arch.sync_warp()
        return place, semaphores[warp]

    def address(self, pool, row, head, part):
        """Of the slice in the pool."""
        c, state = self.config, self.state
        first = state.first(pool, row, head, part)
        return first.iterator.toint() - self.inside(pool, part) * (state.dtype.width // 8)

    def inside(self, pool, part):
        """Of the lane's first number in the slice."""
        v_first = self.state.spec.v_first
        strides = pool.layout.stride
        k, v = (strides[3], strides[2]) if v_first else (strides[2], strides[3])
        return part.k_in_slice * k + part.in_slice * v

    def load(self, memory, pool, row, head, part):
        """All of the warp."""
        place, sem = memory
        tk.expect_bytes(sem, self.bytes)
        with cute.arch.elect_one():
            tk.bulk_load(place.iterator.toint(), self.address(pool, row, head, part), self.bytes, sem.ptr.toint())

    def seen(self, place, pool, part):
        """The place from the lane's (0, 0) on, as (K, V)."""
        k, v = (3, 2) if self.state.spec.v_first else (2, 3)
        return cute.make_tensor(place.iterator + self.inside(pool, part), cute.select(pool.layout, [k, v]))

    def read(self, state, memory, pool, part):
        place, sem = memory
        tk.wait(sem, 0)
        seen = self.seen(place, pool, part)
        for i, j, n in self.state.accesses():
            cute.autovec_copy(self.state.run(seen, i, j, n), self.state.held(state, i, j, n))

    def store(self, state, memory, pool, row, head, part):
        """All of the warp."""
        place, _ = memory
        seen = self.seen(place, pool, part)
        for i, j, n in self.state.accesses():
            cute.autovec_copy(self.state.held(state, i, j, n), self.state.run(seen, i, j, n))
        tk.publish()
        cute.arch.sync_warp()
        with cute.arch.elect_one():
            tk.bulk_store(self.address(pool, row, head, part), place.iterator.toint(), self.bytes)
            tk.bulk_commit()
            tk.store_wait(0)
