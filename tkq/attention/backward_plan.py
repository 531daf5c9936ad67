"""From what was asked of the backward to how its kernels are built: pure Python, tested without a GPU."""
from dataclasses import dataclass

from tkq.attention.backward_spec import BackwardSpec

SHARED_BYTES = 226 * 1024  # of a block, what the loader grants; the rest is the hardware's
SEMAPHORE_BYTES = 2048  # semaphores and the tiles' alignment
BLOCK = 128  # keys of a block: two warpgroups of 64


@dataclass(frozen=True)
class BackwardConfig:
    """tile: query rows of a step. q_stages, do_stages, ds_stages: tiles of Q, dO and dS in flight. dq_cols: columns of
    a product of dQ (of head_dim). registers: of a thread of the producer, the dQ warpgroup, the warpgroups with keys.
    stagger: the blocks of a head begin at different tiles, where nothing is masked. section_mb: queries, their
    gradients and the dQ accumulator that are worked on together, in MB of L2."""

    tile: int = 64
    q_stages: int = 3
    do_stages: int = 3
    ds_stages: int = 2
    dq_cols: int = 64
    registers: tuple = (24, 72, 208)
    stagger: bool = False
    section_mb: int = 24

    def dq_parts(self, head_dim: int) -> tuple[int, int]:
        """A tile of dQ as (parts of 64 rows, parts of dq_cols columns)."""
        return self.tile // 64, head_dim // self.dq_cols

    def workspace_floats(self, spec: BackwardSpec, rows: int) -> int:
        """Of a query head of ``rows`` rows: two statistics a row and, with dq, its fp32 accumulator; whole tiles."""
        return -(-rows // self.tile) * self.tile * (2 + (spec.head_dim if spec.dq else 0))

    def shared_bytes(self, head_dim: int) -> int:
        """Of a block."""
        tile = self.tile * head_dim * 2
        stats, ds = 8 * self.tile * self.q_stages, BLOCK * self.tile * 2 * self.ds_stages
        return SEMAPHORE_BYTES + 2 * BLOCK * head_dim * 2 + (self.q_stages + self.do_stages) * tile + stats + ds

    def check(self, head_dim: int) -> "BackwardConfig":
        """Itself; ValueError for a configuration that cannot run."""
        taken = self.shared_bytes(head_dim)
        if taken > SHARED_BYTES:
            raise ValueError(f"{self}: {taken} bytes of shared memory at head_dim {head_dim}, there are {SHARED_BYTES}")
        if self.tile % 64 or head_dim % self.dq_cols:
            raise ValueError(f"{self}: tile must be a multiple of 64, dq_cols divide head_dim {head_dim}")
        return self


def plan(spec: BackwardSpec) -> BackwardConfig:
    """The configuration for a problem."""
    return _D64 if spec.head_dim == 64 else _D128


_D128 = BackwardConfig()
_D64 = BackwardConfig(tile=128)
