"""How the kernel of ``halves.HalvesForward`` is built."""
from dataclasses import dataclass

from tkq.attention.config import AttentionConfig


@dataclass(frozen=True)
class HalvesConfig(AttentionConfig):
    """kv is 128, consumers are 2; without a bridge."""

    bridge: bool = False
    early: bool = False
    eager: int = 0
    second: bool = False
    scout: bool = False
    registers: tuple = (40, 232)

    def check(self, head_dim: int, head_dim_v: int) -> "HalvesConfig":
        """As ``AttentionConfig.check``."""
        if (self.kv, self.consumers, self.cluster) != (128, 2, 1) or self.o_over_q:
            raise ValueError(f"{self}: allowed are kv 128, 2 consumers, cluster 1, O not through Q's tile, no bridge")
        return super().check(head_dim, head_dim_v)
