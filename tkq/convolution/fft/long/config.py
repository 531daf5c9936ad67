"""How the kernels of transforms of many points go about it."""
from dataclasses import dataclass


@dataclass(frozen=True)
class LongConfig:
    """warpgroups: of a block. blocks: that an SM has room for, which sets the registers of a thread."""

    warpgroups: int = 3
    blocks: int = 1

    @property
    def threads(self) -> int:
        return self.warpgroups * 128
