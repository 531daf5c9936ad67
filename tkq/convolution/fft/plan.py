"""From a spec and sizes to a config and to a grid. Pure: neither torch nor the DSL."""
from __future__ import annotations

from .config import FftConfig
from .spec import BLOCKS, COLS, MOST_POINTS, MOST_TOKENS, ROWS, TRANSFORM_ROWS, FftSpec

SMS = 132
WHOLE = FftConfig(4)  # of a whole sequence


def plan(spec: FftSpec, batch: int) -> FftConfig:
    """As many warpgroups as there are tiles of a head, up to a few: in registers 3 (where there is room for a fourth,
    it is 0.81 to 0.96 as fast), others 2. A whole sequence takes 4."""
    if spec.whole:
        return WHOLE
    return FftConfig(min(3 if spec.in_registers else 2, max(1, tiles_of(spec, batch))))


def gradient_plan(spec: FftSpec, batch: int) -> FftConfig:
    """Of the filter's gradient: as `plan`, up to two warpgroups."""
    return FftConfig(min(2, tiles_of(spec, batch)))


def tiles_of(spec: FftSpec, batch: int) -> int:
    """Of a head's sequences."""
    return -(-batch // spec.sequences)


def splits_of(spec: FftSpec, config: FftConfig, batch: int, heads: int) -> int:
    """Blocks among which a head's tiles are divided: more than one where heads alone leave SMs without work."""
    groups = -(-tiles_of(spec, batch) // config.warpgroups)
    return max(1, min(groups, SMS // max(1, heads)))


def transform_rows(tokens: int, causal: bool, split: bool = False) -> int | None:
    """Rows of the transforms for sequences of that many tokens, the fewest that will do; None where these are so many
    that a transform takes several passes (`long`): split, where they are more than one block. Not causal: of one of as
    many points; where there is none, of causal ones of the sequences written twice; or of two, in several passes."""
    if not causal:
        return tokens // COLS if has_transform(tokens) else transform_rows(2 * tokens, True, split)
    if tokens > (1 if split else BLOCKS[-1]) * MOST_POINTS:
        return None
    return next((rows for rows in TRANSFORM_ROWS if COLS * rows >= tokens), ROWS)


def twice(tokens: int) -> bool:
    """Are circular ones, of which there is no transform, causal ones of the sequences written twice? Of more tokens
    they are the sum of two convolutions (`long.circular`)."""
    return 2 * tokens <= MOST_TOKENS


def blocks_of(tokens: int, causal: bool) -> int:
    """Blocks that the kernel for sequences of that many tokens has room for."""
    return next(n for n in BLOCKS if not causal or tokens <= n * MOST_POINTS)


def has_transform(tokens: int) -> bool:
    """Is there a transform of exactly as many points?"""
    return tokens in [COLS * rows for rows in TRANSFORM_ROWS]
