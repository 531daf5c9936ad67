"""Which configuration a launch of Based gets, and in how many segments sequences are cut."""
from __future__ import annotations

from dataclasses import dataclass

from tkq.linear_attention.config import CHUNK

SHORTEST = 8  # chunks of a segment at least


@dataclass(frozen=True)
class BasedConfig:
    """stages: chunks of q, k and v that are loaded ahead. ahead: chunks whose features and scores are. registers: of a
    thread of the producer, of the features' warpgroup and of the state's."""

    stages: int = 4
    ahead: int = 3
    registers: tuple = (24, 232, 240)


def plan(spec) -> BasedConfig:
    """The same for all."""
    return BasedConfig()


def segments(blocks: int, tokens: int, multiprocessors: int) -> int:
    """Of each sequence: 1 where the blocks of whole sequences are enough for half of a GPU; as many as are blocks for
    all of it, of SHORTEST chunks at least, where they are not."""
    chunks = -(-tokens // CHUNK)
    if not blocks or 2 * blocks > multiprocessors:
        return 1
    return max(1, min(multiprocessors // blocks, chunks // SHORTEST))


@dataclass(frozen=True)
class GradientConfig:
    """As `BasedConfig`. states: chunks whose states are ahead. registers: of a thread of the producer, and of the
    features', the state's and the gradients' warpgroup."""

    stages: int = 3
    ahead: int = 2
    states: int = 2
    registers: tuple = (24, 104, 152, 232)


def gradient_plan(spec) -> GradientConfig:
    """The same for all."""
    return GradientConfig()
