"""What a RowKernel's plan depends on, what it says, and what a block takes of an SM. Pure Python: no torch,
no DSL."""
from dataclasses import dataclass
from typing import Optional

from ...reduction.geometry import SMEM_BYTES

DEPTH = 4  # exchange slots: a warp that publishes row i has collected row i - 2, so all warps have read row i - 4
WARPGROUP, WARP = 128, 32
REGISTER_FILE, THREADS = 65536, 2048  # of an SM
RESERVED = 1024  # bytes of shared memory that each block costs besides its own
PRODUCER_REGISTERS = 24
MOST_REGISTERS = 240  # of a consumer thread
WORKING_REGISTERS = 88  # of a consumer thread, for everything but column sums and vectors
SEVERAL_SUMS_REGISTERS = 128  # beside two column sums and more, for whole vectors of everything else
MOST_STAGES = 8
MANY_TILES = 12
QUAD = 4  # columns of a 16-byte access to fp32: column sums are finished in these
NOMINAL_BLOCKS = 132  # of an H100; the plan is right, if not as quick, for any other number
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
    finish: how the blocks' column sums are added up: "grid" (the blocks, after a barrier of the grid), "tail" (a second
        kernel, its launch under this one's end).
    cooperative: ask the driver that all blocks be resident at once. False is for measuring what that costs: two such
        grids side by side could then wait for each other for ever.
    pdl: launch under the end of the kernel before, wait for that kernel here, and let the next one do the same: its
        blocks then come as this one's go.
    evict_first: loads leave L2 first. streaming: so do stores.
    min_blocks_per_sm: blocks on an SM, which share its registers and its memory: one works where another
    waits.
    held: no ring and no persistent loop: one block (or cluster) for each tile. Its threads hold their part of
        the tile in registers, and read each element once. past_l1: they load past L1.
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
    min_blocks_per_sm: int = 1
    held: bool = False
    past_l1: bool = False

    @property
    def direct(self) -> bool:
        """Threads read global memory themselves."""
        return self.stages == 0

    @property
    def depth(self) -> int:
        """Rows whose exchange may be in flight at once."""
        return 1 if self.held else DEPTH

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
        warps_of_a_scheduler = self.min_blocks_per_sm * -(-self.block // WARP // 4)
        most = 255 if self.direct else MOST_REGISTERS
        return min(most, REGISTER_FILE // 4 // (warps_of_a_scheduler * WARP) // 8 * 8)

    @property
    def registers(self) -> tuple:
        """(producer, consumer) registers a thread once the roles are known. The pool is what the launch took, not what
        the SM has: asking for more never returns."""
        left = self.launch_registers * self.block - PRODUCER_REGISTERS * WARPGROUP
        return PRODUCER_REGISTERS, min(MOST_REGISTERS, left // self.threads // 8 * 8)

    @property
    def consumer_registers(self) -> int:
        return self.launch_registers if self.direct else self.registers[1]

    def units(self, rows: int, most: int) -> int:
        """Clusters of the grid: at most `most`, and a tile at least for each; more than SMs, each with its
        own row of column sums, only where they have many. Of a held plan, one for each tile."""
        tiles = -(-rows // self.groups)
        if self.held:
            return tiles
        if tiles < MANY_TILES * most:
            most = max(1, min(most, most * self.cluster // self.min_blocks_per_sm))
        return min(most, tiles)

    def rows_of(self, unit: int, units: int, rows: int) -> list:
        """The rows that a unit works on, tile by tile: what the kernel's `Share` says, for the tests."""
        firsts = range(unit * self.groups, rows, units * self.groups)
        return [row for first in firsts for row in range(first, min(first + self.groups, rows))]

    @property
    def slab(self) -> int:
        """How many quads of columns a block finishes at a time: a power of two."""
        quads = -(-self.N // QUAD)
        return min(self.threads, power_of_two(-(-quads // (NOMINAL_BLOCKS * self.min_blocks_per_sm))))

    @property
    def slab_loads(self) -> int:
        """Rows of column sums that a thread reads for a slab, all at once: for the nominal number of blocks."""
        return min(16, -(-(NOMINAL_BLOCKS * self.min_blocks_per_sm // self.cluster) // (self.threads // self.slab)))


def power_of_two(n):
    """The least power of two that is n or more."""
    return 1 << max(0, n - 1).bit_length()


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
    slots = p.depth * p.groups * p.width * 4 * sum(map(padded_sums, shape.sums)) if p.width > 1 else 0
    semaphores = 8 * (2 * p.stages + p.depth * p.groups * len(shape.sums) + 2)
    alignment = 128 * (len(shape.loads) + len(shape.sums) + 2)
    return ring + scratch_bytes(shape, p) + slots + semaphores + alignment


def smem_limit(p: RowPlan) -> int:
    """Bytes of shared memory that each of its blocks on an SM may have."""
    return (SMEM_BYTES + RESERVED) // p.min_blocks_per_sm - RESERVED


def carveout(shape: RowShape, p: RowPlan) -> Optional[int]:
    """Percent of an SM's shared memory and L1 that its blocks take; None: the driver chooses."""
    if p.min_blocks_per_sm == 1:
        return None
    return -(-100 * p.min_blocks_per_sm * (smem_bytes(shape,
                                                      p) + RESERVED) // (SMEM_BYTES + RESERVED)) if p.held else 100
