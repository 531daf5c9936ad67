"""How the kernels of attention's forward are built: pure Python. What is chosen for a problem is in
``tkq.attention.forward.plan``, on which no kernel depends."""
from dataclasses import dataclass

from tkq.attention.forward.spec import LONG_WINDOW

SHARED_BYTES = 226 * 1024  # of a block, what the loader grants; the rest is the hardware's
SEMAPHORE_BYTES = 2048  # semaphores, tasks and the tiles' alignment
# Registers for S, P and O by consumers: what is left of a thread's 240 (1: 256, 3: 160) beside the softmax's own
ACCUMULATORS = {1: 208, 2: 208, 3: 136}


@dataclass(frozen=True)
class AttentionConfig:
    """kv: keys of a K or V tile. consumers: warpgroups, 64 query rows each. stages: K tiles, and V tiles, in flight.
    schedule: see tkq.tile.Schedule. overlap_tasks: the next task's first S runs under this one's last P V. q_stages: Q
    tiles for each consumer. o_store_steps: steps in which O is stored, to save shared memory. o_reuses_q_smem: O is
    staged in Q's shared memory, to save more. o_from_registers: O is stored from registers. l2_section_mb: MB of K and
    V in one L2 section, whose tasks run together. cluster: blocks that share K and V. registers: of a producer's thread
    and a consumer's; without, tkq.tile's own. stagger: consumers begin a task one after the other, each with its first
    S when that of the one before is there, so that they stay apart where nothing else makes them."""

    kv: int = 128
    consumers: int = 2
    stages: int = 2
    schedule: str = "dynamic"
    overlap_tasks: bool = False
    q_stages: int = 2
    o_store_steps: int = 1
    l2_section_mb: int = 16
    cluster: int = 1
    ping_pong: bool = True
    o_reuses_q_smem: bool = False
    o_from_registers: bool = False
    registers: tuple = ()
    stagger: bool = False

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
        out = 0 if self.o_reuses_q_smem or self.o_from_registers else o // self.o_store_steps
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
        if self.overlap_tasks and (self.schedule == "single" or self.q_stages == 1):
            raise ValueError(f"{self}: overlap_tasks needs persistent blocks, and the next task's Q beside this one's")
        if self.o_reuses_q_smem and (self.q_stages > 1 or self.o_store_steps > 1 or head_dim != head_dim_v):
            raise ValueError(f"{self}: o_reuses_q_smem needs one Q tile a consumer, of O's size, and takes O whole")
        if self.stagger and (self.overlap_tasks or self.ping_pong):
            raise ValueError(f"{self}: stagger goes without overlap_tasks and ping_pong")
        if self.tile_rows + self.kv > LONG_WINDOW:
            raise ValueError(f"{self}: {self.tile_rows} rows and {self.kv} keys of a step, more than {LONG_WINDOW}")
        if self.o_from_registers and (self.o_reuses_q_smem or self.o_store_steps > 1):
            raise ValueError(f"{self}: o_from_registers takes O whole, and no shared memory")
        if head_dim_v % (16 * self.o_store_steps):
            raise ValueError(f"{self}: o_store_steps must cut {head_dim_v} columns of O into multiples of 16")
        if self.cluster > 2 and self.schedule == "dynamic":
            raise ValueError(f"{self}: a cluster's first block passes the next task to one other block, not to a third")
        return self
