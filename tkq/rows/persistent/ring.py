"""The ring of shared memory through which rows come, and the producer warp that keeps it full."""
from dataclasses import dataclass
from typing import Any

import cutlass
import cutlass.cute as cute
from cutlass import Constexpr, Int32, Int64, const_expr

from ... import tile as tk
from .partition import BlockPartition
from .shape import RowPlan


@dataclass(frozen=True)
class RowRing:
    """``stages`` tiles of rows of every load.

      full[stage]    the producer's arrival, with the bytes of all loads
      empty[stage]   one arrival of each warp that computes

    A tile's rows lie together in a stage. Where they do so in global memory, it is one bulk copy a load, otherwise one
    a row: no tensor map, no predicates, and a last tile that is not whole just copies less.
    """

    data: tuple  # of (vector, threads of a row, chunks, groups, stages), one for each load
    full: tk.Semaphore
    empty: tk.Semaphore
    plan: Constexpr[RowPlan]

    @staticmethod
    def allocate(al: tk.SharedAllocator, p: RowPlan, dtypes):
        shape = (p.vector, p.threads_per_row, p.chunks, p.groups, p.stages)
        stride = (1, p.vector, p.vector * p.threads_per_row, p.cols, p.cols * p.groups)
        data = []
        for dtype in dtypes:
            memory = al.allocate_array(dtype, p.cols * p.groups * p.stages, byte_alignment=128)
            data.append(cute.make_tensor(memory, cute.make_layout(shape, stride=stride)))
        return RowRing(tuple(data), al.semaphores(p.stages), al.semaphores(p.stages), p)

    def init(self):
        """One thread, before anything else."""
        for i in range(self.plan.stages):
            tk.init(self.full[i], 1)
            tk.init(self.empty[i], self.plan.warps)

    def ring(self):
        return tk.ring(self.plan.stages)

    def views(self, r, part):
        """The thread's (vector, chunks) of its row of the tile at the ring's position, of every load."""
        return [x[None, part.thread, None, part.group, r.stage] for x in self.data]

    def wait(self, r):
        tk.wait(self.full[r.stage], r.phase)

    def release(self, r):
        """A warp has done with the stage."""
        cute.arch.sync_warp()
        tk.arrive(self.empty[r.stage])

    @cute.jit
    def prime(self, loads: Constexpr, s: BlockPartition):
        """The first tiles, before any other warp has seen the ring: no stage needs a wait. One warp."""
        for i in cutlass.range(cutlass.min(s.tiles, Int32(self.plan.stages)), unroll=1):
            self._issue(loads, s, i, i)

    @cute.jit
    def produce(self, loads: Constexpr, s: BlockPartition):
        """All the other tiles. The producer warp."""
        r = tk.ring(self.plan.stages, start=self.plan.stages)
        for i in cutlass.range(self.plan.stages, s.tiles, unroll=1):
            tk.wait(self.empty[r.stage], r.phase ^ 1)
            self._issue(loads, s, i, r.stage)
            r.advance()

    def _issue(self, loads, s, i, stage):
        p = self.plan
        row0 = s.first + i * s.step
        rows = cutlass.min(Int32(p.groups), s.rows - row0)
        width = sum(t.element_type.width for t in loads) // 8
        tk.expect_bytes(self.full[stage], rows * s.limit * width)
        sem = self.full[stage].ptr.toint()
        for t, x in zip(loads, self.data, strict=True):
            self._copy(t, x[None, None, None, None, stage].iterator.toint(), sem, s, row0, rows)

    @cute.jit
    def _copy(self, t: cute.Tensor, dst: Int32, sem: Int32, s: Constexpr, row0: Int32, rows: Int32):
        p = self.plan
        size = const_expr(t.element_type.width // 8)
        stride, row_bytes = Int64(t.stride[0]) * size, s.limit * size
        src = t.iterator.toint() + Int64(row0) * stride + s.col0 * size
        copies, bytes_ = rows, row_bytes
        if const_expr(p.groups == 1):
            copies = Int32(1)
        else:
            if stride == Int64(row_bytes):
                copies, bytes_ = Int32(1), rows * row_bytes
        with cute.arch.elect_one():
            for k in cutlass.range(copies, unroll=1):
                tk.bulk_load(dst + k * row_bytes, src + Int64(k) * stride, bytes_, sem, p.evict_first)


@dataclass(frozen=True)
class GlobalRows:
    """The same seen by a kernel without a ring: rows stay in global memory, and each reader loads them."""

    loads: Any

    def views(self, row, part):
        return [part.of_row(t, row) for t in self.loads]
