"""Sequences of any length one behind the other, for the benches of linear attention and of the delta rule."""

from __future__ import annotations

import torch

SHAPES = ((16, 32768, 32),)  # sequences, tokens of all, heads of v


def cu_seqlens(count: int, tokens: int, device) -> torch.Tensor:
    """(count + 1,) int32: from short sequences to those of one and a half times the mean."""
    return torch.tensor([int(tokens * (i / count)**1.3) for i in range(count + 1)], device=device, dtype=torch.int32)


def judged(cu: torch.Tensor) -> list[slice]:
    """The tokens of the first and of the last sequence."""
    cuts = cu.tolist()
    return [slice(cuts[0], cuts[1]), slice(cuts[-2], cuts[-1])]
