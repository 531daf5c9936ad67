"""How a RowKernel cuts its rows: lanes, warps, blocks, stages. Pure Python: no torch, no DSL.

Two or three loads of 16 bits with column sums take a table measured on an H100, and kernels that write numbers alone
another one (`plan_table`); all else takes a ladder: 32 elements of a row a thread in 8 warps, and a cluster where a row
is wider than that.
"""
from dataclasses import dataclass, replace
from typing import Optional

from ..reduction_plan import MAX_CLUSTER, SMEM_BYTES
from .plan_table import REDUCING, TABLE

DEPTH = 4  # exchange slots: a warp that publishes row i has collected row i - 2, so all warps have read row i - 4
WARPGROUP, WARP = 128, 32
REGISTER_FILE, THREADS = 65536, 2048  # of a multiprocessor
RESERVED = 1024  # bytes of shared memory that each block costs besides its own
PRODUCER_REGISTERS = 24
MOST_REGISTERS = 240  # of a consumer thread
WORKING_REGISTERS = 88  # of a consumer thread, for everything but column sums and vectors
SEVERAL_SUMS_REGISTERS = 128  # beside two column sums and more, for whole vectors of everything else
MOST_STAGES = 8
MANY_TILES = 12
QUAD = 4  # columns of a 16-byte access to fp32: column sums are finished in these
NOMINAL_BLOCKS = 132  # of an H100; the plan is right, if not as quick, for any other number
FINISHES = ("grid", "tail")
VECTORS = ("float", "packed", "late")


@dataclass(frozen=True)
class RowShape:
    """What a kernel moves, as far as the plan depends on it.

    N: columns. loads, stores, vectors: bits of an element of each. columns: how many column sums. sums: how many
    values each exchange of a row has. vector: elements of one access to any load or store, a power of two that divides
    N. bulk: do all loads have rows that bulk copies can take: 16-byte multiples long and apart, 16-byte aligned?
    """

    N: int
    loads: tuple
    stores: tuple = ()
    vectors: tuple = ()
    columns: int = 0
    sums: tuple = (1,)
    vector: int = 8
    bulk: bool = True

    def __post_init__(self):
        if self.N < 1 or not self.loads:
            raise ValueError(f"N = {self.N}, loads {self.loads}: a row has one column and one load at least")
        if self.vector < 1 or self.N % self.vector or self.vector & (self.vector - 1):
            raise ValueError(f"vector: got {self.vector}, allowed are powers of two that divide N = {self.N}")
        if max(self.loads + self.stores) * self.vector > 128:
            raise ValueError(f"vector: {self.vector} elements of {max(self.loads + self.stores)} bits are more than 16 "
                             "bytes")
        if self.bulk and self.N * min(self.loads) % 128:
            raise ValueError(f"bulk: a row of {self.N} elements of {min(self.loads)} bits is no multiple of 16 bytes")

    @property
    def load_bytes(self) -> int:
        """Of one column."""
        return sum(self.loads) // 8


