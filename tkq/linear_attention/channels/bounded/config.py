"""How the kernel is laid out, and what it is for."""
from __future__ import annotations

import math
from dataclasses import dataclass

COLUMNS = 128  # of q, k and gates: four of each lane of a warp
LOWEST = -60.0 / 8 * math.log(2.0)  # of gates: 8 tokens have at most `whole.MOST` then, all blocks one product
MOST_REACHED = 16  # chunks in front of a segment that are looked at
SCORES = 2  # warpgroups of scores, in ping-pong: each has a stage


@dataclass(frozen=True)
class BoundedConfig:
    """groups: warpgroups of a block that hold 64 rows of the state's V each. registers: of a thread of the scores'
    warpgroups, and of the state's. piece: columns of the state that are multiplied while others are waited for."""

    groups: int = 2
    registers: tuple = (112, 144)
    piece: int = 32
