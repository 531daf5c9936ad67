"""Which configuration a call gets: from the spec."""
from __future__ import annotations

from tkq.linear_attention.config import CHUNK, LinearConfig
from tkq.linear_attention.spec import NARROW, LinearSpec

SHARED = 222 * 1024  # bytes of a block that tiles may take: 4 KB are left for factors and semaphores
MOST_STAGES = 4


def plan(spec: LinearSpec, groups: int | None = None) -> LinearConfig:
    """As many warpgroups for the state as V fills, two at most, or one where they have no registers for two: where K
    is above 128 a state of 64 rows is 72 to 128 of a thread's. As many stages as there is room for. groups: of these
    warpgroups, at most."""
    one = spec.value_dim <= CHUNK or spec.head_dim > NARROW or (spec.packed and widest_delta(spec))
    groups = 1 if one or groups == 1 else 2
    tile = 2 * CHUNK * CHUNK
    operands, values = 2 + (spec.second is not None), 1 + spec.has_x + (spec.second == "pair")
    stage = operands * 2 * CHUNK * spec.head_dim + groups * values * tile
    rest = (2 + groups + 2 * spec.dot) * tile + (4 * tile + 1024 if spec.delta else 2048 if spec.ssd else 0)
    stages = min(MOST_STAGES, (SHARED - rest) // stage)
    return LinearConfig(groups, stages, _registers(spec, groups))


def spilled(spec: LinearSpec) -> int:
    """Local loads and stores that a kernel may have: see `widest_delta`; of wider states with the delta rule,
    all of them in front of the loop over chunks; of Mamba-2's where a block finds its sequence or its states."""
    wide = spec.delta and spec.head_dim > NARROW
    if wide or (widest_delta(spec) and plan(spec).groups == 2):
        return 8
    return 4 if spec.ssd and (spec.packed or spec.pool) else 0


def _registers(spec, groups):
    """The delta rule's scores take more; its state does where keys are widest, in the forward."""
    if spec.head_dim > NARROW:
        return 40, 224, 240
    if groups == 1:
        return 24, 232, 240
    if spec.delta:
        return 24, 136, 176
    return 24, 104, 192


def widest_delta(spec: LinearSpec) -> bool:
    """The forward of the delta rule at the widest keys that two warpgroups take: these need 192 registers a thread,
    with which the scores' have 104, too few. With 8 fewer a state's thread has four numbers in local memory, and ptxas
    waits for each of its products: a fifth faster on an H200 (bench/results/h200/tuning/linear_attention.json)."""
    return bool(spec.delta) and not spec.reverse and spec.head_dim == NARROW
