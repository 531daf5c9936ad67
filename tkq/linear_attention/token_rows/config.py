"""How a kernel of `token_rows` is laid out."""
from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class RowsConfig:
    """stages: chunks of tokens that are loaded ahead, an even number: every other one belongs to one of the outputs'
    two warpgroups. registers: of a thread of the producer's warpgroup, the state's, the outputs'.

    Raises:
        ValueError: stages is odd."""

    stages: int = 2
    registers: tuple = (40, 136, 168)

    def __post_init__(self):
        if self.stages % 2:
            raise ValueError(f"RowsConfig: stages is {self.stages}, allowed are multiples of 2")
