"""Which configuration a call gets: from the spec."""
from __future__ import annotations

from tkq.linear_attention.config import CHUNK
from tkq.linear_attention.hedgehog.config import FeatureConfig, HedgehogConfig
from tkq.linear_attention.hedgehog.spec import FeatureSpec, HedgehogSpec


def plan(spec: HedgehogSpec) -> HedgehogConfig:
    """A warpgroup for each 64 columns of v."""
    groups = spec.head_dim // CHUNK
    return HedgehogConfig(groups, (24, 232, 240) if groups == 1 else (24, 136, 176))


def feature_plan(spec: FeatureSpec) -> FeatureConfig:
    """A state of 64 columns leaves registers for the gradients, which take as many of both sizes."""
    return FeatureConfig() if spec.head_dim == 2 * CHUNK else FeatureConfig((24, 128, 232))
