"""How attention's backward is built with fewer instructions for each score: pure Python."""
from dataclasses import dataclass

from tkq.attention.backward_seamless_config import SeamlessConfig


@dataclass(frozen=True)
class LightConfig(SeamlessConfig):
    """Of ``tkq.attention.backward_light``. seams: as ``backward`` has it, else as ``backward_seamless``. pairs: dS is
    a product of pairs of 16 bits. begins: dP begins at delta, which need not be added then; moves: which
    is read once. keeps: dS is made behind dV."""

    seams: bool = False
    pairs: bool = False
    begins: bool = False
    moves: bool = False
    keeps: bool = False

    def check(self, width: int) -> "LightConfig":
        """Itself; ValueError for a configuration that cannot run."""
        super().check(width)
        if self.two_keys or self.split:
            raise ValueError(f"{self}: it has no two_keys and no split")
        if self.keeps and not (self.late and self.pairs):
            raise ValueError(f"{self}: keeps needs late and pairs")
        return self
