"""How the kernel of ``window.WindowForward`` is built."""
from dataclasses import dataclass

from tkq.attention.plan import AttentionConfig


@dataclass(frozen=True)
class WindowConfig(AttentionConfig):
    """kv is 128, consumers are 2; schedule is "dynamic" or "static". shift: how many key tiles the two consumers' rows
    are apart. halves: a consumer leaves out the half of its first or last key tile that none of its rows sees. more_v:
    V tiles in flight beyond ``stages``."""

    bridge: bool = False
    turns: bool = False
    registers: tuple = (40, 232)
    shift: int = 1
    halves: bool = True
    more_v: int = 0

    def shared_bytes(self, head_dim: int, head_dim_v: int) -> int:
        return super().shared_bytes(head_dim, head_dim_v) + 2 * self.more_v * self.kv * head_dim_v

    def check(self, head_dim: int, head_dim_v: int) -> "WindowConfig":
        """As ``AttentionConfig.check``."""
        if (self.kv, self.consumers, self.cluster) != (128, 2, 1) or self.schedule == "single" or self.q_stages != 2:
            raise ValueError(f"{self}: allowed are kv 128, 2 consumers, cluster 1, two tiles of Q, persistent blocks")
        if self.shift not in (1, 2):
            raise ValueError(f"{self}: shift is {self.shift}, allowed are 1 and 2")
        return super().check(head_dim, head_dim_v)
