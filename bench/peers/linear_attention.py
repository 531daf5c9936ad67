"""The baselines of linear attention, with tkq's layout: (q, k, v, g) -> o; and of its training, (q, k, v, g, do) ->
(o, gradients of q, k, v and, where it is of tokens, g).

fla: fla.ops.simple_gla of flash-linear-attention, whose gates of heads are called g_gamma; gradients of gates of tokens
by `gated_gradients`. torch.compile: the form in chunks, whose states are a product with the decays between chunks. With
gates of columns, "gla": fla.ops.gla alone.
"""

from __future__ import annotations

from collections.abc import Callable

import torch

from bench.peers import common, gated_gradients
from bench.peers.common import _compiled

CHUNK = 64


def chunked(q, k, v, g):
    """Of lengths that are multiples of 64; g: (H,) or (B, S, H)."""
    scale, dtype = q.shape[-1]**-0.5, q.dtype
    G = (g.expand(*q.shape[:3]) if g.dim() == 1 else g).transpose(1, 2).unflatten(2, (-1, CHUNK)).cumsum(-1)
    q, k, v = (x.transpose(1, 2).unflatten(2, (-1, CHUNK)) for x in (q, k, v))
    total = G[..., -1]
    ends = total.cumsum(-1)
    taken = (k * (total[..., None] - G).exp()[..., None].to(dtype)).mT @ v
    between = _lower((ends - total)[..., :, None] - ends[..., None, :], -1)
    states = (between @ taken.float().flatten(-2)).unflatten(-1, taken.shape[-2:])
    within = _lower(G[..., :, None] - G[..., None, :], 0)
    p = (q @ k.mT * within).to(dtype)
    o = scale * ((q * G.exp()[..., None].to(dtype)) @ states.to(dtype) + p @ v)
    return o.flatten(2, 3).transpose(1, 2)


def _lower(logs, diagonal):
    """Decays of their logarithms, 0 above a diagonal."""
    there = torch.ones(logs.shape[-2:], dtype=torch.bool, device=logs.device).tril(diagonal)
    return logs.masked_fill(~there, -torch.inf).exp()


def fla() -> Callable:
    from fla.ops.simple_gla import chunk_simple_gla

    gated_gradients.allow()
    return lambda q, k, v, g: chunk_simple_gla(q, k, v, **{"g_gamma" if g.dim() == 1 else "g": g})[0]


def fla_columns() -> Callable:
    from fla.ops.gla import chunk_gla

    return lambda q, k, v, g: chunk_gla(q, k, v, g)[0]


def training(forward: Callable) -> Callable:
    """Forward and backward of one call."""
    @torch.enable_grad()  # the harness calls without
    def step(q, k, v, g, do):
        leaves = [x.detach().requires_grad_() for x in (q, k, v, *(() if g.dim() == 1 else (g,)))]
        o = forward(*leaves) if g.dim() > 1 else forward(*leaves, g)
        return o.detach(), *torch.autograd.grad(o, leaves, do)

    return step


def fla_packed() -> Callable:
    """(q, k, v, g, cu_seqlens) -> o."""
    from fla.ops.simple_gla import chunk_simple_gla

    gated_gradients.allow()
    return lambda q, k, v, g, cu: chunk_simple_gla(q, k, v, g=g, cu_seqlens=cu)[0]


def packed_training(forward: Callable) -> Callable:
    """Forward and backward of one call; cu_seqlens and do come last."""
    @torch.enable_grad()  # the harness calls without
    def step(*given):
        *tensors, cu, do = given
        leaves = [x.detach().requires_grad_() for x in tensors]
        o = forward(*leaves, cu)
        return o.detach(), *torch.autograd.grad(o, leaves, do)

    return step


PEERS: dict[str, dict[str, Callable[..., Callable]]] = {
    "linear_attn": {"fla": fla, "torch.compile": lambda: _compiled(chunked)},
    "linear_attn_training": {"fla": lambda: training(fla()), "torch.compile": lambda: training(_compiled(chunked))},
    "gla": {"fla": fla_columns}, "gla_training": {"fla": lambda: training(fla_columns())},
    "linear_attn_packed": {"fla": fla_packed},
    "linear_attn_packed_training": {"fla": lambda: packed_training(fla_packed())},
}

common.PEERS.update(PEERS)
