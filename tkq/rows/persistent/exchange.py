"""One result for a whole row: across the lanes of a warp, the warps of a block, the blocks of a cluster."""
from dataclasses import dataclass

import cutlass
import cutlass.cute as cute
from cutlass import Constexpr, Float32, const_expr

from ... import tile as tk
from .monoid import Monoid
from .returned import combined
from .shape import WARP, RowPlan, padded_sums


def of_vector(values, monoid: Monoid):
    """A thread's element with numbers only: the lanes of vectors combined."""
    if all(not isinstance(v, cute.TensorSSA) for v in values):
        return values
    if monoid.adds:
        return tuple(v.reduce(cute.ReductionOp.ADD, Float32(0), 0) for v in values)
    held = [cute.make_rmem_tensor(v.shape, Float32) for v in values]
    for h, v in zip(held, values, strict=True):
        h.store(v)
    parts = [tuple(h[i] for h in held) for i in range(cute.size(held[0]))]
    while len(parts) > 1:  # a tree
        parts = [combined(monoid, *parts[i:i + 2]) if i + 1 < len(parts) else parts[i]
                 for i in range(0, len(parts), 2)]
    return parts[0]


def across_lanes(values, monoid: Monoid, lanes: int):
    """Over aligned groups of ``lanes`` lanes; all of them get the result."""
    offset = 1
    while offset < lanes:
        others = tuple(cute.arch.shuffle_sync_bfly(v, offset=offset) for v in values)
        values = combined(monoid, values, others)
        offset *= 2
    if not monoid.symmetric and lanes > 1:
        first = tk.lane_id() // lanes * lanes
        values = tuple(cute.arch.shuffle_sync(v, first) for v in values)
    return values


@dataclass(frozen=True)
class Slots:
    """Where a row's warps put their elements for all of them to read, ``plan.depth`` (4) rows deep.

      slots[d]   (values, warp of the row in all blocks, row of the tile): written by the warp, in every block
      met[d]     one semaphore a row of the tile. One block: each warp of the row arrives. A cluster: the row's first
                 warp arrives and expects the bytes that all warps of all blocks send (st.async)

    A warp publishes row i after it has collected row i - 2, which all warps published, each after it had collected
    row i - 4: so slot i % 4 is free without a signal. Where the first warp alone collects a last exchange
    (``PersistentElements.first_finishes``) it is so by the one before: a warp publishes row i after it has collected
    row i of that, which the first warp published after it had collected row i - 3 of the last one. Blocks that come and
    go (``RowPlan.held``) have one row each, and no slot is used twice.
    """

    data: cute.Tensor  # (floats of a piece, pieces, width, groups, depth)
    met: tk.Semaphore
    plan: Constexpr[RowPlan]
    monoid: Constexpr[Monoid]

    @staticmethod
    def allocate(al: tk.SharedAllocator, p: RowPlan, monoid: Monoid):
        floats = padded_sums(monoid.sums)
        piece = min(floats, 4)
        layout = cute.make_ordered_layout((piece, floats // piece, p.width, p.groups, p.depth), order=(0, 1, 2, 3, 4))
        data = al.allocate_tensor(Float32, layout, 128)
        return Slots(data, al.semaphores(p.depth * p.groups), p, monoid)

    def init(self):
        """One thread, before the block goes on."""
        p = self.plan
        for i in range(p.depth * p.groups):
            tk.init(self.met[i], 1 if p.cluster > 1 else p.warps_per_row)

    def ring(self):
        return tk.ring(self.plan.depth)

    @cute.jit
    def publish(self, r: Constexpr, part: Constexpr, values: Constexpr):
        """Give this warp's element, the same in all lanes, to the row's other warps. Does not wait."""
        p = self.plan
        sem = self.met[r.stage * p.groups + part.group]
        at = self.data[None, None, part.share.rank * p.warps_per_row + part.warp, part.group, r.stage]
        pieces = self._pieces(values)
        if const_expr(p.cluster == 1):
            if tk.lane_id() == 0:
                for i in cutlass.range_constexpr(len(pieces)):
                    for k in cutlass.range_constexpr(len(pieces[i])):
                        at[k, i] = pieces[i][k]
                cute.arch.mbarrier_arrive(sem.ptr)
        else:
            if part.warp == 0:
                tk.expect_bytes(sem, 4 * padded_sums(self.monoid.sums) * p.width)
            if tk.lane_id() < p.cluster:
                for i in cutlass.range_constexpr(len(pieces)):
                    tk.store_remote(at[None, i].iterator, pieces[i], sem, tk.lane_id())

    def _pieces(self, values):
        floats = padded_sums(self.monoid.sums)
        piece = min(floats, 4)
        values = [*values, *[Float32(0)] * (floats - self.monoid.sums)]
        return [values[i:i + piece] for i in range(0, floats, piece)]

    def collect(self, r, part):
        """Wait for the elements of all the row's warps: their combination."""
        p = self.plan
        tk.wait(self.met[r.stage * p.groups + part.group], r.phase)
        lanes = min(p.width, WARP)
        values = self._read(r, part, tk.lane_id() % lanes if lanes < WARP else tk.lane_id())
        for first in range(WARP, p.width, WARP):
            values = combined(self.monoid, values, self._read(r, part, tk.lane_id() + first))
        return across_lanes(values, self.monoid, lanes)

    def _read(self, r, part, column):
        slot = self.data[None, None, column, part.group, r.stage]
        held = cute.make_rmem_tensor(slot.shape, Float32)
        cute.autovec_copy(slot, held)
        return tuple(held[i] for i in range(self.monoid.sums))
