"""How the kernel of ``halves.HalvesForward`` is built."""
from dataclasses import dataclass

from tkq.attention.plan import AttentionConfig


@dataclass(frozen=True)
class HalvesConfig(AttentionConfig):
    """kv is 128, consumers are 2. ahead: a task's O is written while an S of the next one is computed: the first, or
    over a bridge the second."""

    bridge: bool = False
    registers: tuple = (40, 232)
    ahead: bool = False

    def check(self, head_dim: int, head_dim_v: int) -> "HalvesConfig":
        """As ``AttentionConfig.check``."""
        if (self.kv, self.consumers, self.cluster) != (128, 2, 1) or self.o_over_q:
            raise ValueError(f"{self}: allowed are kv 128, 2 consumers, cluster 1, O not through Q's tile")
        if self.ahead and self.q_stages == 1:
            raise ValueError(f"{self}: ahead needs two tiles of Q for each consumer")
        return super().check(head_dim, head_dim_v)
