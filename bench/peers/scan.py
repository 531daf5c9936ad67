"""The baselines of tkq.scan, with its layouts: (a, b) -> h of (B, T, C), along channels or tokens, and of training
with dh behind these.

accelerated_scan: its warp kernel, of (B, C, T), tokens contiguous, T a power of two. fla: hgrn's recurrence, whose
factors are logarithms: they are made beforehand, once for each tensor. torch.compile: associative_scan, forward
alone. copy: what moves the bytes, two in and one out; of training those of two passes.
"""

from __future__ import annotations

from collections.abc import Callable

import torch

from bench.peers import common


def accelerated() -> Callable:
    from accelerated_scan.warp import scan

    return lambda a, b: scan(a.mT, b.mT).mT


def hgrn() -> Callable:
    from fla.ops.hgrn import fused_recurrent_hgrn

    logs = {}  # which layers have in the factors' place

    def call(a, b):
        if a.data_ptr() not in logs:
            logs[a.data_ptr()] = a.detach().float().log().to(a.dtype).requires_grad_(a.requires_grad)
        found = fused_recurrent_hgrn(b, logs[a.data_ptr()])
        return found[0] if isinstance(found, tuple) else found

    return call


def in_torch() -> Callable:
    from torch._higher_order_ops.associative_scan import associative_scan

    def join(x, y):
        return x[0] * y[0], x[1] * y[0] + y[1]

    return common._compiled(lambda a, b: associative_scan(join, (a, b), dim=1)[1])


def copy() -> Callable:
    return lambda a, b: a + b


def copy_of_training() -> Callable:
    """Of a and b in and h out; of a, h and dh in, da and db out: as many bytes."""
    return lambda a, b, dh: (a + b, a + b, dh * 1)


def training(forward: Callable) -> Callable:
    """Forward and backward of one call."""
    @torch.enable_grad()  # the harness calls without
    def step(a, b, dh):
        leaves = [x.detach().requires_grad_() for x in (a, b)]
        h = forward(*leaves)
        return h.detach(), *torch.autograd.grad(h, leaves, dh, allow_unused=True)

    return step


PEERS: dict[str, dict[str, Callable[..., Callable]]] = {
    "scan": {"fla": hgrn, "torch.compile": in_torch, "copy": copy},
    "scan_time": {"accelerated_scan": accelerated, "torch.compile": in_torch, "copy": copy},
    "scan_training": {"fla": lambda: training(hgrn()), "copy": copy_of_training},
    "scan_time_training": {"accelerated_scan": lambda: training(accelerated()), "copy": copy_of_training},
}

common.PEERS.update(PEERS)
