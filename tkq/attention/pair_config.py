"""How the kernel of ``pair.PairForward`` is built."""
from dataclasses import dataclass

from tkq.attention.plan import AttentionConfig


@dataclass(frozen=True)
class PairConfig(AttentionConfig):
    """kv is 128, consumers are 2, cluster is 2; schedule is "dynamic" or "static"."""

    bridge: bool = False
    cluster: int = 2
    registers: tuple = (40, 232)

    def check(self, head_dim: int, head_dim_v: int) -> "PairConfig":
        """As ``AttentionConfig.check``."""
        if (self.kv, self.consumers, self.cluster, self.bridge) != (128, 2, 2, False) or self.schedule == "single":
            raise ValueError(f"{self}: allowed are kv 128, 2 consumers, cluster 2, no bridge, persistent blocks")
        return super().check(head_dim, head_dim_v)
