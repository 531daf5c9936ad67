"""Shared by bench.ops.softmax, bench.ops.cross_entropy and bench.ops.linear_cross_entropy: shapes, inputs, bounds."""

from __future__ import annotations

import torch

from bench.core.shapes import NORM_SHAPES
from bench.peers import common, losses

BF16 = torch.bfloat16
SAMPLE_ROWS = 256
BACKWARD_SHAPES = tuple((min(m, (1 << 29) // n), n) for m, n in NORM_SHAPES if n <= 131072)  # as in the targets
QUICK = ((32768, 1024), (32768, 4096), (16384, 16384), (16384, 65536), (8192, 65536), (8192, 131072), (4096, 131072))
CALL_US, AUTOGRAD_CALL_US = 9.0, 20.0

common.PEERS.update(losses.PEERS)


def randn(i: int, *shape: int) -> torch.Tensor:
    """bf16; a generator of its own: a capture that fails may leave torch's default one unusable."""
    return torch.randn(*shape, device="cuda", dtype=BF16, generator=torch.Generator("cuda").manual_seed(i))


def targets(i: int, m: int, n: int) -> torch.Tensor:
    """int64, none ignored."""
    return torch.randint(n, (m,), device="cuda", generator=torch.Generator("cuda").manual_seed(i))


def ends(m: int) -> tuple[slice, slice]:
    """The rows whose results are looked at."""
    return slice(0, SAMPLE_ROWS), slice(max(0, m - SAMPLE_ROWS), m)
