"""From a spec and sizes to a config and to runs of tokens. Pure: neither torch nor the DSL."""
from __future__ import annotations

from .config import WARP, ConvConfig
from .spec import ConvSpec

SMS = 132
FORWARD_WARPS, BACKWARD_WARPS = 48, 16  # of one SM, whose work is one wave or a few
SHORTEST = 16  # tokens of a run along channels: the first W - 1 of its inputs are read by the run before, too


def plan(spec: ConvSpec) -> ConvConfig:
    return ConvConfig(rows=4 if spec.layout == "channels" else 1)


def widest(spec_vector: int, backward: bool, dtype: str, layout: str) -> int:
    """Of the elements that addresses and strides allow in one access, how many are taken. A thread of the backward
    along channels has 2 W + 4 numbers of each channel in registers, so that it takes 8 bytes of x at a time."""
    most = {"bf16": 4, "fp16": 4, "fp32": 2}[dtype] if backward and layout == "channels" else 8
    return min(spec_vector, most)


def run_tokens(spec: ConvSpec, batch: int, tokens: int, channels: int) -> int:
    """Tokens that a warp takes, one after the other (along time: its lanes together)."""
    wanted = SMS * (BACKWARD_WARPS if spec.backward else FORWARD_WARPS)
    if spec.layout == "channels":
        columns = batch * -(-channels // (WARP * spec.vector))
        step, shortest = 1, SHORTEST * (4 if spec.backward else 2)
    else:
        columns, step, shortest = batch * channels, WARP * spec.vector, WARP * spec.vector
    runs = max(1, min(wanted // max(1, columns), -(-tokens // shortest)))
    each = -(-tokens // runs)
    return max(step, -(-each // step) * step)
