"""Into how many segments sequences are cut where gates forget. From sizes alone."""
from __future__ import annotations

from typing import NamedTuple

from tkq.linear_attention.config import CHUNK

SHORTEST = 8  # chunks of a segment: of shorter ones most of the work would be done twice
LAUNCH = 3.5  # chunks that the launch ahead takes as long as: 10 to 15 us on an H200
GAIN = 0.8  # of the time without: what is cut computes more, and takes less time by this at most


class Sizes(NamedTuple):
    """Of a call: sequences, computed heads, tokens of each sequence, blocks for V of a head, multiprocessors. reached:
    chunks in front of a segment that are counted on to reach it."""

    sequences: int
    heads: int
    tokens: int
    parts: int
    sms: int
    reached: int


def segment_count(sizes: Sizes) -> int:
    """Of each sequence: as many as take the least time, of those whose blocks all have an SM of their own, where that
    is less than `GAIN` of the time of whole sequences; 1 otherwise. None is empty."""
    chunks, blocks = -(-sizes.tokens // CHUNK), sizes.sequences * sizes.heads * sizes.parts
    most = min(sizes.sms // blocks, chunks // SHORTEST) if blocks else 1
    if most < 2:
        return 1
    each = -(-chunks // most)
    return -(-chunks // each) if each + sizes.reached + LAUNCH <= GAIN * chunks else 1
