"""From what was asked for to how the kernel is built: pure Python, tested without a GPU.

The choices come from measurements on an H100 (bench/tune_attention.py repeats them)."""
from dataclasses import dataclass

from tkq.attention.spec import DTYPES, HEAD_DIMS, AttentionSpec

SHARED_BYTES = 226 * 1024  # of a block, what the loader grants; the rest is the hardware's
SEMAPHORE_BYTES = 2048  # semaphores, tasks and the tiles' alignment


@dataclass(frozen=True)
class AttentionConfig:
    """kv: keys of a K or V tile. consumers: warpgroups, 64 query rows each. stages: K tiles, and V tiles, in flight.
    schedule: see tkq.tile.Schedule. bridge: the next task's first product runs over this one's last. q_stages: Q tiles
    for each consumer. panels: into how many O is cut on its way out; 0: it goes through the Q tile. section_mb: K and V
    that are worked on together, in MB of L2. cluster: blocks that share K and V."""

    kv: int = 128
    consumers: int = 2
    stages: int = 2
    schedule: str = "dynamic"
    bridge: bool = True
    q_stages: int = 2
    o_panels: int = 1
    section_mb: int = 16
    cluster: int = 1
    turns: bool = True
    lazy: int = 0
    q_registers: bool = False

    @property
    def rows(self) -> int:
        """Query rows of a block."""
        return 64 * self.consumers

    @property
    def tile_rows(self) -> int:
        """Query rows of a task."""
        return self.rows * self.cluster

    @property
    def own_o(self) -> bool:
        return self.o_panels > 0

    @property
    def panels(self) -> int:
        return max(self.o_panels, 1)

    def shared_bytes(self, head_dim: int) -> int:
        """Of a block."""
        tile = 64 * head_dim * 2
        o = tile * self.consumers // self.o_panels if self.own_o else 0
        return SEMAPHORE_BYTES + 2 * self.stages * self.kv * head_dim * 2 + self.q_stages * self.consumers * tile + o

    def check(self, head_dim: int) -> "AttentionConfig":
        """Itself; ValueError for a configuration that cannot run."""
        if self.shared_bytes(head_dim) > SHARED_BYTES:
            raise ValueError(f"{self} at head_dim {head_dim} takes {self.shared_bytes(head_dim)} bytes of shared memory, allowed are {SHARED_BYTES}")
        if self.bridge and not (self.own_o and self.schedule != "single"):
            raise ValueError(f"{self}: bridge needs persistent blocks and a tile of O's own")
        if self.cluster > 1 and self.schedule == "dynamic":
            raise ValueError(f"{self}: the blocks of a cluster share a task, which only single and static hand out")
        if not self.own_o and self.q_stages != 1:
            raise ValueError(f"{self}: O goes through the Q tile, so there is one")
        return self


def plan(spec: AttentionSpec, seqlen_q: int, seqlen_k: int, tasks_hint: int = 0) -> AttentionConfig:
    """The configuration for a problem. Few of them, so that few kernels are compiled."""
    return _CONFIGS[spec.head_dim, spec.causal].check(spec.head_dim)


_CONFIGS = {
    (128, True): AttentionConfig(),
    (128, False): AttentionConfig(),
    (64, True): AttentionConfig(consumers=3),
    (64, False): AttentionConfig(consumers=3),
}


def shipped():
    """Every kernel that ``plan`` can choose, with what its machine code must show."""
    from tkq.runtime.recipe import Recipe, Shipped
    from tkq.testing.expectation import Expectation

    out = []
    for dtype in DTYPES:
        for head_dim in HEAD_DIMS:
            for causal in (False, True):
                spec = AttentionSpec(dtype, head_dim, causal)
                recipe = Recipe("tkq.attention.forward:build", (spec, plan(spec, 4096, 4096)))
                name = f"flash_attn_{dtype}_d{head_dim}{'_causal' if causal else ''}"
                out.append(Shipped(name, recipe, Expectation(), quick=dtype == "bf16"))
    return out