@dataclass(frozen=True)
class RowPlan:
    """vector: elements of one access. threads_per_row: of a block; below 32, several rows share a warp.
    cluster: blocks that share a row. cols: columns of a block. warps: that compute.
    stages: of the ring that the producer warp fills; 0: no ring and no producer, every warp reads global memory itself.
    vectors: how a thread holds its part of the (N,) vectors: "float", "packed" (as they lie in memory), or "late"
        (not at all: read where it is used).
    early: the column sums leave before the last tile's outputs are written, so that the grid's barrier runs meanwhile.
    finish: who adds up the blocks' column sums: "grid" (the blocks, after a barrier of the grid), "tail" (a second
        kernel, its launch under this one's end).
    cooperative: ask the driver that all blocks be resident at once. False is for measuring what that costs: two such
        grids side by side could then wait for each other for ever.
    pdl: launch under the end of the kernel before, wait for that kernel here, and let the next one do the same: its
        blocks then come as this one's go.
    evict_first: loads leave L2 first. streaming: so do stores.
    resident: blocks on a multiprocessor, which share its registers and its memory: one works where another waits.
    """

    N: int
    vector: int
    threads_per_row: int
    cluster: int
    cols: int
    warps: int
    stages: int
    vectors: str = "float"
    early: bool = True
    finish: str = "grid"
    cooperative: bool = True
    pdl: bool = True
    evict_first: bool = False
    streaming: bool = False
    resident: int = 1

    @property
    def direct(self) -> bool:
        return self.stages == 0

    @property
    def threads(self) -> int:
        """That compute."""
        return self.warps * WARP

    @property
    def block(self) -> int:
        """All threads of a block: a warpgroup for the producer warp, which leaves its registers to the others."""
        return self.threads + (0 if self.direct else WARPGROUP)

    @property
    def consumers(self) -> int:
        """Warpgroups that compute."""
        return self.threads // WARPGROUP

    @property
    def warps_per_row(self) -> int:
        return max(1, self.threads_per_row // WARP)

    @property
    def groups(self) -> int:
        """Rows that a block works on at once: those of a tile."""
        return self.threads // self.threads_per_row

    @property
    def chunks(self) -> int:
        """Accesses of a thread to its part of a row."""
        return -(-self.cols // (self.threads_per_row * self.vector))

    @property
    def per_thread(self) -> int:
        return self.chunks * self.vector

    @property
    def even(self) -> bool:
        """Every block of a cluster has as many columns."""
        return self.cols * self.cluster == self.N

    @property
    def pitch(self) -> int:
        """Columns of a row of column sums in the workspace."""
        return -(-self.N // QUAD) * QUAD

    @property
    def width(self) -> int:
        """Warps of all blocks that share a row."""
        return self.warps_per_row * self.cluster

    @property
    def merges(self) -> int:
        """Parts of a block's column sums that meet in shared memory; rows that share a warp have met by then."""
        return self.warps // self.warps_per_row

    @property
    def launch_registers(self) -> int:
        """What a thread can have at launch: a scheduler's quarter of the registers, shared by its warps."""
        warps_of_a_scheduler = self.resident * -(-self.block // WARP // 4)
        most = 255 if self.direct else MOST_REGISTERS
        return min(most, REGISTER_FILE // 4 // (warps_of_a_scheduler * WARP) // 8 * 8)

    @property
    def registers(self) -> tuple:
        """(producer, consumer) registers a thread once the roles are known. The pool is what the launch took, not what
        the multiprocessor has: asking for more never returns."""
        left = self.launch_registers * self.block - PRODUCER_REGISTERS * WARPGROUP
        return PRODUCER_REGISTERS, min(MOST_REGISTERS, left // self.threads // 8 * 8)

    @property
    def consumer_registers(self) -> int:
        return self.launch_registers if self.direct else self.registers[1]

    def units(self, rows: int, most: int) -> int:
        """Clusters of the grid: at most `most`, and a tile at least for each; more than multiprocessors, each with its
        own row of column sums, only where they have many."""
        tiles = -(-rows // self.groups)
        if tiles < MANY_TILES * most:
            most = max(1, min(most, most * self.cluster // self.resident))
        return min(most, tiles)

    def rows_of(self, unit: int, units: int, rows: int) -> list:
        """The rows that a unit works on, tile by tile: what the kernel's `Share` says, for the tests."""
        firsts = range(unit * self.groups, rows, units * self.groups)
        return [row for first in firsts for row in range(first, min(first + self.groups, rows))]

    @property
    def slab(self) -> int:
        """How many quads of columns a block finishes at a time: a power of two."""
        quads = -(-self.N // QUAD)
        return min(self.threads, _power_of_two(-(-quads // (NOMINAL_BLOCKS * self.resident))))

    @property
    def slab_loads(self) -> int:
        """Rows of column sums that a thread reads for a slab, all at once: for the nominal number of blocks."""
        return min(16, -(-(NOMINAL_BLOCKS * self.resident // self.cluster) // (self.threads // self.slab)))


def padded_sums(sums: int) -> int:
    """Floats of an exchange slot: 1, 2 or a multiple of 4, so that it is stored in whole vectors."""
    return sums if sums <= 2 else -(-sums // 4) * 4


def scratch_bytes(shape: RowShape, p: RowPlan) -> int:
    """Where groups add up their column sums, and slabs theirs."""
    if not shape.columns:
        return 0
    merge = p.warps * min(WARP, p.threads_per_row) * p.per_thread * 4 if p.merges > 1 else 0
    return max(merge, shape.columns * p.threads // max(WARP, p.slab) * p.slab * 4 * QUAD)


def smem_bytes(shape: RowShape, p: RowPlan) -> int:
    """Shared memory of a block, up to alignment."""
    ring = p.stages * p.groups * p.cols * shape.load_bytes
    slots = DEPTH * p.groups * p.width * 4 * sum(map(padded_sums, shape.sums)) if p.width > 1 else 0
    semaphores = 8 * (2 * p.stages + DEPTH * p.groups * len(shape.sums) + 2)
    alignment = 128 * (len(shape.loads) + len(shape.sums) + 2)
    return ring + scratch_bytes(shape, p) + slots + semaphores + alignment


def plan(shape: RowShape, **choices) -> RowPlan:
    """The plan that a shape runs with.

    choices: to say otherwise, for tuning: cluster, per_thread (elements of a row), warps, stages, and any flag of
    RowPlan.

    Raises:
        ValueError: choices that do not fit the shape or the hardware.
    """
    geometry = {key: choices.pop(key) for key in ("cluster", "per_thread", "warps", "stages") if key in choices}
    found = None if geometry else _measured(shape) or _reducing(shape)
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
    if p.resident not in (1, 2, 3, 4) or p.resident * p.block > THREADS:
        raise ValueError(f"resident: got {p.resident} of {p.block} threads, a multiprocessor has {THREADS}")
    if smem_bytes(shape, p) > room(p):
        raise ValueError(f"{smem_bytes(shape, p)} bytes of shared memory, one of {p.resident} blocks has {room(p)}")


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


def _reducing(shape: RowShape) -> Optional[RowPlan]:
    """Of a kernel without column sums that stores no rows; None where rows do not fit, or are not copied in bulk."""
    if not shape.bulk or shape.columns or shape.stores:
        return None
    stages = max(3, len(shape.sums) + 1)
    for cluster, warps, resident in REDUCING:
        found = _fitting(shape, cluster, 32, warps)
        if not found or found.stages < stages or (warps == 4 and found.threads_per_row > WARP):
            continue
        found = replace(found, stages=stages, resident=resident)
        while found.resident > 1 and smem_bytes(shape, found) > room(found):
            found = replace(found, resident=found.resident - 1)
        return replace(found, vectors=_vectors(shape, found), vector=_accesses(shape, found))
    return None


def room(p: RowPlan) -> int:
    """Bytes of shared memory that each of its blocks on a multiprocessor may have."""
    return (SMEM_BYTES + RESERVED) // p.resident - RESERVED


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
    """Elements of an access: half as many where two column sums leave few registers for what is under way."""
    crowded = shape.columns > 1 and p.consumer_registers - shape.columns * p.per_thread < SEVERAL_SUMS_REGISTERS
    return p.vector // 2 if crowded and p.vector > 1 else p.vector


def _chosen(shape, cluster=None, per_thread=None, warps=8, stages=None):
    planned = _planned(shape)
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
    cluster = int(cluster)
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
    lanes = min(8, _power_of_two(-(-cols // shape.vector)))
    return min(warps * WARP, max(lanes, _power_of_two(-(-cols // per_thread))))


def _power_of_two(n):
    """The least power of two that is n or more."""
    return 1 << max(0, n - 1).bit_length()
