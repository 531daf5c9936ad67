"""Which rows `kept.KeptLayerNorm` normalises, and how. No torch, no DSL; bench/tune_norms.py times it."""
from dataclasses import replace
from typing import Optional

from ..rows import plan as rows
from ..rows.plan import RowPlan, RowShape
from ..runtime import Recipe
from .spec import WIDTH, NormSpec

SUMS = 3  # count, mean, squares
FROM_BYTES = 131072  # of a row
# (blocks of a cluster, warps, stages, blocks on a multiprocessor)
_GEOMETRIES = ((16, 8, 6, 1), (16, 16, 6, 1), (16, 8, 3, 2), (8, 16, 3, 1), (8, 8, 6, 1), (8, 16, 6, 1))
_HINTS = (dict(), dict(evict_first=True, streaming=True))


def recipe(spec: NormSpec, plan: RowPlan) -> Recipe:
    return Recipe("tkq.norms.kept:build", (spec, plan))


def shape(spec: NormSpec) -> RowShape:
    vectors = tuple(WIDTH[d] for d in (spec.weight, spec.bias) if d)
    return RowShape(spec.N, (spec.width,), (spec.width,), vectors, sums=(SUMS,), vector=spec.vector)


def serves(spec: NormSpec) -> bool:
    """Long rows of a layernorm without options but statistics, in whole accesses."""
    return (spec.kind == "layernorm" and replace(spec, stats=False).plain and spec.access == 128 and
            spec.N * spec.width // 8 >= FROM_BYTES)


def planned(spec: NormSpec) -> Optional[RowPlan]:
    """What a spec runs with, where its vectors are so many bytes that their way from L2 is what counts; else None."""
    if not serves(spec):
        return None
    vectors = sum(shape(spec).vectors)
    least = FROM_BYTES if vectors > 2 * spec.width else 4 * FROM_BYTES if vectors > spec.width else None
    if least is None or spec.N * spec.width // 8 < least:
        return None
    return next(iter(p for p in variants(spec) if p.evict_first), None)


def variants(spec: NormSpec) -> list[RowPlan]:
    """None where vectors would not stay in registers: that is what it is for."""
    found = []
    for cluster, warps, stages, resident in _GEOMETRIES if serves(spec) else ():
        per_thread = -(-spec.N // (cluster * warps * rows.WARP))
        for hints in _HINTS:
            try:
                p = rows.plan(shape(spec), cluster=cluster, per_thread=per_thread, warps=warps, stages=stages,
                              resident=resident, **hints)
            except ValueError:  # as many do not fit
                continue
            held = p.per_thread * len(shape(spec).vectors)
            if held <= p.consumer_registers - _LEAST:
                found.append(replace(p, vectors="float"))
    return list(dict.fromkeys(found))


_LEAST = 48  # registers of a thread for all but its vectors, with which a variant is still tried
