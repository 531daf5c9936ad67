"""From what was asked for to how the kernels are built: pure Python."""
from dataclasses import replace

from tkq.attention.backward.config import BackwardConfig
from tkq.attention.backward.plan import _HELPER_WARPS, _SOFTCAP, SINGLE
from tkq.attention.flex.backward.spec import CaptureSpec, FlexBackwardSpec
from tkq.runtime.compile.recipe import Recipe

_PLANS = {64: replace(_HELPER_WARPS[64], dkv_parts=4), 128: replace(_HELPER_WARPS[128], ping_pong=False)}
# with store_from_registers none of the values that are needed for each tile is on the stack
_JOINT = {64: _SOFTCAP[64], 128: replace(_SOFTCAP[128], store_from_registers=True)}


def plan(spec: FlexBackwardSpec, q_block: int = 128, group: int = 1) -> BackwardConfig:
    """With helper warps, as ``flash_attn`` of causal problems but without its ping-pong, where dq is asked for and each
    K/V head has one query head; where not, or with a slope, which takes registers, one task a block. q_block: queries
    of a listed block, of which a tile is no more. group: query heads that share a K/V head."""
    config = (_JOINT if spec.joint is not None else _PLANS if spec.dq and group == 1 else SINGLE)[spec.width]
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
