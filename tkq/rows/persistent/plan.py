"""How a RowKernel cuts its rows: lanes, warps, blocks, stages. Pure Python: no torch, no DSL.

Two or three loads of 16 bits with column sums take a table measured on an H100, and kernels that write numbers alone
others (`plan_table`): threads hold their rows as far as registers reach, longer ones come through a ring. All else
takes a ladder: 32 elements of a row a thread in 8 warps, and a cluster where a row is wider than that.
"""
from dataclasses import replace
from typing import Optional

from ...reduction.geometry import MAX_CLUSTER, SMEM_BYTES
from .plan_table import HELD, REDUCING, TABLE
from .shape import (
    MOST_STAGES,
    QUAD,
    REGISTER_FILE,
    SEVERAL_SUMS_REGISTERS,
    THREADS,
    VECTORS,
    WARP,
    WORKING_REGISTERS,
    RowPlan,
    RowShape,
    power_of_two,
    smem_bytes,
    smem_limit,
)

FINISHES = ("grid", "tail")
GEOMETRY = ("cluster", "per_thread", "warps", "stages", "held")
LEAST_REGISTERS = 48  # of a thread that holds its part of a row


def plan(shape: RowShape, **choices) -> RowPlan:
    """The plan that a shape runs with.

    choices: to say otherwise, for tuning: cluster, per_thread (elements of a row), warps, stages, held, and any other
        flag of RowPlan.

    Raises:
        ValueError: choices that do not fit the shape or the hardware.
    """
    geometry = {key: choices.pop(key) for key in GEOMETRY if key in choices}
    found = None if geometry else _measured(shape) or _held(shape) or _reducing(shape)
    if not found:
        found = _chosen(shape, **geometry) if geometry else _planned(shape)
        found = replace(found, vectors=_vectors(shape, found), vector=_accesses(shape, found))
    found = replace(found, **choices)
    check(shape, found)
    return found


def check(shape: RowShape, p: RowPlan) -> None:
    """Raises ValueError where a plan cannot serve the shape."""
    for name, value, allowed in (("finish", p.finish, FINISHES), ("vectors", p.vectors, VECTORS),
                                 ("warps", p.warps, (4, 8, 16)), ("cluster", p.cluster, (1, 2, 4, 8, 16))):
        if value not in allowed:
            raise ValueError(f"{name}: got {value!r}, allowed are {', '.join(map(str, allowed))}")
    if p.cols * p.cluster < shape.N or p.cols * (p.cluster - 1) >= shape.N or p.groups < 1:
        raise ValueError(f"{p.cluster} blocks of {p.cols} columns: some have none, or too few for N = {shape.N}")
    if p.cluster > 1 and p.groups > 1:
        raise ValueError("a cluster shares one row: all threads of a block must work on it")
    if not p.direct and not shape.bulk:
        raise ValueError("stages: rows that bulk copies cannot take need stages = 0")
    if not p.direct and p.stages < len(shape.sums) + 1:
        raise ValueError(f"stages: got {p.stages}, {len(shape.sums)} exchanges keep {len(shape.sums) + 1} rows at once")
    if p.held and (p.stages or shape.columns):
        raise ValueError("held: one block for each tile has no ring and no column sums: got "
                         f"stages = {p.stages}, {shape.columns} column sums")
    if not 1 <= p.min_blocks_per_sm <= (16 if p.held else 4) or p.min_blocks_per_sm * p.block > THREADS:
        raise ValueError(f"min_blocks_per_sm: {p.min_blocks_per_sm} of {p.block} threads, an SM has {THREADS}")
    smem, limit = smem_bytes(shape, p), smem_limit(p)
    if smem > limit:
        raise ValueError(f"{smem} bytes of smem, one of {p.min_blocks_per_sm} blocks has {limit}")


