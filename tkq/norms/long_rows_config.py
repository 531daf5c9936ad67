"""The config of a float8 norm of long rows."""
from dataclasses import dataclass

from .config import Config


@dataclass(frozen=True)
class Fp8LongRowsConfig(Config):
    """Of `fp8_long_rows`. min_blocks_per_sm: blocks for which a multiprocessor is to have registers."""

    load: str = "shared"
    min_blocks_per_sm: int = 1
