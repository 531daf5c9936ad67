"""The config of the backward whose first contributor stores dQ: pure Python."""
from dataclasses import dataclass

from tkq.attention.backward.gqa_config import GqaConfig


@dataclass(frozen=True)
class DqFirstStoreConfig(GqaConfig):
    """Of ``tkq.attention.backward.dq_first_store``: as ``GqaConfig``, but its helper warps only convert dQ."""
