"""Which launches go by blocks, and which configuration they get."""
from __future__ import annotations

from tkq.linear_attention.blocks.config import BlocksConfig
from tkq.linear_attention.config import CHUNK
from tkq.linear_attention.spec import NARROW, LinearSpec


def by_blocks(spec: LinearSpec, groups: int | None = None) -> bool:
    """Is it the delta rule's forward alone, of two warpgroups of the state, or one of the launches of gradients that
    are to go by blocks, or of segments?"""
    more = spec.reverse or spec.updates or spec.inverse or spec.part or spec.checkpoints
    own = bool(spec.delta) and has_blocks_kernel(spec.head_dim, spec.value_dim)
    return spec.blocks or (own and groups != 1 and not more)


def has_blocks_kernel(head_dim: int, value_dim: int) -> bool:
    """Are these K and V for which there are kernels by blocks?"""
    return head_dim in (CHUNK, NARROW) and value_dim > CHUNK


def plan(spec: LinearSpec) -> BlocksConfig:
    """With gradients there is room for two stages: what was kept is loaded, too."""
    return BlocksConfig(stages=2 if spec.has_x else 3)
