"""How `quant_long`'s kernels run. No torch, no DSL."""
from dataclasses import dataclass

from .plan import Config


@dataclass(frozen=True)
class LongConfig(Config):
    """resident: blocks for which a multiprocessor is to have registers."""

    load: str = "shared"
    resident: int = 1
