"""How attention's backward is built where nobody makes zeroes for dQ: pure Python."""
from dataclasses import dataclass

from tkq.attention.backward.gqa_config import GroupedConfig


@dataclass(frozen=True)
class FirstConfig(GroupedConfig):
    """Of ``tkq.attention.backward.dq_first_store``: as ``GroupedConfig``, but its background only finishes dQ."""
