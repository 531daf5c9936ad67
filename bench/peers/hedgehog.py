"""What stands beside Hedgehog's attention: its linear part alone, as fla has it, of q and k in the place of features:
no maps, no softmax, no window, no denominator. (q, k, v, q_map, k_map, linear, window) -> o; of its training, with do
behind them, (o, gradients of q, k and v).
"""

from __future__ import annotations

from collections.abc import Callable

import torch

from bench.peers import common


def fla() -> Callable:
    from fla.ops.linear_attn import chunk_linear_attn

    return lambda q, k, v, *others: chunk_linear_attn(q, k, v, normalize=False)[0]


def training(forward: Callable, tensors: int) -> Callable:
    """Forward and backward of one call, whose first tensors have gradients."""
    @torch.enable_grad()  # the harness calls without
    def step(*given):
        leaves = [x.detach().requires_grad_() for x in given[:tensors]]
        o = forward(*leaves, *given[tensors:7])
        return o.detach(), *torch.autograd.grad(o, leaves, given[7])

    return step


PEERS: dict[str, dict[str, Callable[..., Callable]]] = {
    "hedgehog": {"fla": fla}, "hedgehog_training": {"fla": lambda: training(fla(), 3)},
}

common.PEERS.update(PEERS)
