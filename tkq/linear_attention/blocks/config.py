"""How the kernel is laid out, and which launches are its."""
from __future__ import annotations

from dataclasses import dataclass

from tkq.linear_attention.config import CHUNK
from tkq.linear_attention.spec import NARROW, LinearSpec


@dataclass(frozen=True)
class BlocksConfig:
    """groups: warpgroups of a block that hold 64 rows of the state's V each. stages: chunks of q, k and v that are
    loaded ahead. registers: of a thread of the producer, of the scores' warpgroup and of the state's. piece: columns of
    the state that are rounded while others are multiplied."""

    groups: int = 2
    stages: int = 3
    registers: tuple = (24, 120, 184)
    piece: int = 32


def by_blocks(spec: LinearSpec, groups: int | None = None) -> bool:
    """Is it the delta rule's forward alone, of two warpgroups of the state? Gradients take whole chunks' inverses, and
    so do segments."""
    more = spec.reverse or spec.updates or spec.inverse or spec.part or spec.checkpoints
    wide = spec.head_dim in (CHUNK, NARROW) and spec.value_dim > CHUNK
    return bool(spec.delta) and wide and groups != 1 and not more


def plan(spec: LinearSpec) -> BlocksConfig:
    """One for all."""
    return BlocksConfig()