# (blocks of a cluster, elements of a thread, warps, stages beyond those that the exchanges keep): the first that fits
# is taken, at best one where the vectors stay in registers
_LADDER = ((1, 32, 8, 2), (2, 32, 8, 2), (4, 32, 8, 2), (8, 32, 8, 2), (8, 64, 8, 1), (16, 32, 8, 1), (16, 64, 8, 1),
           (16, 32, 16, 1))


def _measured(shape: RowShape) -> Optional[RowPlan]:
    """From the table; None where that says nothing, or the row does not fit."""
    if not shape.bulk:
        return None
    for most, cluster, per_thread, warps, flags in TABLE.get((shape.loads, shape.columns), ()):
        if most >= shape.N:
            found = _fitting(shape, cluster, per_thread, warps)
            least = max(len(shape.sums) + 1, flags.get("stages", 1))
            if not found or found.stages < least:
                return None
            stages = least if "stages" in flags else found.stages
            found = replace(found, vectors=_vectors(shape, found), vector=_accesses(shape, found))
            return replace(found, **{**flags, "stages": stages, "vector": min(found.vector, flags.get("vector", 8))})
    return None


def _held(shape: RowShape) -> Optional[RowPlan]:
    """Of a kernel without column sums that stores no rows; None where a row is too long."""
    if shape.columns or shape.stores:
        return None
    column = (sum(shape.loads) + sum(shape.vectors)) // 8
    for cluster, warps, bytes_ in HELD:
        per_thread = max(shape.vector, 1 << (bytes_ // column).bit_length() - 1)
        found = _without_ring(shape, cluster, per_thread, warps)
        if found.per_thread <= per_thread:
            blocks = REGISTER_FILE // (found.threads * _registers(shape, found))
            return replace(found, held=True, past_l1=True,
                           min_blocks_per_sm=max(1, min(blocks, THREADS // found.threads)),
                           vectors="packed" if shape.vectors else "float")
    return None


def _registers(shape, p) -> int:
    """That a thread needs to hold its part of a row and to work on it: the more blocks share an SM, the more
    bytes are in flight. By what compiled kernels take without spilling: half as many again as hold the row, an
    exchange's vectors, and a vector of each load."""
    held = p.chunks * sum(max(1, p.vector * bits // 32) for bits in shape.loads + shape.vectors)
    needed = held * 3 // 2 + 8 * (max((*shape.sums, 1)) + len(shape.loads) + len(shape.vectors))
    return max(LEAST_REGISTERS, -(-needed // 8) * 8)


def _reducing(shape: RowShape) -> Optional[RowPlan]:
    """Of the same with longer rows; None where rows do not fit, or are not copied in bulk."""
    if not shape.bulk or shape.columns or shape.stores:
        return None
    stages = max(3, len(shape.sums) + 1)
    for cluster, warps, min_blocks_per_sm in REDUCING:
        found = _fitting(shape, cluster, 32, warps)
        if not found or found.stages < stages or (warps == 4 and found.threads_per_row > WARP):
            continue
        found = replace(found, stages=stages, min_blocks_per_sm=min_blocks_per_sm)
        while found.min_blocks_per_sm > 1 and smem_bytes(shape, found) > smem_limit(found):
            found = replace(found, min_blocks_per_sm=found.min_blocks_per_sm - 1)
        return replace(found, vectors=_vectors(shape, found), vector=_accesses(shape, found))
    return None


def _planned(shape: RowShape) -> RowPlan:
    for late in (False, True):
        for cluster, per_thread, warps, spare in _LADDER if shape.bulk else ():
            if shape.columns > 1 and per_thread > 32:
                continue
            found = _fitting(shape, cluster, per_thread, warps)
            if found and found.stages >= len(shape.sums) + spare and (late or _room(shape, found, "packed")):
                return found
    return _direct(shape)


def _room(shape, p, vectors):
    """Have a thread's column sums, and vectors in this form, room in its registers?"""
    registers = {"float": lambda bits: 1, "packed": lambda bits: bits / 32, "late": lambda bits: 0}[vectors]
    held = p.per_thread * (shape.columns + sum(map(registers, shape.vectors)))
    return held <= p.consumer_registers - WORKING_REGISTERS


def _vectors(shape, p) -> str:
    return "late" if p.direct else next(v for v in VECTORS if v == "late" or _room(shape, p, v))


def _accesses(shape, p) -> int:
    """Elements of an access: half as many where two column sums leave few registers for what is in flight."""
    crowded = shape.columns > 1 and p.consumer_registers - shape.columns * p.per_thread < SEVERAL_SUMS_REGISTERS
    return p.vector // 2 if crowded and p.vector > 1 else p.vector


def _chosen(shape, cluster=None, per_thread=None, warps=8, stages=None, held=False):
    planned = _planned(shape)
    if held:
        if stages:
            raise ValueError(f"held: got stages = {stages} as well, allowed is 0")
        found = _without_ring(shape, cluster or 1, per_thread or 32, warps)
        if found.per_thread > (per_thread or 32):
            raise ValueError(f"held: {warps} warps of {found.cluster} blocks need {found.per_thread} elements each, "
                             f"got per_thread = {per_thread or 32}")
        return replace(found, held=True)
    if stages == 0 or not shape.bulk:
        found = _direct(shape, cluster, per_thread, warps)
    else:
        found = _fitting(shape, cluster or planned.cluster, per_thread or 32, warps)
    if not found:
        raise ValueError(f"N = {shape.N}: cluster {cluster}, {per_thread} elements a thread, {warps} warps do not fit")
    return replace(found, stages=stages) if stages else found


def _fitting(shape: RowShape, cluster: int, per_thread: int, warps: int) -> Optional[RowPlan]:
    """A ring of as many stages as fit; None where the row does not."""
    cols = _cols(shape, cluster, 128 // min(shape.loads))
    threads_per_row = _threads_per_row(shape, cols, cluster, per_thread, warps)
    if cols > threads_per_row * max(per_thread, shape.vector) or cols * (cluster - 1) >= shape.N:
        return None
    found = RowPlan(shape.N, shape.vector, threads_per_row, cluster, cols, warps, 1)
    fixed = smem_bytes(shape, found) - found.groups * cols * shape.load_bytes
    stages = (SMEM_BYTES - fixed) // (found.groups * cols * shape.load_bytes + 16)
    return replace(found, stages=min(MOST_STAGES, stages)) if stages > 0 else None


def _direct(shape: RowShape, cluster=None, per_thread=None, warps=8) -> RowPlan:
    """For every row: a thread takes as many elements as it must."""
    per_thread = per_thread or 32
    if 8 * WARP * 8 * per_thread < shape.N:  # clusters of 8 blocks of 8 warps would have too few threads
        warps = 16
    while not cluster or (cluster < MAX_CLUSTER and warps * WARP * per_thread * cluster < shape.N):
        cluster = 2 * (cluster or 0.5)
    return _without_ring(shape, int(cluster), per_thread, warps)


def _without_ring(shape, cluster, per_thread, warps) -> RowPlan:
    cols = _cols(shape, cluster, max(shape.vector, QUAD))
    threads_per_row = _threads_per_row(shape, cols, cluster, per_thread, warps)
    return RowPlan(shape.N, shape.vector, threads_per_row, cluster, cols, warps, 0)


def _cols(shape, cluster, unit):
    """Columns of a block, in whole units: what a bulk copy, a quad or an access needs."""
    return -(-shape.N // (cluster * unit)) * unit


def _threads_per_row(shape, cols, cluster, per_thread, warps):
    """As few as hold the row; but eight vectors lie side by side where a row has as many, and a cluster's block has
    one row only."""
    if cluster > 1:
        return warps * WARP
    lanes = min(8, power_of_two(-(-cols // shape.vector)))
    return min(warps * WARP, max(lanes, power_of_two(-(-cols // per_thread))))
