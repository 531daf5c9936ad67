"""Which rows `PersistentLayerNorm` normalises, and how. No torch, no DSL; bench/tune/norms.py times it."""
from dataclasses import replace
from typing import Optional

from ..dtypes import WIDTH
from ..rows.persistent import plan as rows
from ..rows.persistent.plan import RowPlan, RowShape
from ..runtime import Recipe
from .spec import NormSpec

SUMS = 3  # count, mean, squares
FROM_BYTES = 131072  # of a row
# (blocks of a cluster, warps, stages, blocks on an SM)
_GEOMETRIES = ((16, 8, 6, 1), (16, 16, 6, 1), (16, 8, 3, 2), (8, 16, 3, 1), (8, 8, 6, 1), (8, 16, 6, 1), (4, 16, 6, 1),
               (4, 8, 6, 1), (8, 4, 6, 2))
# (most bytes of a row, geometry). Of a copy's bytes a second on an H100, weight and bias in float32, at 131072
# and 262144 columns: 0.966, 0.966 (`plan._HEAVY`: 0.934, 0.868 at best; at 65536 0.995, where this has 0.936).
_PLANNED = ((196608, (8, 4, 6, 2)), (2097152, (16, 8, 6, 1)))
_LEAST = 48  # registers of a thread for all but its vectors


def recipe(spec: NormSpec, plan: RowPlan) -> Recipe:
    kernel = "WithStatistics" if spec.stats else "PersistentLayerNorm"
    return Recipe(f"tkq.norms.forward.layernorm_persistent:{kernel}", (spec, plan))


def shape(spec: NormSpec) -> RowShape:
    vectors = tuple(WIDTH[d] for d in (spec.weight, spec.bias) if d)
    return RowShape(spec.N, (spec.width,), (spec.width,), vectors, sums=(SUMS,), vector=spec.vector)


def serves(spec: NormSpec) -> bool:
    """Long rows of a layernorm without options but statistics, in whole accesses."""
    return (spec.kind == "layernorm" and replace(spec, stats=False).plain and spec.access == 128 and
            spec.N * spec.width // 8 >= FROM_BYTES)


def planned(spec: NormSpec) -> Optional[RowPlan]:
    """What a spec runs with, where its vectors have enough bytes that reading them from L2 dominates; else None."""
    if not serves(spec):
        return None
    vectors = sum(shape(spec).vectors)
    least = FROM_BYTES + 1 if vectors > 2 * spec.width else 4 * FROM_BYTES if vectors > spec.width else None
    if least is None or spec.N * spec.width // 8 < least:
        return None
    row = spec.N * spec.width // 8
    return next((_plan(spec, geometry) for limit, geometry in _PLANNED if row <= limit), None)


def variants(spec: NormSpec) -> list[RowPlan]:
    """Those worth timing."""
    if not serves(spec):
        return []
    found = [_plan(spec, geometry) for geometry in _GEOMETRIES]
    return list(dict.fromkeys(p for p in found if p))


def _plan(spec, geometry) -> Optional[RowPlan]:
    """None where vectors would not stay in registers, which is what it is for, or anything else does not fit."""
    cluster, warps, stages, min_blocks_per_sm = geometry
    try:
        p = rows.plan(shape(spec), cluster=cluster, per_thread=-(-spec.N // (cluster * warps * rows.WARP)), warps=warps,
                      stages=stages, min_blocks_per_sm=min_blocks_per_sm)
    except ValueError:
        return None
    held = p.per_thread * len(shape(spec).vectors)
    return replace(p, vectors="float") if held <= p.consumer_registers - _LEAST else None
