"""Plans for a row that are worth timing beside the chosen one."""
from .plan import plan
from .shape import RowShape

LEAST_WORKING_REGISTERS = 48  # with which a variant is still tried

# Several choices at once that are worth timing, by name. A block that shares its SM with another one needs
# a ring of few stages; "halves" and "quarters" of a row leave less undone when the last rows are dealt out.
_COMBINED = {
    "whole rows": dict(cluster=1, per_thread=16, warps=8, stages=4),
    "whole rows of 16 warps": dict(cluster=1, per_thread=8, warps=16, stages=6),
    "whole rows streaming": dict(cluster=1, per_thread=16, warps=8, stages=4, streaming=True),
    "two blocks of 4": dict(per_thread=32, warps=4, stages=3, min_blocks_per_sm=2),
    "two blocks of 8": dict(per_thread=16, warps=8, stages=3, min_blocks_per_sm=2),
    "halves two blocks": dict(cluster=2, per_thread=8, warps=8, stages=4, min_blocks_per_sm=2),
    "halves two blocks of 4": dict(cluster=2, per_thread=16, warps=4, stages=4, min_blocks_per_sm=2),
    "halves three blocks of 4": dict(cluster=2, per_thread=16, warps=4, stages=3, min_blocks_per_sm=3),
    "halves two blocks streaming": dict(cluster=2, per_thread=8, warps=8, stages=4, min_blocks_per_sm=2,
                                        streaming=True),
    "halves two blocks 6 stages": dict(cluster=2, per_thread=8, warps=8, stages=6, min_blocks_per_sm=2),
    "quarters two blocks of 4": dict(cluster=4, per_thread=8, warps=4, stages=6, min_blocks_per_sm=2),
    "quarters two blocks": dict(cluster=4, per_thread=16, warps=8, stages=4, min_blocks_per_sm=2),
    "2 x 4096 two blocks": dict(cluster=2, per_thread=16, warps=8, stages=3, min_blocks_per_sm=2),
    "2 x 4096 two blocks of 4": dict(cluster=2, per_thread=32, warps=4, stages=3, min_blocks_per_sm=2),
    "4 x 4096 two blocks of 4": dict(cluster=4, per_thread=32, warps=4, stages=3, min_blocks_per_sm=2),
    "eighths two blocks": dict(cluster=8, per_thread=16, warps=8, stages=4, min_blocks_per_sm=2),
}


def variants(shape: RowShape) -> dict:
    """Plans worth timing beside the planned one, by name."""
    flags = (dict(early=False), dict(evict_first=True), dict(streaming=True), dict(pdl=False),
             dict(finish="tail"), dict(cooperative=False), dict(stages=3), dict(stages=4), dict(warps=4),
             dict(warps=16), dict(vectors="packed"), dict(vectors="late"))
    geometries = [dict(cluster=c, per_thread=n) for c in (1, 2, 4, 8, 16) for n in (16, 32, 64)]
    named = {" ".join(f"{key}={value}" for key, value in choices.items()): choices
             for choices in (*flags, *geometries)}
    found = {"planned": plan(shape)}
    for name, choices in {**named, **_COMBINED}.items():
        try:
            candidate = plan(shape, **choices)
        except ValueError:
            continue
        blocks_well_filled = candidate.cluster == 1 or candidate.cols >= (1024 if name in _COMBINED else 2048)
        registers = candidate.per_thread * shape.columns <= candidate.consumer_registers - LEAST_WORKING_REGISTERS
        if candidate not in found.values() and blocks_well_filled and registers:
            found[name] = candidate
    return found
