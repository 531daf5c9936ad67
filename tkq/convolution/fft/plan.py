"""From a spec and sizes to a config and to a grid. Pure: neither torch nor the DSL."""
from __future__ import annotations

from .config import FftConfig
from .spec import COLS, TRANSFORM_ROWS, FftSpec

SMS = 132


def plan(spec: FftSpec, batch: int) -> FftConfig:
    """As many warpgroups as there are tiles of a head, up to 3: a fourth would leave each thread too few registers."""
    return FftConfig(min(3, max(1, tiles_of(spec, batch))))


def tiles_of(spec: FftSpec, batch: int) -> int:
    """Of a head's sequences."""
    return -(-batch // (2 * spec.pairs))


def splits_of(spec: FftSpec, config: FftConfig, batch: int, heads: int) -> int:
    """Blocks among which a head's tiles are divided: more than one where heads alone leave SMs without work."""
    groups = -(-tiles_of(spec, batch) // config.warpgroups)
    return max(1, min(groups, SMS // max(1, heads)))


def transform_rows(tokens: int, causal: bool) -> int | None:
    """Rows of the smallest transform for sequences of that many tokens, None where none is large enough. Not causal:
    one of as many points; where there is none, a causal one of the sequences written twice."""
    if not causal and whole(tokens):
        return tokens // COLS
    needed = 2 * tokens if causal else 4 * tokens
    return next((rows for rows in TRANSFORM_ROWS if COLS * rows >= needed), None)


def whole(tokens: int) -> bool:
    """Is there a transform of exactly as many points?"""
    return tokens in [COLS * rows for rows in TRANSFORM_ROWS]
