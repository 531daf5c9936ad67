"""From a spec to a config. Pure: neither torch nor the DSL."""
from __future__ import annotations

from .config import MlaConfig
from .spec import MlaSpec


def plan(spec: MlaSpec) -> MlaConfig:
    """Q and two tiles of keys are 216 KB: all that shared memory has room for."""
    return MlaConfig()
