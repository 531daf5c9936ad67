"""From a spec and sizes to a config and to runs of tokens. Pure: neither torch nor the DSL."""
from __future__ import annotations

from .config import WARP, ConvConfig
from .spec import BITS, ConvSpec

FORWARD_WARPS = 124  # of one SM: several waves of short runs
BACKWARD_WARPS = {False: 16, True: 12}  # as many as fit at once: one wave of long runs; True: packed, or normed heads
SHORTEST = {False: 8, True: 32}  # tokens of a run along channels, whose first and last W - 1 others read, too


def plan(spec: ConvSpec) -> ConvConfig:
    """Along channels the loads of 4 tokens together; a backward's of the next 4 are on their way, too (230.0 us for
    241.1 without), a forward's are not: it took 146.2 us with them, 143.2 without, and with 8 tokens 144.9 (8 sequences
    of 2048 tokens and 8192 channels, an H200; docs/attempts/convolution.md). A backward's blocks along channels are of
    one warp, so that any number of runs is one wave, for which `warps` of them have to fit: without a bias, up
    to width 4, the compiler has to be told, and takes a register less then; wider ones would have to go to memory."""
    if spec.layout == "channels":
        plain = spec.backward and spec.width <= 4 and not (spec.bias or spec.packed or spec.head)
        return ConvConfig(rows=4, warps=1 if spec.backward else 4, blocks=warps(spec) if plain else 0)
    return ConvConfig(rows=2 - spec.backward)


def warps(spec: ConvSpec) -> int:
    """Warps of one SM that have runs."""
    if not spec.backward:
        return FORWARD_WARPS
    return BACKWARD_WARPS[spec.layout == "channels" and bool(spec.packed or spec.head)]


def widest(vector: int, dtype: str, layout: str) -> int:
    """Of the elements that addresses and strides allow in one access, how many are taken: along time 16 bytes, along
    channels 8. With 16 a thread has twice as many numbers in registers, and fewer threads fit on an SM: 8 sequences of
    2048 tokens and 8192 channels took 164.5 us for 148.6, backward 314.5 for 276.9 (an H200)."""
    return vector if layout == "time" else min(vector, 64 // BITS[dtype])


def run_tokens(spec: ConvSpec, batch: int, tokens: int, channels: int, num_sms: int) -> int:
    """Tokens that a warp takes, one after the other (along time: its lanes together): whole groups of loads."""
    if spec.layout == "channels":
        columns, step = batch * -(-channels // (WARP * spec.vector)), plan(spec).rows
        shortest = SHORTEST[spec.backward]
    else:
        columns, step = batch * channels, WARP * spec.vector
        shortest = step
    runs = max(1, min(num_sms * warps(spec) // max(1, columns), -(-tokens // shortest)))
    each = -(-tokens // runs)
    return -(-each // step) * step
