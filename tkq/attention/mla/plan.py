"""From a spec to a config. Pure: neither torch nor the DSL."""
from __future__ import annotations

from .config import MlaConfig
from .spec import MlaSpec


def plan(spec: MlaSpec) -> MlaConfig:
    """One for all."""
    return MlaConfig()
