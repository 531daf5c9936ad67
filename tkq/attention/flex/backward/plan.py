"""From what was asked for to how the kernels are built: pure Python."""
from dataclasses import replace

from tkq.attention.backward.config import BackwardConfig
from tkq.attention.backward.plan import SINGLE
from tkq.attention.flex.backward.spec import CaptureSpec, FlexBackwardSpec
from tkq.runtime.compile.recipe import Recipe

_PLANS = {64: replace(SINGLE[64], dkv_parts=4), 128: SINGLE[128]}
# P times a slope takes registers, which at head_dim 64 tiles of 128 queries do not leave
_JOINT = replace(SINGLE[128], ping_pong=True)


def plan(spec: FlexBackwardSpec, q_block: int = 128) -> BackwardConfig:
    """Where dq is asked for, blocks take one task after the other (1.01 to 1.04 of one task a block; helper warps, as
    ``flash_attn`` of causal problems has them, are slower by as much). With a slope they take turns: 1.06 of without.
    q_block: queries of a listed block, of which a tile is no more."""
    config = replace(_JOINT if spec.joint is not None else _PLANS[spec.width], persistent=spec.dq)
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
