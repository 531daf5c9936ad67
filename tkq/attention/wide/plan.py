"""From what was asked for to how the kernel is built: pure Python, tested without a GPU. No kernel depends on this
file."""
from dataclasses import replace

from tkq.attention.forward.config import SHARED_BYTES
from tkq.attention.wide.config import WideConfig
from tkq.attention.wide.spec import WideSpec
from tkq.runtime.compile.recipe import Recipe

# V slots by the tile's width: an output warpgroup has half of the columns, of which a slot has all or half.
SLOTS = {320: dict(value_keys=32, value_cols=160), 384: dict(value_keys=32, value_cols=192),
         512: dict(scores_in_flight=2)}


def recipe(spec: WideSpec, config: WideConfig) -> Recipe:
    """Of the kernel of a configuration."""
    return Recipe("tkq.attention.wide.kernel:WideForward", (spec.kernel(), config))


def plan(spec: WideSpec, length: str = "medium") -> WideConfig:
    """The configuration, for sequences of any length: as many slots as shared memory has room for."""
    dim = spec.kernel().head_dim
    config = filled(WideConfig(**SLOTS[dim]), dim)
    # Finding a task among sequences takes the producer more registers.
    return (replace(config, registers=(40, 136, 168)) if spec.varlen else config).check(dim)


def filled(config: WideConfig, head_dim: int) -> WideConfig:
    """With as many slots as there is room for."""
    rest = SHARED_BYTES - replace(config, stages=0).shared_bytes(head_dim)
    return replace(config, stages=rest // config.slot_bytes(head_dim))
