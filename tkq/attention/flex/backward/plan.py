"""From what was asked for to how the kernels are built: pure Python."""
from dataclasses import replace

from tkq.attention.backward.config import BackwardConfig
from tkq.attention.backward.plan import _SOFTCAP, SINGLE
from tkq.attention.flex.backward.spec import CaptureSpec, FlexBackwardSpec
from tkq.runtime.compile.recipe import Recipe

_PLANS = {64: replace(SINGLE[64], store_from_registers=False), 128: BackwardConfig(dq_reduce="bulk", ping_pong=True)}


def plan(spec: FlexBackwardSpec, q_block: int = 128) -> BackwardConfig:
    """One task a block, as lists and graphs take registers. q_block: queries of a listed block, of which a tile is no
    more."""
    config = (_SOFTCAP if spec.joint is not None else _PLANS)[spec.width]
    if q_block % config.tile:
        config = replace(config, tile=64)
    return config.check(spec.width)


def recipe(spec: FlexBackwardSpec, config: BackwardConfig) -> Recipe:
    """Of the kernels of a configuration."""
    return Recipe("tkq.attention.flex.backward.kernel:FlexBackward", (spec, config))


def capture_plan(width: int) -> BackwardConfig:
    """Of the kernel that makes gradients of captured tensors."""
    return BackwardConfig(store_from_registers=True).check(width)


def capture_recipe(spec: CaptureSpec, config: BackwardConfig) -> Recipe:
    return Recipe("tkq.attention.flex.backward.captures:CaptureBackward", (spec, config))
