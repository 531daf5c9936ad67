"""How a convolution's kernel goes about it."""
from dataclasses import dataclass

WARP = 32


@dataclass(frozen=True)
class ConvConfig:
    """rows: tokens (along time: vectors of tokens) whose loads a thread issues together. ahead: along channels, those
    of the next ones before it computes. warps: of a block. across: how many of them have neighbouring channels of the
    same run of tokens; the others have runs of their own."""

    rows: int = 4
    warps: int = 4
    across: int = 1
    ahead: bool = True

    def __post_init__(self):
        if self.warps % self.across:
            raise ValueError(f"ConvConfig: across is {self.across}, allowed are divisors of warps, {self.warps}")

    @property
    def threads(self) -> int:
        return self.warps * WARP
