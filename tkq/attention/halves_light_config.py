"""How the kernel of ``halves_light.LightHalves`` is built."""
from dataclasses import dataclass

from tkq.attention.halves_config import HalvesConfig


@dataclass(frozen=True)
class LightConfig(HalvesConfig):
    """ints: whether a tile's scores are still in range is found by comparing their bits, three at once."""

    ints: bool = True

    def check(self, head_dim: int, head_dim_v: int) -> "LightConfig":
        """As ``HalvesConfig.check``."""
        if self.bridge or self.ahead or self.late:
            raise ValueError(f"{self}: allowed is neither a bridge, ahead nor late")
        return super().check(head_dim, head_dim_v)
