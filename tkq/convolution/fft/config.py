"""How the long convolution's kernel goes about it."""
from dataclasses import dataclass


@dataclass(frozen=True)
class FftConfig:
    """warpgroups: of a block, each with tiles of its own, that share the tables."""

    warpgroups: int = 3

    @property
    def threads(self) -> int:
        return self.warpgroups * 128
