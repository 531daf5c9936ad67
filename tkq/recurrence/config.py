"""How a scan's kernel goes about it."""
from dataclasses import dataclass

WARP = 32
MOST_WARPS = 15  # of a block, that pass the state on by a named barrier each
CARVEOUT = 25  # percent of an SM's memory that are shared: states are little, and loads on their way take of the rest
LANES = 1, 2, 4, 8, 16, 32


@dataclass(frozen=True)
class ScanConfig:
    """tokens_per_thread: of a run, in registers: along channels all of its tokens, along time those of one lane. warps:
    of a block, which take the runs of their columns in turn. blocks: of an SM, for which there are to be registers; 0:
    as the compiler likes. convert_early: numbers of 16 bits are converted before the state comes; along time they
    always are. lanes: along time, of a line; with fewer than a warp's, a warp has several lines, and each of them one
    run at most. line_groups: along time, of a block, taken one after the other; a group is the lines that a warp holds
    at once, 32 / lanes."""

    tokens_per_thread: int = 16
    warps: int = 8
    blocks: int = 0
    convert_early: bool = True
    lanes: int = WARP
    line_groups: int = 1

    def __post_init__(self):
        enough = min(self.tokens_per_thread, self.line_groups) >= 1
        if not enough or not 1 <= self.warps <= MOST_WARPS or self.lanes not in LANES:
            raise ValueError(f"ScanConfig: tokens_per_thread is {self.tokens_per_thread}, line_groups is "
                             f"{self.line_groups}, warps is {self.warps}, lanes is {self.lanes}; allowed are 1 and "
                             f"more, 1 and more, 1 to {MOST_WARPS}, and {', '.join(map(str, LANES))}")

    @property
    def threads(self) -> int:
        return self.warps * WARP

    @property
    def launch(self) -> dict:
        """What a launch is given of it."""
        block = dict(block=[self.threads, 1, 1])
        return block | dict(min_blocks_per_mp=self.blocks, preferred_smem_carveout=CARVEOUT) if self.blocks else block
