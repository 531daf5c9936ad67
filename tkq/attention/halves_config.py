"""How the kernel of ``halves.HalvesForward`` is built."""
from dataclasses import dataclass

from tkq.attention.config import AttentionConfig


@dataclass(frozen=True)
class HalvesConfig(AttentionConfig):
    """consumers are 2; without a bridge. kv: 128, tiles begin at its multiples; otherwise (``anywhere``) the first tile
    of a task begins where its first row's keys do. Of 1151 keys 128 rows see 8 tiles of 144 instead of 9.
    ahead: the next task's first S is taken behind the last P @ V, and O written meanwhile."""

    bridge: bool = False
    registers: tuple = (40, 232)
    ahead: bool = False

    @property
    def anywhere(self) -> bool:
        """Do tiles begin at any key?"""
        return self.kv != 128

    def check(self, head_dim: int, head_dim_v: int) -> "HalvesConfig":
        """As ``AttentionConfig.check``."""
        if (self.consumers, self.cluster) != (2, 1) or self.o_over_q or self.bridge or self.kv % 16 or self.kv < 128:
            raise ValueError(f"{self}: allowed are kv of 16s from 128 on, 2 consumers, cluster 1, O not through Q's "
                             "tile, no bridge")
        return super().check(head_dim, head_dim_v)
