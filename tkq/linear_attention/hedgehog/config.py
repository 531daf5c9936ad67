"""How a kernel of Hedgehog's attention is laid out."""
from __future__ import annotations

from dataclasses import dataclass

WARPS = 4  # of a warpgroup


@dataclass(frozen=True)
class HedgehogConfig:
    """groups: warpgroups of a block that hold 64 rows of the state's V each. registers: of a thread of the producer, of
    the warpgroup of weights and of the state's warpgroups."""

    groups: int = 2
    registers: tuple = (24, 136, 176)


@dataclass(frozen=True)
class WindowConfig:
    """registers: of a thread of the producer, and of the warpgroups of pairs, of queries and of keys."""

    registers: tuple = (24, 208, 96, 184)


@dataclass(frozen=True)
class QueryConfig:
    """registers: of a thread of producer and deltas, of the sides' warpgroups and of the window's."""

    registers: tuple = (32, 192, 96)


@dataclass(frozen=True)
class KeyConfig:
    """registers: of a thread of the producer, of the sides' warpgroups and of that of rows."""

    registers: tuple = (24, 160, 168)
