"""How a convolution's kernel goes about it."""
from dataclasses import dataclass

WARP = 32


@dataclass(frozen=True)
class ConvConfig:
    """rows: tokens (along time: vectors of tokens) whose loads a thread issues together. warps: of a block, each with a
    run of tokens of its own. resident: blocks that an SM is to have registers for, 0 for as many as there happen to
    be."""

    rows: int = 4
    warps: int = 4
    resident: int = 0

    @property
    def threads(self) -> int:
        return self.warps * WARP

    @property
    def launched(self) -> dict:
        """What a launch is told of blocks. Without shared memory, which is said so that no driver is asked."""
        block = dict(block=[self.threads, 1, 1])
        return block | dict(min_blocks_per_mp=self.resident, preferred_smem_carveout=0) if self.resident else block
