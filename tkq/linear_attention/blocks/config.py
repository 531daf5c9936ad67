"""How the kernel is laid out."""
from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class BlocksConfig:
    """groups: warpgroups of a block that hold 64 rows of the state's V each. stages: chunks of q, k and v that are
    loaded ahead. registers: of a thread of the producer, of the scores' warpgroup and of the state's. piece: columns of
    the state that are rounded while others are multiplied."""

    groups: int = 2
    stages: int = 3
    registers: tuple = (24, 120, 184)
    piece: int = 32
