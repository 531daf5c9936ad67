"""How the kernels of attention's forward are built: pure Python. What is chosen for a problem is in
``tkq.attention.forward.plan``, on which no kernel depends."""
from dataclasses import dataclass

from tkq.attention.forward.spec import FAR

SHARED_BYTES = 226 * 1024  # of a block, what the loader grants; the rest is the hardware's
SEMAPHORE_BYTES = 2048  # semaphores, tasks and the tiles' alignment
# Registers for S, P and O by consumers: what is left of a thread's 240 (1: 256, 3: 160) beside the softmax's own
ACCUMULATORS = {1: 208, 2: 208, 3: 136}


@dataclass(frozen=True)
class AttentionConfig:
    """kv: keys of a K or V tile. consumers: warpgroups, 64 query rows each. stages: K tiles, and V tiles, in flight.
    schedule: see tkq.tile.Schedule. bridge: the next task's first product runs over this one's last. q_stages: Q tiles
    for each consumer. o_panels: into how many parts O is cut on its way out, to save shared memory. o_over_q: O goes
    out through Q's tile, to save more. o_direct: O goes out from registers. section_mb: K and V that are worked on
    together, in MB of L2. cluster: blocks that share K and V.
    registers: of a producer's thread and a consumer's; without, tkq.tile's own."""

    kv: int = 128
    consumers: int = 2
    stages: int = 2
    schedule: str = "dynamic"
    bridge: bool = False
    q_stages: int = 2
    o_panels: int = 1
    section_mb: int = 16
    cluster: int = 1
    turns: bool = True
    o_over_q: bool = False
    o_direct: bool = False
    registers: tuple = ()

    @property
    def rows(self) -> int:
        """Query rows of a block."""
        return 64 * self.consumers

    @property
    def tile_rows(self) -> int:
        """Query rows of a task."""
        return self.rows * self.cluster

    def shared_bytes(self, head_dim: int, head_dim_v: int) -> int:
        """Of a block."""
        q, o = (2 * self.rows * cols for cols in (head_dim, head_dim_v))
        out = 0 if self.o_over_q or self.o_direct else o // self.o_panels
        return SEMAPHORE_BYTES + 2 * self.stages * self.kv * (head_dim + head_dim_v) + self.q_stages * q + out

    def accumulators(self, head_dim_v: int) -> int:
        """Registers of a consumer's thread that hold S, P (16 bits) and O."""
        return self.kv // 2 + self.kv // 4 + head_dim_v // 2

    def check(self, head_dim: int, head_dim_v: int) -> "AttentionConfig":
        """Itself; ValueError for a configuration that cannot run."""
        taken, dims = self.shared_bytes(head_dim, head_dim_v), f"head dims {head_dim} and {head_dim_v}"
        if taken > SHARED_BYTES:
            raise ValueError(f"{self}: {taken} bytes of shared memory at {dims}, there are {SHARED_BYTES}")
        if self.accumulators(head_dim_v) > ACCUMULATORS[self.consumers]:
            raise ValueError(f"{self}: accumulators of {self.accumulators(head_dim_v)} registers at {dims}, there is "
                             f"room for {ACCUMULATORS[self.consumers]}")
        if self.bridge and (self.schedule == "single" or self.q_stages == 1):
            raise ValueError(f"{self}: bridge needs persistent blocks, and the next task's Q beside this one's")
        if self.o_over_q and (self.q_stages > 1 or self.o_panels > 1 or head_dim != head_dim_v):
            raise ValueError(f"{self}: o_over_q needs one Q tile a consumer, of O's size, and takes O whole")
        if self.tile_rows + self.kv > FAR:
            raise ValueError(f"{self}: a task of {self.tile_rows} rows and a tile of {self.kv} keys, more than {FAR}")
        if self.o_direct and (self.o_over_q or self.o_panels > 1):
            raise ValueError(f"{self}: o_direct takes O whole, and no shared memory")
        if head_dim_v % (16 * self.o_panels):
            raise ValueError(f"{self}: o_panels must cut {head_dim_v} columns of O into multiples of 16")
        if self.cluster > 2 and self.schedule == "dynamic":
            raise ValueError(f"{self}: one block of a cluster tells the other the next task, a third is not told")
        return self


# ---- How the kernel of ``halves.HalvesForward`` is built.


@dataclass(frozen=True)
class HalvesConfig(AttentionConfig):
    """kv is 128, consumers are 2; without a bridge."""

    bridge: bool = False
    registers: tuple = (40, 232)

    def check(self, head_dim: int, head_dim_v: int) -> "HalvesConfig":
        """As ``AttentionConfig.check``."""
        if (self.kv, self.consumers, self.cluster) != (128, 2, 1) or self.o_over_q or self.bridge:
            raise ValueError(f"{self}: allowed are kv 128, 2 consumers, cluster 1, O not through Q's tile, no bridge")
        return super().check(head_dim, head_dim_v)
