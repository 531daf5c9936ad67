"""Rows held in registers: one block (or cluster) for each tile, without a ring and a persistent loop."""
from dataclasses import dataclass

import cutlass
import cutlass.cute as cute
from cutlass import Constexpr, Int32, Int64
from cutlass.cute.nvgpu import CacheEvictionPriority, CopyG2ROp

from .partition import global_view
from .shape import RowPlan


@dataclass(frozen=True)
class HeldRows:
    """Each thread's part of its row, of every load, in the type that it has in memory."""

    data: tuple  # of (vector, chunks)
    plan: Constexpr[RowPlan]

    @staticmethod
    def allocate(p: RowPlan, dtypes):
        return HeldRows(tuple(cute.make_rmem_tensor((p.vector, p.chunks), dtype) for dtype in dtypes), p)

    def views(self, _, part):
        return self.data

    def load(self, loads, part):
        """Every access goes out before any is waited for. A thread without a row loads the last one, and for a chunk
        past the row's end its block's first: no branch, and what is outside counts for nothing later on."""
        row = Int64(cutlass.min(part.row(0), part.share.rows - 1))
        for t, held in zip(loads, self.data, strict=True):
            atom = self._atom(t.element_type)
            for j in range(self.plan.chunks):
                at = row * Int64(t.stride[0]) + part.share.col0 + self._column(part, j)
                src = global_view(t, at, cute.make_layout(self.plan.vector), self._bits(t.element_type) // 8)
                cute.copy(atom, src, held[None, j])

    def _column(self, part, j):
        column, inside = (j * self.plan.threads_per_row + part.thread) * self.plan.vector, part.inside(j)
        return column if inside is True else cutlass.select_(inside, column, Int32(0))

    def _bits(self, dtype):
        return self.plan.vector * dtype.width

    def _atom(self, dtype):
        """Past L1 where an access has 8 bytes and more: smaller ones share a sector with their neighbours."""
        bits = self._bits(dtype)
        hint = dict(l1c_evict_priority=CacheEvictionPriority.NO_ALLOCATE) if self.plan.past_l1 and bits >= 64 else {}
        return cute.make_copy_atom(CopyG2ROp(), dtype, num_bits_per_copy=bits, **hint)
