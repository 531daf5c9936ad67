"""Which configuration a call gets: from the spec."""
from __future__ import annotations

from tkq.linear_attention.config import CHUNK
from tkq.linear_attention.hedgehog.config import HedgehogConfig, KeyConfig, QueryConfig, WindowConfig
from tkq.linear_attention.hedgehog.spec import GradientSpec, HedgehogSpec, WindowSpec


def plan(spec: HedgehogSpec) -> HedgehogConfig:
    """A warpgroup for each 64 columns of v."""
    groups = spec.head_dim // CHUNK
    return HedgehogConfig(groups, (24, 232, 240) if groups == 1 else (24, 136, 176))


def window_plan(spec: WindowSpec) -> WindowConfig:
    """The same for all."""
    return WindowConfig()


def query_plan(spec: GradientSpec) -> QueryConfig:
    """Sums of 64 columns leave registers for the sides."""
    return QueryConfig() if spec.head_dim == 2 * CHUNK else QueryConfig((40, 176, 120))


def key_plan(spec: GradientSpec) -> KeyConfig:
    """The same for all."""
    return KeyConfig()


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
