"""How a convolution's kernel goes about it."""
from dataclasses import dataclass

WARP = 32


@dataclass(frozen=True)
class ConvConfig:
    """rows: tokens (along time: vectors of tokens) whose loads a thread issues together. warps: of a block, each with a
    run of tokens of its own."""

    rows: int = 4
    warps: int = 4

    @property
    def threads(self) -> int:
        return self.warps * WARP
