"""How the kernels of attention's backward are built: pure Python. What is chosen for a problem is in
``tkq.attention.backward.plan``, on which no kernel depends."""
from dataclasses import dataclass

from tkq.attention.backward.spec import BackwardSpec

SHARED_BYTES = 226 * 1024  # of a block, what the loader grants; the rest is the hardware's
SEMAPHORE_BYTES = 512  # semaphores, and what aligns them; all tiles are multiples of their alignment
DQ_SENDERS = 2  # helper warps that send dQ with dq_reduce "ordered", or let it go: they alternate between tiles
ROWS = 128  # queries of a block of `dq_kernel.DqKernel`


DQ_REDUCE = ("atomic", "bulk", "first_store", "serial", "ordered")


@dataclass(frozen=True)
class BackwardConfig:
    """tile: query rows of a step. block: keys of a block. stages: tiles of Q, and of dO, in flight; ds_stages: of dS;
    p_stages: of P on its way between warpgroups, where width is above 128; p_bytes: of an element there. dq_cols:
    columns of a product of dQ (of a tile). registers: of a thread of each role, the producer, the dQ warpgroup, then
    the two warpgroups with keys or, where width is above 128, that with dV and that with dK.

    The variants, of which ``tkq.attention.backward.kernel.BackwardKernel`` is composed:

    dq_reduce: how dQ of a tile comes to be the sum over the blocks of keys. "atomic": each adds to an fp32 accumulator
    from registers; "bulk": through shared memory; "first_store": likewise, and the first to contribute stores
    (``dq_first_store``); "serial": from block to block, without zeroing, helper warps and a kernel behind
    (``dq_serial``); "ordered": through shared memory, by warps that wait for the blocks before, so that dQ has the same
    bits in each run (``dq_ordered``).
    dq_stages: with "ordered", parts of dQ in shared memory, one for each of DQ_SENDERS or one in all; or 0: it goes
    from registers (``dq_ordered_registers``), and ``BackwardPostprocess`` converts it, not the helper warps.
    ping_pong: the dK/dV warpgroups compute P in turns, so that they stay out of step. dkv_parts:
    of a tile's queries; dV and dK of one are computed while dS of the next is made. store_from_registers: dK
    and dV are written from registers, not through K's and V's memory; persistent: which then takes the next task's K
    and V meanwhile.
    helper_warps: the producer's neighbour warps do the work of the kernels before and after
    (``tkq.attention.backward.helper_warps``): zero the accumulator and convert it to dQ, with "first_store" only the
    latter. fuse_preprocess: they make the statistics of the rows too. by_query_head: they count by query head, not by
    K/V head, so that dQ of a head is converted while that of the next is added up.
    l2_section_mb: queries, their gradients and the dQ accumulator that are worked on together, in MB of L2.
    longest_first: where there are masks, the blocks with most queries first; of packed sequences, those with most
    queries. tail_waves: waves of blocks in the heads at the end, whose longest tasks come first. heads_per_task: query
    heads of a task, of those that share a K/V head, where that divides their number, else one; dK and dV partial sums
    are passed on from task to task (``tkq.attention.backward.gqa_split``). 0: all of them in one task.

    Of the separate dQ kernel: dq_kernel_kv, keys of a K or V tile, dq_kernel_stages, tiles of each in flight, and
    dq_kernel_registers, of the producer and of a consumer."""

    tile: int = 64
    block: int = 128
    stages: int = 3
    ds_stages: int = 2
    p_stages: int = 2
    p_bytes: int = 2
    dq_cols: int = 64
    registers: tuple = (24, 72, 208)
    l2_section_mb: int = 24
    longest_first: bool = True
    dq_reduce: str = "atomic"
    ping_pong: bool = False
    store_from_registers: bool = False
    persistent: bool = False
    helper_warps: bool = False
    fuse_preprocess: bool = False
    by_query_head: bool = False
    tail_waves: int = 1
    heads_per_task: int = 0
    dq_stages: int = 1
    dq_kernel_kv: int = 128
    dq_kernel_stages: int = 2
    dq_kernel_registers: tuple = (24, 240)
    dkv_parts: int = 2

    @property
    def roles(self) -> tuple:
        """(registers, warpgroups) of each."""
        one_each = len(self.registers) == 4
        return tuple((n, 1 if one_each or i < 2 else 2) for i, n in enumerate(self.registers))

    @property
    def l2_section_bytes(self) -> int:
        return self.l2_section_mb << 20

    @property
    def serial(self) -> bool:
        """dQ goes from block to block."""
        return self.dq_reduce == "serial"

    @property
    def ordered(self) -> bool:
        """The blocks add to a tile of dQ one after the other, always in the same order: dQ is deterministic."""
        return self.dq_reduce == "ordered"

    @property
    def dq_from_registers(self) -> bool:
        """dQ is added up from registers, not by way of shared memory."""
        return self.dq_reduce == "atomic" or (self.ordered and not self.dq_stages)

    @property
    def converts_behind(self) -> bool:
        """``BackwardPostprocess`` converts dQ, although there are helper warps."""
        return self.ordered and self.dq_from_registers

    def adds_dq(self, spec: BackwardSpec) -> bool:
        """Is dQ added up by the blocks that have the keys? Else a kernel of its own makes it."""
        return spec.dq and (self.ordered or not spec.deterministic)

    def dq_parts(self, width: int) -> tuple[int, int]:
        """A tile of dQ as (parts of 64 rows, parts of dq_cols columns)."""
        return self.tile // 64, width // self.dq_cols

    def workspace_floats(self, spec: BackwardSpec, rows: int) -> int:
        """Of a query head of ``rows`` rows, in whole tiles: two statistics a row and, where dQ is added up, its fp32;
        and counters, two of each sequence, or four of each tile."""
        counters = 6 if self.serial else 2
        return -(-rows // self.tile) * (self.tile * (2 + (spec.width if self.adds_dq(spec) else 0)) + counters) + 8

    def dkv_partial_floats(self, spec: BackwardSpec, keys: int) -> int:
        """More of it, of a K/V head of ``keys`` keys: dK and dV that are handed on, and a counter for each warp."""
        return -(-keys // self.block) * (2 * self.block * spec.width + 8) + 8 if self.heads_per_task else 0

    def shared_bytes(self, width: int) -> int:
        """Of a block."""
        tile = self.tile * width * 2
        stats, ds = 8 * self.tile * self.stages, self.block * self.tile * 2 * self.ds_stages
        dq = 0 if self.dq_reduce == "atomic" else 64 * self.dq_cols * 4
        dq *= self.tile // 64 * (width // self.dq_cols) if self.serial else self.dq_stages if self.ordered else 1
        p = self.p_stages * 64 * self.tile * self.p_bytes if width > 128 else 0
        keys = 2 * self.block * width * 2
        return SEMAPHORE_BYTES + keys + 2 * self.stages * tile + stats + ds + dq + p

    def check(self, width: int) -> "BackwardConfig":
        """Itself; ValueError for a configuration that cannot run."""
        wide = width > 128
        if self.tile % 64 or width % self.dq_cols or self.block != (64 if wide else 128):
            raise ValueError(f"{self}: tile must be a multiple of 64, dq_cols divide width {width}, and block be "
                             "128, 64 where width is above 128")
        if self.dq_reduce not in DQ_REDUCE or (wide and self.ping_pong):
            raise ValueError(f"{self}: dq_reduce is one of {', '.join(DQ_REDUCE)}; ping_pong is for two dK/dV "
                             "warpgroups")
        if self.persistent and not self.store_from_registers:
            raise ValueError(f"{self}: persistent needs store_from_registers")
        if self.serial and (wide or not self.persistent or self.helper_warps):
            raise ValueError(f"{self}: dq_reduce serial needs persistent, without helper_warps, and is for two dK/dV "
                             "warpgroups")
        if self.dkv_parts < 1 or self.tile % (16 * self.dkv_parts):
            raise ValueError(f"{self}: dkv_parts is 1 or more, and 16 times it divides tile")
        if len(self.registers) != (4 if wide else 3) or sum(n * groups for n, groups in self.roles) > 512:
            raise ValueError(f"{self}: registers of {4 if wide else 3} roles, "
                             "512 for a thread of each warpgroup in all")
        self._check_ordered(width)
        self._check_helper_warps(wide)
        alone = SEMAPHORE_BYTES + 4 * width * (ROWS + self.dq_kernel_kv * self.dq_kernel_stages)
        for what, taken in (("", self.shared_bytes(width)), (" for dQ alone", alone)):
            if taken > SHARED_BYTES:
                raise ValueError(f"{self}: {taken} bytes of shared memory{what} at width {width}, "
                                 f"there are {SHARED_BYTES}")
        return self

    def _check_ordered(self, width):
        if self.dq_stages not in (0, 1, DQ_SENDERS):
            raise ValueError(f"{self}: dq_stages is 0, 1 or {DQ_SENDERS}")
        if self.ordered and (not self.helper_warps or self.fuse_preprocess or self.by_query_head):
            raise ValueError(f"{self}: dq_reduce ordered needs helper_warps, without fuse_preprocess and by_query_head")
        if self.ordered and self.tile // 64 * (width // self.dq_cols) % 2:
            raise ValueError(f"{self}: dq_reduce ordered needs an even number of parts of a tile")

    def _check_helper_warps(self, wide):
        if self.helper_warps and (not self.persistent or self.dq_cols % 32):
            raise ValueError(f"{self}: helper_warps needs persistent, and dq_cols a multiple of 32")
        if self.fuse_preprocess and (not self.helper_warps or wide or self.by_query_head):
            raise ValueError(f"{self}: fuse_preprocess needs helper_warps, without by_query_head, and is for two dK/dV "
                             "warpgroups")
        if self.by_query_head and (not self.helper_warps or wide or self.dq_reduce not in ("bulk", "first_store")):
            raise ValueError(f"{self}: by_query_head needs helper_warps and dq_reduce bulk or first_store, and is for "
                             "two dK/dV warpgroups")
        if self.dq_reduce == "first_store" and not self.by_query_head:
            raise ValueError(f"{self}: dq_reduce first_store needs by_query_head")
        if self.tail_waves < 1 or (self.tail_waves > 1 and not (self.by_query_head or self.ordered)):
            raise ValueError(f"{self}: tail_waves is 1 or more; more than 1 needs by_query_head or dq_reduce ordered")
        if self.heads_per_task and not self.by_query_head:
            raise ValueError(f"{self}: heads_per_task needs by_query_head")
