"""How a convolution's kernel goes about it."""
from dataclasses import dataclass

WARP = 32


@dataclass(frozen=True)
class ConvConfig:
    """rows: tokens (along time: vectors of tokens) whose loads a thread issues together. warps: of a block, each with a
    run of tokens of its own. blocks: of an SM, for which there are to be registers; 0: as the compiler likes."""

    rows: int = 4
    warps: int = 4
    blocks: int = 0

    @property
    def threads(self) -> int:
        return self.warps * WARP

    @property
    def launch(self) -> dict:
        """What a launch is given of it. There is no shared memory, which is said as the DSL asks the driver otherwise.
        """
        block = dict(block=[self.threads, 1, 1])
        return block | dict(min_blocks_per_mp=self.blocks, preferred_smem_carveout=0) if self.blocks else block
