"""Which configuration a step gets, and how its warps are spread over blocks."""
from __future__ import annotations

from tkq.linear_attention.step.config import LANES, StepConfig
from tkq.linear_attention.step.spec import StepSpec

ACCESS = 16  # bytes
MOST_WARPS = 4  # of a block
MOST_SHARING = 4  # warps of a block that share a slice
FEW = 4096  # warps: below, each is a block of its own, to be spread over the SMs


def plan(spec: StepSpec, many: bool = False) -> StepConfig:
    """many: are there more states than `most_few`?"""
    return (wide(spec) if many else None) or narrow(spec)


def most_few(spec: StepSpec) -> int:
    """States, heads times sequences, of which more are many."""
    return FEW * narrow(spec).columns // spec.value_dim


def wide(spec: StepSpec) -> StepConfig | None:
    """Of one token, states of fp32. Where V is contiguous, accesses take up to 256 bytes of a row, and the warps of a
    block share the rows of K; where K is, they take rows of 512 bytes, without the delta rule, which has twice as many
    sums over K. None for other states."""
    K, V = spec.head_dim, spec.value_dim
    if spec.state != "fp32" or spec.several or spec.layout == "any":
        return None
    if spec.layout == "k":
        return StepConfig(LANES, 4, 4, 16) if K == 4 * LANES and spec.delta is None else None
    v_lanes = run_of(V, 4, LANES // 2)
    k_lanes, k_values = LANES // v_lanes, 16
    k_warps, rest = divmod(K, k_lanes * k_values)
    if rest or v_lanes < 8 or not 2 <= k_warps <= MOST_SHARING:
        return None
    return StepConfig(k_lanes, k_values, 8, 4, k_warps=k_warps)


def narrow(spec: StepSpec) -> StepConfig:
    """A warp has all rows of K of a slice: there are many slices, and no warp waits for another. Lanes lie along the
    state's contiguous dimension until a warp's accesses are pieces of 32 to 128 bytes, and as many numbers are a lane's
    as fit its registers beside those of a token."""
    K, V = spec.head_dim, spec.value_dim
    vector = ACCESS // {"fp32": 4, "bf16": 2}[spec.state]
    if spec.layout == "k" and run_of(K, vector, 8) < 4:
        vector = 4  # 8 bytes of bf16: pieces of a sector are those of 4 lanes
    k_run = {"v": 0, "k": vector, "any": 2}[spec.layout]
    k_lanes = run_of(K, k_run, 8 if K <= 128 else 16) if k_run else 0
    columns = 32 if K <= 64 and V % 32 == 0 else 16
    if K > 128:
        columns = max(8, 2 * vector if spec.layout == "v" else 0, LANES // (k_lanes or LANES))
    if spec.layout == "v":
        k_lanes, v_values = LANES * vector // columns, vector
        k_run = run_of(K, k_lanes, 8)
    else:
        v_values = columns * k_lanes // LANES
    k_values = K // k_lanes
    held = k_values * (v_values + 2 + (spec.gate == "channel"))  # the state, q and k, gates
    few = held <= 112 and spec.layout != "any"
    return StepConfig(k_lanes, k_values, k_run, v_values, few, 512 if few and not spec.several else 256)


def run_of(n: int, unit: int, most: int) -> int:
    """The largest power of two up to `most` of which n is a multiple, `unit` times."""
    return max(run for run in (1, 2, 4, 8, 16, 32) if run <= most and n % (run * unit) == 0)


def warps_of(config: StepConfig, slices: int, others: int) -> int:
    """Of a block: of the slices of V of a head, each with one warp; others: heads times sequences. A divisor of the
    slices; 1 where warps share one."""
    if slices * others <= FEW or config.k_warps > 1:
        return 1
    return max(n for n in (1, 2, MOST_WARPS) if slices % n == 0)
