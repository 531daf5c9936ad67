"""From what was asked for to how the kernels are built: pure Python."""
from dataclasses import replace

from tkq.attention.backward.config import BackwardConfig
from tkq.attention.backward.plan import SINGLE
from tkq.attention.flex.backward.spec import CaptureSpec, FlexBackwardSpec
from tkq.runtime.compile.recipe import Recipe

# At 256 the producer, which reads lists, needs the more registers
_PLANS = {64: replace(SINGLE[64], dkv_parts=4), 128: SINGLE[128],
          256: replace(SINGLE[256], registers=(32, 64, 208, 208))}
# P times a slope takes registers, which at head_dim 64 tiles of 128 queries do not leave. At 256 it goes in fp32
_JOINT = {**dict.fromkeys((64, 128), replace(SINGLE[128], ping_pong=True)),
          256: replace(SINGLE[256], registers=(32, 64, 216, 200), p_stages=1, p_bytes=4)}
# Of captured tensors' gradients: V, K and two tiles of Q and dO of 256 columns leave no room for more keys
_CAPTURES = BackwardConfig(store_from_registers=True)
_CAPTURES_WIDE = replace(SINGLE[256], store_from_registers=True)


def plan(spec: FlexBackwardSpec, q_block: int = 128) -> BackwardConfig:
    """Up to 128 columns, where dq is asked for, blocks take one task after the other (1.01 to 1.04 of one task a block;
    helper warps, as ``flash_attn`` of causal problems has them, are slower by as much). With a slope they take turns:
    1.06 of without. q_block: queries of a listed block, of which a tile is no more."""
    config = (_JOINT if spec.joint is not None else _PLANS)[spec.width]
    if spec.width <= 128:
        config = replace(config, persistent=spec.dq)
    if q_block % config.tile:
        config = replace(config, tile=64)
    return config.check(spec.width)


def recipe(spec: FlexBackwardSpec, config: BackwardConfig) -> Recipe:
    """Of the kernels of a configuration."""
    return Recipe("tkq.attention.flex.backward.kernel:FlexBackward", (spec, config))


def capture_plan(width: int) -> BackwardConfig:
    """Of the kernel that makes gradients of captured tensors."""
    return (_CAPTURES if width <= 128 else _CAPTURES_WIDE).check(width)


def capture_recipe(spec: CaptureSpec, config: BackwardConfig) -> Recipe:
    return Recipe("tkq.attention.flex.backward.captures:CaptureBackward", (spec, config))
