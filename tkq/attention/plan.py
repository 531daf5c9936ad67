"""From what was asked for to how the kernel is built: pure Python, tested without a GPU.

The choices come from measurements on an H100 (bench/tune_attention.py repeats them)."""
import itertools
from dataclasses import dataclass

from tkq.attention.spec import HEAD_DIMS, AttentionSpec

SHARED_BYTES = 226 * 1024  # of a block, what the loader grants; the rest is the hardware's
SEMAPHORE_BYTES = 2048  # semaphores, tasks and the tiles' alignment


@dataclass(frozen=True)
class AttentionConfig:
    """kv: keys of a K or V tile. consumers: warpgroups, 64 query rows each. stages: K tiles, and V tiles, in flight.
    schedule: see tkq.tile.Schedule. bridge: the next task's first product runs over this one's last. q_stages: Q tiles
    for each consumer. o_panels: into how many parts O is cut on its way out, to save shared memory. section_mb: K and V
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

    @property
    def rows(self) -> int:
        """Query rows of a block."""
        return 64 * self.consumers

    @property
    def tile_rows(self) -> int:
        """Query rows of a task."""
        return self.rows * self.cluster

    def shared_bytes(self, head_dim: int) -> int:
        """Of a block."""
        tile = 64 * head_dim * 2
        o = tile * self.consumers // self.o_panels
        return SEMAPHORE_BYTES + 2 * self.stages * self.kv * head_dim * 2 + self.q_stages * self.consumers * tile + o

    def check(self, head_dim: int) -> "AttentionConfig":
        """Itself; ValueError for a configuration that cannot run."""
        taken = self.shared_bytes(head_dim)
        if taken > SHARED_BYTES:
            raise ValueError(f"{self}: {taken} bytes of shared memory at head_dim {head_dim}, there are {SHARED_BYTES}")
        if self.bridge and self.schedule == "single":
            raise ValueError(f"{self}: bridge needs persistent blocks")
        if self.cluster > 1 and self.schedule == "dynamic":
            raise ValueError(f"{self}: the blocks of a cluster share a task, which only single and static hand out")
        return self


LENGTHS = ("short", "medium", "long")
SHORT, LONG = 2048, 8192  # keys: short below, long from


def length_class(seqlen_k: int) -> str:
    """All that a plan needs to know of the lengths, so that few kernels are compiled and looked up."""
    return "short" if seqlen_k < SHORT else "medium" if seqlen_k < LONG else "long"


def plan(spec: AttentionSpec, length: str = "medium") -> AttentionConfig:
    """The configuration for a problem of short, medium or long sequences (see ``length_class``)."""
    if spec.head_dim == 64:
        return _D64_SHORT if spec.causal and length == "short" else _D64
    if length == "long":
        return _D128_LONG_CAUSAL if spec.causal else _D128_LONG_FULL
    return _D128


# Measured on an H100, B * S = 16384, H * D = 2048, at 1024, 4096 and 16384 keys, against others in the same run.
# head_dim 128, short and medium: dynamic tasks with a bridge were fastest or within the noise of it (2 to 3 %). Beside
#   it, over all lengths: kv 96 to 176 0.82 to 1.0, static clusters of 2 sharing K and V 0.88 to 1.01, one block a task
#   0.79 to 0.96, Q in registers 0.93 to 0.99, and O corrected only where the maximum grew by 2 ** 8 0.94 to 1.01.
# head_dim 128, long, at 16384 keys beside FA4 in runs of three: causal 1.073 without bridge and turns, 1.054 without
#   turns, 1.038 with both; full 1.031 for the pairs of blocks below, 1.014 with turns, 1.003 for the configuration of
#   short ones. That long begins at 8192 is a guess between 4096 and 16384.
# head_dim 64: three consumers, a third stage, no bridge; two consumers win where causal tasks are few blocks long.
_D128 = AttentionConfig()
_D128_LONG_CAUSAL = AttentionConfig(bridge=False, turns=False)
_D128_LONG_FULL = AttentionConfig(
    kv=176, schedule="static", cluster=2, bridge=False, q_stages=1, o_panels=2, turns=False)
_D64 = AttentionConfig(consumers=3, stages=3, bridge=False)
_D64_SHORT = AttentionConfig()


def shipped():
    """Every configuration that ``plan`` can choose, each dtype and with and without lse, and what its machine code must
    show."""
    from tkq.runtime.recipe import Recipe, Shipped
    from tkq.testing.expectation import Expectation

    expectation = Expectation(tensor=24, instructions=("UTMALDG", "UTMASTG", "USETMAXREG", "STSM"))
    out = {}
    for dtype, lse in (("bf16", False), ("bf16", True), ("fp16", True)):
        for head_dim, causal, length in itertools.product(HEAD_DIMS, (False, True), LENGTHS):
            spec = AttentionSpec(dtype, head_dim, causal, lse)
            recipe = Recipe("tkq.attention.forward:build", (spec, plan(spec, length)))
            name = "_".join(("flash_attn", dtype, f"d{head_dim}", *["causal"] * causal, length, *["lse"] * lse))
            out.setdefault(recipe, Shipped(name, recipe, expectation, quick=dtype == "bf16" and not lse))
    return list(out.values())
