"""The baselines of Based, with tkq's layout: (q, k, v) -> o, and of its training, (q, k, v, do) -> (o, gradients of q,
k and v).

fla: parallel_based, whose time grows with the square of the length, and fused_chunk_based, of flash-linear-attention.
torch.compile: the form in chunks, over all products of two columns, whose states are a sum over the chunks before.
"""

from __future__ import annotations

from collections.abc import Callable

import torch

from bench.peers import common
from bench.peers.common import _compiled

CHUNK = 64


def fla_parallel() -> Callable:
    from fla.ops.based import parallel_based

    return lambda q, k, v: parallel_based(q, k, v)


def fla_chunks() -> Callable:
    from fla.ops.based import fused_chunk_based

    return lambda q, k, v: fused_chunk_based(q, k, v)


def features(x, scale):
    """1, x, and the products of two columns: their products are the weights."""
    pairs = (x[..., :, None] * x[..., None, :]).flatten(-2)
    return torch.cat((torch.ones_like(x[..., :1]), x * scale**0.5, pairs * (scale / 2**0.5)), -1)


def chunked(q, k, v):
    """Of lengths that are multiples of 64."""
    scale = q.shape[3]**-0.5
    q, k, v = (x.transpose(1, 2).unflatten(2, (-1, CHUNK)) for x in (q, k, v))
    fq, fk = features(q, scale), features(k, scale)
    with_one = torch.cat((v, torch.ones_like(v[..., :1])), -1)
    states = (fk.mT @ with_one).float().cumsum(2)
    before = torch.cat((torch.zeros_like(states[:, :, :1]), states[:, :, :-1]), 2).to(v.dtype)
    s = scale * (q @ k.mT)
    w = (1 + s + s * s / 2).tril()
    o = fq @ before + w @ with_one
    return (o[..., :-1] / o[..., -1:]).flatten(2, 3).transpose(1, 2)


def training(forward: Callable) -> Callable:
    """Forward and backward of one call."""
    @torch.enable_grad()  # the harness calls without
    def step(*given):
        leaves = [x.detach().requires_grad_() for x in given[:3]]
        o = forward(*leaves)
        return o.detach(), *torch.autograd.grad(o, leaves, given[3])

    return step


FORWARDS = {"fla parallel": fla_parallel, "fla chunks": fla_chunks, "torch.compile": lambda: _compiled(chunked)}
PEERS: dict[str, dict[str, Callable[..., Callable]]] = {
    "based": FORWARDS,
    "based_training": {name: lambda make=make: training(make()) for name, make in FORWARDS.items()},
}

common.PEERS.update(PEERS)
