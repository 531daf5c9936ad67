"""Which configuration a call gets: from the spec."""
from __future__ import annotations

from tkq.linear_attention.config import CHUNK
from tkq.linear_attention.hedgehog.config import HedgehogConfig
from tkq.linear_attention.hedgehog.spec import HedgehogSpec


def plan(spec: HedgehogSpec) -> HedgehogConfig:
    """A warpgroup for each 64 columns of v."""
    groups = spec.head_dim // CHUNK
    return HedgehogConfig(groups, (24, 232, 240) if groups == 1 else (24, 136, 176))
