"""How attention's backward is built where nobody makes zeroes for dQ: pure Python."""
from dataclasses import dataclass

from tkq.attention.backward_grouped_config import GroupedConfig


@dataclass(frozen=True)
class FirstConfig(GroupedConfig):
    """Of ``tkq.attention.backward_first``: its background is empty, but there are no zeroes before."""

    registers: tuple = (24, 72, 208)


@dataclass(frozen=True)
class FinishConfig(FirstConfig):
    """Of ``tkq.attention.backward_first_finish``: the background finishes dQ."""

    registers: tuple = (32, 64, 208)
