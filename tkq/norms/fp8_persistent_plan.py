"""Which rows the persistent kernel of `fp8_persistent` normalises and quantises, and how. No torch, no DSL;
bench/tune/norms.py times it."""
from dataclasses import replace
from typing import Optional

from ..dtypes import WIDTH
from ..rows.persistent import plan as rows
from ..rows.persistent.plan import RowPlan, RowShape
from ..runtime import Recipe
from .persistent_plan import SUMS
from .spec import GROUP, OUT_WIDTH, NormSpec

SQUARES, AMAX = 1, 1  # what is exchanged of an rmsnorm's row; of the scale of a row
SERVED_FROM_BYTES, FROM_BYTES, WIDTH_OF_X = 16384, 131072, 16  # of a row: what has variants, what is long; bits
# of a row of x: with more of weight and bias than of x, alone and beside a residual. Below, the one-pass kernel is
# as fast, or faster.
HEAVY_FROM_BYTES, HEAVY_WITH_RESIDUAL_FROM_BYTES = 24576, 2 * FROM_BYTES
# of all that is read of a row with no more of weight and bias than that, by scale: up to there they are as fast
LIGHT_ABOVE_BYTES = {"row": 2 * FROM_BYTES, "1x128": FROM_BYTES}
# (blocks of a cluster, warps, stages, blocks on an SM)
_GEOMETRIES = ((16, 8, 6, 1), (16, 16, 6, 1), (8, 8, 6, 1), (16, 4, 6, 2), (8, 16, 6, 1), (4, 8, 6, 1), (8, 4, 6, 2))
# of rows below FROM_BYTES, of which, and of the residual's, a block has at least 16 KB
_SHORT_GEOMETRIES = ((1, 4, 6, 2), (1, 8, 6, 1), (1, 16, 6, 1), (2, 4, 6, 2), (2, 8, 6, 1), (2, 16, 6, 1), (4, 4, 6, 2),
                     (4, 8, 6, 1), (8, 8, 6, 1))
_LEAST_BYTES = 16384
# (most bytes of a row, the residual's among them; geometry): 64 elements to a thread without a residual, so
# that what a warp does but once a row counts less than its elements. Measured beside it: docs/attempts.md.
_PLANNED = ((32768, (1, 16, 6, 1)), (65536, (2, 8, 6, 1)), (FROM_BYTES, (4, 8, 6, 1)),
            (2 * FROM_BYTES, (8, 8, 6, 1)), (4 * FROM_BYTES, (16, 8, 6, 1)), (8 * FROM_BYTES, (16, 8, 3, 1)))
_LEAST = 48  # registers of a thread for all but its vectors


def recipe(spec: NormSpec, plan: RowPlan) -> Recipe:
    return Recipe("tkq.norms.forward.fp8_persistent:PersistentFp8", (spec, plan))


def shape(spec: NormSpec) -> RowShape:
    """What the engine moves and exchanges of a row."""
    vectors = tuple(WIDTH[d] for d in (spec.weight, spec.bias) if d)
    statistics = SQUARES if spec.kind == "rmsnorm" else SUMS
    loads = tuple(WIDTH[d] for d in (spec.x, spec.residual) if d)
    stores = tuple(OUT_WIDTH[d] for d in (spec.out, spec.total) if d)
    return RowShape(spec.N, loads, stores, vectors,
                    sums=(statistics, *([AMAX] if spec.scale == "row" else ())), vector=spec.vector)


def serves(spec: NormSpec) -> bool:
    """Rows of 16 bits an element in whole accesses, with any options but statistics, heads and another result."""
    without = replace(spec, scale=None, out=None, offset=False, residual=None, total=None)
    return (spec.scale is not None and without.plain and spec.width == WIDTH_OF_X and spec.vector == 8 and
            _bytes(spec) >= SERVED_FROM_BYTES)


def planned(spec: NormSpec) -> Optional[RowPlan]:
    """What a spec runs with; None where the one-pass kernel is faster, or has to run."""
    if not serves(spec):
        return None
    if _bytes(spec) < _least(spec):
        return None
    loaded = spec.N * spec.loaded // 8
    return next((_plan(spec, geometry) for limit, geometry in _PLANNED if loaded <= limit), None)


def _least(spec) -> int:
    """Bytes of a row of x from which on persistent kernels are planned."""
    if sum(shape(spec).vectors) > spec.loaded:
        return HEAVY_WITH_RESIDUAL_FROM_BYTES if spec.residual else HEAVY_FROM_BYTES
    return (LIGHT_ABOVE_BYTES[spec.scale] + 1) * spec.loaded // spec.width


def _bytes(spec):
    """Of a row of x."""
    return spec.N * spec.width // 8


def variants(spec: NormSpec) -> list[RowPlan]:
    """Those worth timing."""
    if not serves(spec):
        return []
    geometries, loaded = _GEOMETRIES, spec.N * spec.loaded // 8
    if _bytes(spec) < FROM_BYTES:
        geometries = [geometry for geometry in _SHORT_GEOMETRIES if loaded >= _LEAST_BYTES * geometry[0]]
    found = [_plan(spec, geometry) for geometry in geometries]
    return list(dict.fromkeys(p for p in found if p))


def _plan(spec, geometry) -> Optional[RowPlan]:
    """None where vectors would not stay in registers, which is what it is for, where no row would be in flight while
    others are worked on, or where anything else does not fit."""
    cluster, warps, stages, min_blocks_per_sm = geometry
    if stages < len(shape(spec).sums) + 2:
        return None
    cols = _cols(spec, cluster)
    try:
        found = rows.plan(shape(spec), cluster=cluster, per_thread=-(-cols // (warps * rows.WARP)), warps=warps,
                          stages=stages, min_blocks_per_sm=min_blocks_per_sm, cols=cols, vectors="float")
    except ValueError:
        return None
    held = found.per_thread * len(shape(spec).vectors)
    return found if held <= found.consumer_registers - _LEAST else None


def _cols(spec, cluster):
    """Of a block: in whole accesses, or where 128 columns have a scale in whole groups, which no two blocks share."""
    unit = GROUP if spec.scale == "1x128" else spec.vector
    return -(-spec.N // (cluster * unit)) * unit
