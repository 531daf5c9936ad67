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
    """Is it the delta rule's forward alone, of two warpgroups of the state, or one of the launches of gradients that
    are to go by blocks, or of segments?"""
    more = spec.reverse or spec.updates or spec.inverse or spec.part or spec.checkpoints
    return spec.blocks or (bool(spec.delta) and wide(spec.head_dim, spec.value_dim) and groups != 1 and not more)


def wide(head_dim: int, value_dim: int) -> bool:
    """Are these K and V for which there are kernels by blocks?"""
    return head_dim in (CHUNK, NARROW) and value_dim > CHUNK


def plan(spec: LinearSpec) -> BlocksConfig:
    """With gradients there is room for two stages: what was kept is loaded, too."""
    return BlocksConfig(stages=2 if spec.has_x else 3)
