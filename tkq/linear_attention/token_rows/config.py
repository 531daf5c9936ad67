"""How a kernel of `token_rows` is laid out."""
from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class RowsConfig:
    """stages: chunks of tokens that are in shared memory at once: the state's, one of each of the outputs' two
    warpgroups, those that are on their way.
    states: places for a chunk's state, 1 or 2. registers: of a thread of the producer's warpgroup, the state's, the
    outputs'.

    Raises:
        ValueError: stages is less than 2, or states another number."""

    stages: int = 3
    states: int = 1
    registers: tuple = (24, 136, 176)

    def __post_init__(self):
        if self.stages < 2 or self.states not in (1, 2):
            raise ValueError(f"RowsConfig: stages is {self.stages}, states is {self.states}, allowed are stages from 2 "
                             "on and states 1 and 2")
