"""Which configuration a call gets: from the spec."""
from __future__ import annotations

from tkq.linear_attention.config import CHUNK
from tkq.linear_attention.hedgehog.config import HedgehogConfig
from tkq.linear_attention.hedgehog.spec import HedgehogSpec


def plan(spec: HedgehogSpec) -> HedgehogConfig:
    """A warpgroup for each 64 columns of v."""
    groups = spec.head_dim // CHUNK
    return HedgehogConfig(groups, (24, 232, 240) if groups == 1 else (24, 136, 176))


SHORTEST = 8  # chunks of a block at least, of "states" half as many


def segments(heads: int, tokens: int, multiprocessors: int) -> tuple | None:
    """(how many of each sequence, chunks of each, blocks that add up the state of each before), where whole sequences
    leave half of a GPU idle or more; None where they do not. heads: of all sequences, a block each."""
    chunks = -(-tokens // CHUNK)
    count = min(multiprocessors // heads, chunks // SHORTEST)
    if count < 2:
        return None
    finer = max(1, min(multiprocessors // ((count - 1) * heads), 2 * chunks // count // SHORTEST))
    each = finer * -(-chunks // (count * finer))
    return -(-chunks // each), each, finer
