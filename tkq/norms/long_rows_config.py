"""A config with one number more, apart from the plan that chooses: which is chosen makes no kernel anew."""
from dataclasses import dataclass

from .config import Config


@dataclass(frozen=True)
class LongConfig(Config):
    """Of `fp8_long_rows`. resident: blocks for which a multiprocessor is to have registers."""

    load: str = "shared"
    resident: int = 1
