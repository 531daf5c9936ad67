"""Which configuration a launch of Based gets, and in how many segments sequences are cut."""
from __future__ import annotations

from tkq.linear_attention.based.config import BasedConfig, GradientConfig
from tkq.linear_attention.config import CHUNK

SHORTEST = 8  # chunks of a segment at least


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


def gradient_plan(spec) -> GradientConfig:
    """The same for all."""
    return GradientConfig()
