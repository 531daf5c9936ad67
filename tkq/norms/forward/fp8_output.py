"""Fp8Output: the results of a RowNorm in float8, with a scale for each row or for each 128 columns of a row.

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


class Fp8Output:
    """A part of `row_norm.RowNorm`, in place of its `Output`."""

    def finish(self, kernel, g, parts, mine, statistics, affine):
        ys = [[] for _ in parts]
        for j in range(kernel.tile.blocks):
            affine_j = kernel.affine_of(g, affine, mine.inside, j)
            for r, part in enumerate(parts):
                ys[r].append(kernel.result(part, j, statistics[r], affine_j[r]))
        amax = [[largest(y, mine.inside[j]) for j, y in enumerate(of_row)] for of_row in ys]
        by_row = kernel.spec.scale == "row"
        amax = _of_rows(kernel, amax, parts) if by_row else _of_groups(kernel, amax, mine)
        for r, place in enumerate(mine.places):
            scales = [scale_of(m, kernel.spec.out) for m in amax[r]]
            _store_scales(kernel, g.scale, place, mine, scales)
            inverses = [cute.arch.rcp_approx(s) for s in scales]
            for j, y in enumerate(ys[r]):
                kernel.store(g.out, place, mine, kernel.copies.packed(y * inverses[j // _together(kernel)], g.out), j)


def _store_scales(kernel, scale, place, mine, scales):
    if kernel.spec.scale == "row":
        kernel.store_scalar(scale, place, scales[0], mine.col == 0, 0)
        return
    t, first = kernel.tile, mine.col % GROUP == 0
    for i, s in enumerate(scales):
        j = i * _together(kernel)
        column = (mine.col + j * t.vector * t.threads_per_row) // GROUP
        kernel.store_scalar(scale, place, s, both(first, mine.inside[j]), column)


# ---- the largest |y| ----------------------------------------------------------------------------


def largest(y, inside):
    """Of one vector; NaN where there is one in it."""
    m = cute.math.abs(y).reduce(cute.ReductionOp.MAX, 0.0, 0)
    return m if inside is True else cutlass.select_(inside, m, Float32(0))


def _of_rows(kernel, amax, parts):
    """[amax] of each row, in all of its threads."""
    found = []
    for part, ms in zip(parts, amax, strict=True):
        buffer = part.buffers[1]
        if buffer.element_type is not Float32:  # room for two floats, of which it needs one
            buffer = cute.make_tensor(cute.recast_ptr(buffer.iterator, dtype=Float32), buffer.layout)
        found.append([row_reduce(largest_of(ms), cute.ReductionOp.MAX, kernel.tile.threads_per_row, buffer,
                                 part.mbar_ptrs[1])])
    return found


def _together(kernel):
    """Vectors of a thread that share a scale: all of its row, or those within 128 columns."""
    t = kernel.tile
    return t.blocks if kernel.spec.scale == "row" else max(1, GROUP // (t.vector * t.threads_per_row))


def _of_groups(kernel, amax, mine):
    """The amax of each 128 columns that a thread has a part of, for each row."""
    t, n = kernel.tile, _together(kernel)
    lanes = min(t.threads_per_row, GROUP // t.vector)
    found = [[warp_reduce(largest_of(ms[i:i + n]), nan_max, min(lanes, WARP)) for i in range(0, len(ms), n)]
             for ms in amax]
    return found if lanes <= WARP else _across_warps(t, found, mine, lanes // WARP)


def _across_warps(tile, found, mine, warps):
    """The same for groups of `warps` warps."""
    layout = cute.make_layout((tile.threads // WARP, len(found[0]), len(found)))
    met = mine.smem.allocate_tensor(Float32, layout, byte_alignment=4)
    warp = tk.warp_id()
    for r, ms in enumerate(found):
        for i, m in enumerate(ms):
            _write(met, (warp, i, r), m)
    cute.arch.sync_threads()
    first = warp // warps * warps
    return [[largest_of([met[first + k, i, r] for k in range(warps)]) for i in range(len(ms))]
            for r, ms in enumerate(found)]


@cute.jit
def _write(met: cute.Tensor, coord, value: Float32):
    """By one lane of the warp."""
    if tk.lane_id() == 0:
        met[coord] = value


def largest_of(values):
    found = values[0]
    for v in values[1:]:
        found = nan_max(found, v)
    return found
