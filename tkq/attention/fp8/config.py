"""How the kernels of float8 attention are built: pure Python."""
from dataclasses import dataclass
from typing import ClassVar

from tkq.attention.forward.config import ACCUMULATORS, SEMAPHORE_BYTES, SHARED_BYTES
from tkq.attention.forward.spec import LONG_WINDOW
from tkq.attention.fp8.spec import KEYS_TOGETHER

UNIT = 32  # keys of one product of float8
HAND_OVERS = ("products", "range")
ROW_SUMS = ("registers", "mma")
SOFTWARE_EXP2 = (0, 2, 3, 4)
ONES = 8  # columns of a product with ones: as few as there are


@dataclass(frozen=True)
class Fp8Config:
    """kv: keys of a K or V tile. consumers: warpgroups, 64 query rows each. stages: K tiles, and V tiles, in flight.
    q_stages: Q tiles for each consumer. schedule: see tkq.tile.Schedule. l2_section_mb: MB of K and V in one L2
    section, whose tasks run together. ping_pong: consumers issue their products one after the other. hand_over: after
    what of its own a consumer lets the next one issue, so that it is ahead of the next one by as much: its products are
    issued, or its scores have been compared with max. overlap: the next S and its softmax run under P V; without, S and
    P V share registers. parts: O's columns are multiplied in as many parts, one after the other: with two_level,
    registers of one part are enough. row_sum: "registers" adds the exponentials up before they are rounded; "mma"
    multiplies the rounded P by columns of ones. software_exp2: with n, every n-th group of four elements of P is
    computed by integer and half precision instructions, without ex2 and conversions (``tkq.tile.exp2_e4m3``); 0: none.
    That takes row_sum="mma". registers: of a producer's thread and a consumer's; without, tkq.tile's own."""

    kv: int = 128
    consumers: int = 2
    stages: int = 2
    q_stages: int = 2
    schedule: str = "dynamic"
    l2_section_mb: int = 16
    ping_pong: bool = True
    hand_over: str = "range"
    overlap: bool = True
    parts: int = 1
    row_sum: str = "registers"
    software_exp2: int = 0
    registers: tuple = ()
    cluster: ClassVar[int] = 1
    o_store_steps: ClassVar[int] = 1
    o_from_registers: ClassVar[bool] = True
    o_reuses_q_smem: ClassVar[bool] = False

    @property
    def rows(self) -> int:
        """Query rows of a block."""
        return 64 * self.consumers

    @property
    def tile_rows(self) -> int:
        """Query rows of a task."""
        return self.rows

    def shared_bytes(self, head_dim: int) -> int:
        """Of a block: Q, K and V."""
        ones = ONES * self.kv if self.row_sum == "mma" else 0
        return SEMAPHORE_BYTES + ones + head_dim * (self.q_stages * self.rows + 2 * self.stages * self.kv)

    def accumulators(self, head_dim: int, two_level: bool) -> int:
        """Registers of a consumer's thread that hold S, P, O and the P V of one part; not the few of a product with
        ones."""
        s, part = self.kv // 2, head_dim // 2 // self.parts if two_level else 0
        return (s + part if self.overlap else max(s, part)) + self.kv // 8 + head_dim // 2

    def check(self, head_dim: int, two_level: bool, varlen: bool = False) -> "Fp8Config":
        """Itself; ValueError for a configuration that cannot run."""
        taken, held = self.shared_bytes(head_dim), self.accumulators(head_dim, two_level)
        if taken > SHARED_BYTES:
            raise ValueError(f"{self}: {taken} bytes of shared memory at head_dim {head_dim}, there are {SHARED_BYTES}")
        if held > ACCUMULATORS[self.consumers]:
            raise ValueError(f"{self}: accumulators of {held} registers at head_dim {head_dim}, there is room for "
                             f"{ACCUMULATORS[self.consumers]}")
        self._check_keys(varlen)
        if self.parts < 1 or head_dim % (32 * self.parts):
            raise ValueError(f"{self}: parts is {self.parts}, allowed are those that cut {head_dim} columns of O into "
                             "multiples of 32")
        if self.overlap and self.parts > 1:
            raise ValueError(f"{self}: parts is {self.parts}, with overlap allowed is 1")
        if self.ping_pong and not self.overlap:
            raise ValueError(f"{self}: ping_pong goes with overlap")
        if self.hand_over not in HAND_OVERS:
            raise ValueError(f"{self}: hand_over is {self.hand_over!r}, allowed are {', '.join(map(repr, HAND_OVERS))}")
        if self.row_sum not in ROW_SUMS:
            raise ValueError(f"{self}: row_sum is {self.row_sum!r}, allowed are {', '.join(map(repr, ROW_SUMS))}")
        if self.software_exp2 not in SOFTWARE_EXP2 or (self.software_exp2 and self.row_sum != "mma"):
            raise ValueError(f"{self}: software_exp2 is {self.software_exp2}, allowed are 0 and, with row_sum='mma', "
                             f"{', '.join(map(str, SOFTWARE_EXP2[1:]))}")
        if self.tile_rows + self.kv > LONG_WINDOW:
            raise ValueError(f"{self}: {self.tile_rows} rows and {self.kv} keys of a step, more than {LONG_WINDOW}")
        return self

    def _check_keys(self, varlen):
        if self.kv % UNIT or not 0 < self.kv <= 256:
            raise ValueError(f"{self}: kv is {self.kv}, allowed are multiples of {UNIT} up to 256")
        if varlen and KEYS_TOGETHER % self.kv:
            raise ValueError(f"{self}: kv is {self.kv}, of packed sequences allowed are divisors of {KEYS_TOGETHER}: "
                             "a tile of V is of one sequence")
