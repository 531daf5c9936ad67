"""The baselines of Mamba-2's state space dual, with tkq's layout: (x, dt, A, B, C, D, dt_bias) -> y; and of its
training, (x, dt, A, B, C, D, dt_bias, dy) -> (y, gradients of x, dt, A, B, C, D and dt_bias). D and dt_bias may be
None; dt is softplus(dt + dt_bias) where there is a bias.

mamba_ssm: mamba_chunk_scan_combined with chunks of 256. torch.compile: the form in chunks, whose states are a product
with the decays between chunks.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch.nn.functional import softplus

from bench.peers import common
from bench.peers.common import _compiled
from bench.peers.linear_attention import chunked


def compiled() -> Callable:
    """Of lengths that are multiples of 64."""
    def ssd(x, dt, A, B, C, D, dt_bias):
        d = dt.float() if dt_bias is None else softplus(dt.float() + dt_bias)
        B, C = (t.expand(-1, -1, x.shape[2], -1) if t.shape[2] == 1 else t for t in (B, C))
        y = chunked(C * C.shape[-1]**0.5, B, (x * d[..., None]).to(x.dtype), d * A)
        return (y if D is None else y + D[:, None] * x).to(x.dtype)

    return _compiled(ssd)


def mamba_ssm() -> Callable:
    from mamba_ssm.ops.triton.ssd_combined import mamba_chunk_scan_combined

    def ssd(x, dt, A, B, C, D, dt_bias):
        return mamba_chunk_scan_combined(x, dt, A, B, C, 256, D=D, dt_bias=dt_bias, dt_softplus=dt_bias is not None)

    return ssd


def training(forward: Callable) -> Callable:
    """Forward and backward of one call."""
    @torch.enable_grad()  # the harness calls without
    def step(*given):
        leaves = [None if x is None else x.detach().requires_grad_() for x in given[:7]]
        y = forward(*leaves)
        return y.detach(), *torch.autograd.grad(y, [x for x in leaves if x is not None], given[7])

    return step


PEERS: dict[str, dict[str, Callable[..., Callable]]] = {
    "mamba2_ssd": {"mamba_ssm": mamba_ssm, "torch.compile": compiled},
    "mamba2_ssd_training": {"mamba_ssm": lambda: training(mamba_ssm()), "torch.compile": lambda: training(compiled())},
}

common.PEERS.update(PEERS)
