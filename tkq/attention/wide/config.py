"""How the kernels of attention with wide heads are built: pure Python."""
from dataclasses import dataclass

from tkq.attention.forward.config import SEMAPHORE_BYTES, SHARED_BYTES
from tkq.attention.forward.spec import LONG_WINDOW

ROWS = 64  # query rows of a block
PARTS = 2  # output warpgroups: each has this part of O's columns
# Of a tile of O: the assembler refuses an instruction with more registers than the launch has a thread, 128.
MOST_COLUMNS = 192
STORE_UNDER = 1  # P of the step before is stored under the product of this K slot, and of those behind it
GROUPS = 2 + PARTS  # warpgroups of a block: the producer's, the scores', the outputs'


@dataclass(frozen=True)
class WideConfig:
    """kv: keys of a block of K or V. key_cols: columns of a K slot, which has all keys of the block. value_keys: keys
    of a V slot; value_cols: its columns, as many as a tile of O has, of which an output warpgroup has some. stages:
    slots in flight; K and V share their ring. cluster: blocks that share K and V by multicast. schedule: see
    tkq.tile.Schedule. l2_section_mb: MB of K and V in one L2 section, whose tasks run together. scores_in_flight: K
    slots whose products may still run when the outputs begin their own. registers: of a thread of the producer, of the
    scores' and of an output warpgroup."""

    kv: int = 128
    key_cols: int = 64
    value_keys: int = 64
    value_cols: int = 128
    stages: int = 9
    cluster: int = 2
    schedule: str = "dynamic"
    l2_section_mb: int = 16
    scores_in_flight: int = 1
    registers: tuple = (24, 152, 168)

    o_store_steps = 1  # not a field: O is stored from registers

    @property
    def rows(self) -> int:
        """Query rows of a block."""
        return ROWS

    @property
    def tile_rows(self) -> int:
        """Query rows of a task: of a cluster."""
        return ROWS * self.cluster

    def key_slots(self, head_dim: int) -> int:
        """Slots of a block of K."""
        return head_dim // self.key_cols

    def value_tiles(self, head_dim: int) -> int:
        """Tiles of O, side by side, that an output warpgroup has."""
        return head_dim // PARTS // self.value_cols

    def value_slots(self, head_dim: int) -> int:
        """Slots of a block of V for one output warpgroup."""
        return self.value_tiles(head_dim) * self.key_parts

    @property
    def key_parts(self) -> int:
        """Parts of a block's keys, of a V slot each."""
        return self.kv // self.value_keys

    def known(self, head_dim: int) -> int:
        """The last K slot of a step whose place in the ring had one of the scores' own before: see ``products``."""
        return self.stages - PARTS * self.value_slots(head_dim) - 1

    def slot_bytes(self, head_dim: int) -> int:
        """Of the ring: K's and V's slots have the same places."""
        return 2 * max(self.kv * self.key_cols, self.value_keys * self.value_cols)

    def shared_bytes(self, head_dim: int) -> int:
        """Of a block: Q, P, the ring."""
        return SEMAPHORE_BYTES + 2 * ROWS * (head_dim + self.kv) + self.stages * self.slot_bytes(head_dim)

    def check(self, head_dim: int) -> "WideConfig":
        """Itself; ValueError for a configuration that cannot run."""
        taken = self.shared_bytes(head_dim)
        if taken > SHARED_BYTES:
            raise ValueError(f"{self}: {taken} bytes of shared memory at head_dim {head_dim}, there are {SHARED_BYTES}")
        if self.kv % self.value_keys or self.value_keys % 16:
            raise ValueError(f"{self}: value_keys is {self.value_keys}, allowed are multiples of 16 that divide kv")
        if self.key_cols % 16 or head_dim % self.key_cols:
            raise ValueError(f"{self}: key_cols is {self.key_cols}, allowed are multiples of 16 that divide {head_dim}")
        if head_dim % (PARTS * self.value_cols) or self.value_cols % 32 or self.value_cols > MOST_COLUMNS:
            raise ValueError(f"{self}: value_cols is {self.value_cols}, allowed are multiples of 32 up to "
                             f"{MOST_COLUMNS} that divide {head_dim // PARTS}")
        if self.value_keys % (8 * self.cluster) or self.kv % (8 * self.cluster):
            raise ValueError(f"{self}: each of {self.cluster} blocks loads an equal part of a slot, in multiples of 8 "
                             "keys")
        if self.cluster > 2 and self.schedule == "dynamic":
            raise ValueError(f"{self}: a cluster's first block passes the next task to one other block, not to a third")
        if self.tile_rows + self.kv > LONG_WINDOW:
            raise ValueError(f"{self}: {self.tile_rows} rows and {self.kv} keys of a step, more than {LONG_WINDOW}")
        self.check_order(head_dim)
        few, scores, out = self.registers
        if few + scores + PARTS * out > 512:
            raise ValueError(f"{self}: registers of the warpgroups are {few + scores + PARTS * out} in all, the launch "
                             "has 512")
        return self

    def check_order(self, head_dim: int) -> None:
        """Of the slots in the ring, and which of them are known: see ``products``."""
        if self.known(head_dim) < 0:
            raise ValueError(f"{self}: stages is {self.stages}, allowed are more than the "
                             f"{PARTS * self.value_slots(head_dim)} slots of a block of V")
        most = min(self.key_slots(head_dim) - 1, self.known(head_dim) + 2)  # the outputs know all K slots before
        if not 0 <= self.scores_in_flight <= most:
            raise ValueError(f"{self}: scores_in_flight is {self.scores_in_flight}, allowed are 0 to {most}")
