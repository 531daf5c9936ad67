"""The baselines of long convolutions: (u, k) -> y of u (B, H, L) in bf16 and k (H, L) in float32, and of training, with
dy behind these.

torch: rfft and irfft in float32, of twice as many points where causal. FlashFFTConv: its module, causal alone. copy:
what moves the bytes of u and y, of training those of five such tensors.
"""

from __future__ import annotations

from collections.abc import Callable

import torch

from bench.peers import common
from bench.peers.common import copied


def in_torch(u, k, times=2):
    """times: points of the transform for each token."""
    points = times * u.shape[-1]
    spectrum = torch.fft.rfft(u.float(), points) * torch.fft.rfft(k, points)
    return torch.fft.irfft(spectrum, points)[..., :u.shape[-1]].to(u.dtype)


def package() -> Callable:
    from flashfftconv import FlashFFTConv

    modules = {}  # by the number of points, for which each makes its tables

    def call(u, k):
        points = 2 * u.shape[-1]
        if points not in modules:
            modules[points] = FlashFFTConv(points, dtype=u.dtype).to(u.device)
        return modules[points](u, k)

    return call


def training(forward: Callable) -> Callable:
    """Forward and backward of one call."""
    @torch.enable_grad()  # the harness calls without
    def step(u, k, dy):
        leaves = [x.detach().requires_grad_() for x in (u, k)]
        y = forward(*leaves)
        return y.detach(), *torch.autograd.grad(y, leaves, dy)

    return step


PEERS: dict[str, dict[str, Callable[..., Callable]]] = {
    "fft_conv": {"FlashFFTConv": package, "torch": lambda: in_torch, "copy": lambda: lambda u, k: copied(u)},
    "fft_conv_training": {"FlashFFTConv": lambda: training(package()), "torch": lambda: training(in_torch),
                          "copy": lambda: lambda u, k, dy: (copied(u), u + dy)},
    "fft_conv_circular": {"torch": lambda: lambda u, k: in_torch(u, k, 1), "copy": lambda: lambda u, k: copied(u)},
}

common.PEERS.update(PEERS)
