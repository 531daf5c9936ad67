"""Which configuration a call gets: from the spec and the sizes."""
from __future__ import annotations

from tkq.linear_attention.config import LinearConfig
from tkq.linear_attention.spec import LinearSpec


def plan(spec: LinearSpec) -> LinearConfig:
    """As many warpgroups for the state as V fills, two at most; of a wide K one stage less."""
    groups = 1 if spec.value_dim <= 64 or spec.delta else 2
    stages = 2 if spec.head_dim > 128 else 3 if spec.head_dim > 64 else 4
    return LinearConfig(groups, stages, (24, 232, 240) if groups == 1 else (24, 104, 192))
