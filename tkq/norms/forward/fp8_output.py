"""Quantised: a RowNorm whose result is float8 e4m3, with a scale for each row or for each 128 columns of a row.

scale = amax / 448, 448 being e4m3's largest number; the result is about q * scale. The results wait in registers while
amax is found. A row's is exchanged like the statistics, with a buffer and an mbarrier of its own. 128 columns lie in
neighbouring lanes, so theirs is found by shuffles; only where an access is narrower than 4 elements they span warps.
"""
import cutlass
import cutlass.cute as cute
from cutlass import Float32

from ... import tile as tk
from ...rows.one_pass.copies import both
from ...tile.float8 import nan_max, scale_of
from ...utils import WARP, row_reduce, warp_reduce
from ..spec import GROUP
from .row_norm import Options


class Fp8Output(Options):
    def _finish(self, g, parts, mine, statistics, affine):
        ys = [[] for _ in parts]
        for j in range(self.tile.blocks):
            affine_j = self._affine_of(g, affine, mine.inside, j)
            for r, part in enumerate(parts):
                ys[r].append(self._result(part, j, statistics[r], affine_j[r]))
        amax = [[self._largest(y, mine.inside[j]) for j, y in enumerate(of_row)] for of_row in ys]
        amax = self._of_rows(amax, parts) if self.spec.scale == "row" else self._of_groups(amax, mine)
        for r, place in enumerate(mine.places):
            scales = [scale_of(m, self.spec.out) for m in amax[r]]
            self._store_scales(g.scale, place, mine, scales)
            inverses = [cute.arch.rcp_approx(s) for s in scales]
            for j, y in enumerate(ys[r]):
                self._store(g.out, place, mine, self._packed(y * inverses[j // self._together()], g.out), j)

    def _store_scales(self, scale, place, mine, scales):
        if self.spec.scale == "row":
            self._store_scalar(scale, place, scales[0], mine.col == 0, 0)
            return
        t, first = self.tile, mine.col % GROUP == 0
        for i, s in enumerate(scales):
            j = i * self._together()
            column = (mine.col + j * t.vector * t.threads_per_row) // GROUP
            self._store_scalar(scale, place, s, both(first, mine.inside[j]), column)

    # ---- the largest |y| ----------------------------------------------------------------------------

    def _largest(self, y, inside):
        """Of one vector; NaN where there is one in it."""
        m = cute.math.abs(y).reduce(cute.ReductionOp.MAX, 0.0, 0)
        return m if inside is True else cutlass.select_(inside, m, Float32(0))

    def _of_rows(self, amax, parts):
        """[amax] of each row, in all of its threads."""
        found = []
        for part, ms in zip(parts, amax, strict=True):
            buffer = part.buffers[1]
            if buffer.element_type is not Float32:  # room for two floats, of which it needs one
                buffer = cute.make_tensor(cute.recast_ptr(buffer.iterator, dtype=Float32), buffer.layout)
            found.append([row_reduce(_max_of(ms), cute.ReductionOp.MAX, self.tile.threads_per_row, buffer,
                                     part.mbar_ptrs[1])])
        return found

    def _together(self):
        """Vectors of a thread that share a scale: all of its row, or those within 128 columns."""
        t = self.tile
        return t.blocks if self.spec.scale == "row" else max(1, GROUP // (t.vector * t.threads_per_row))

    def _of_groups(self, amax, mine):
        """The amax of each 128 columns that a thread has a part of, for each row."""
        n, lanes = self._together(), min(self.tile.threads_per_row, GROUP // self.tile.vector)
        found = [[warp_reduce(_max_of(ms[i:i + n]), nan_max, min(lanes, WARP)) for i in range(0, len(ms), n)]
                 for ms in amax]
        return found if lanes <= WARP else self._across_warps(found, mine, lanes // WARP)

    def _across_warps(self, found, mine, warps):
        """The same for groups of `warps` warps."""
        layout = cute.make_layout((self.tile.threads // WARP, len(found[0]), len(found)))
        met = mine.smem.allocate_tensor(Float32, layout, byte_alignment=4)
        warp = tk.warp_id()
        for r, ms in enumerate(found):
            for i, m in enumerate(ms):
                _write(met, (warp, i, r), m)
        cute.arch.sync_threads()
        first = warp // warps * warps
        return [[_max_of([met[first + k, i, r] for k in range(warps)]) for i in range(len(ms))]
                for r, ms in enumerate(found)]


@cute.jit
def _write(met: cute.Tensor, coord, value: Float32):
    """By one lane of the warp."""
    if tk.lane_id() == 0:
        met[coord] = value


def _max_of(values):
    found = values[0]
    for v in values[1:]:
        found = nan_max(found, v)
    return found
