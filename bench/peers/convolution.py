"""The baselines of short convolutions with bias and silu, with tkq's layout: (x, weight, bias) -> y of (B, S, C), of
packed sequences (x, weight, bias, cu_seqlens) -> y, of steps (x, weight, bias, states) -> y, and of training, with dy
behind these.

causal-conv1d: its function on x transposed, of the order in memory in which channels are contiguous; packed sequences
by seq_idx; with numbers, seq_idx stands in cu_seqlens' place. fla: its causal_conv1d. torch: conv1d of the transposed,
padded at both ends and cut. Normed heads: these, and an l2 norm of the first half behind them, fla's for fla and
causal-conv1d, PyTorch's for torch; what comes out are the normed heads and, as a view, the rest. copy: what moves the
bytes of x and y, of training those of five such tensors.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.nn.functional as F

from bench.peers import common
from bench.peers.common import copied


def package() -> Callable:
    from causal_conv1d import causal_conv1d_fn

    return lambda x, weight, bias: causal_conv1d_fn(x.mT, weight, bias, activation="silu").mT


def package_packed() -> Callable:
    from causal_conv1d import causal_conv1d_fn

    numbers = {}  # of sequences, which models have beside cu_seqlens: made once

    def call(x, weight, bias, cu):
        if cu.data_ptr() not in numbers:
            place = torch.arange(x.shape[1], device=x.device)
            numbers[cu.data_ptr()] = (torch.searchsorted(cu, place, right=True) - 1).int()[None]
        return causal_conv1d_fn(x.mT, weight, bias, seq_idx=numbers[cu.data_ptr()], activation="silu").mT

    return call


def package_numbered() -> Callable:
    from causal_conv1d import causal_conv1d_fn

    return lambda x, weight, bias, numbers: causal_conv1d_fn(x.mT, weight, bias, seq_idx=numbers, activation="silu").mT


def fla_norm() -> Callable:
    from fla.modules.l2norm import l2norm

    return l2norm


def torch_norm() -> Callable:
    return lambda x: (x.float() * (x.float().square().sum(-1, keepdim=True) + 1e-6).rsqrt()).to(x.dtype)


def parts(y) -> tuple:
    """The heads that are normed, (B, S, H, 128) of the first half of the channels, and the rest."""
    half = y.shape[2] // 2
    return y[..., :half].unflatten(-1, (-1, 128)), y[..., half:]


def normed(make: Callable, make_norm: Callable) -> Callable:
    """The `parts` of what a forward gives, the heads with their l2 norm: a model takes them apart, and copies none."""
    forward, norm = make(), make_norm()

    def call(x, weight, bias):
        heads, rest = parts(forward(x, weight, bias))
        return norm(heads), rest

    return call


def package_step() -> Callable:
    from causal_conv1d import causal_conv1d_update

    return lambda x, weight, bias, states: causal_conv1d_update(x, states, weight, bias, activation="silu")


def fla() -> Callable:
    from fla.modules.convolution import causal_conv1d

    return lambda x, weight, bias: causal_conv1d(x, weight, bias, activation="silu")[0]


def fla_packed() -> Callable:
    from fla.modules.convolution import causal_conv1d

    return lambda x, weight, bias, cu: causal_conv1d(x, weight, bias, activation="silu", cu_seqlens=cu)[0]


def in_torch(x, weight, bias):
    ahead = weight.shape[1] - 1
    return F.silu(F.conv1d(x.mT, weight[:, None], bias, padding=ahead, groups=x.shape[2])[..., :x.shape[1]]).mT


def copy_of_training() -> Callable:
    """Two passes, of x in and y out, and of x and dy in and dx out."""
    return lambda x, weight, bias, *others: (copied(x), x + others[-1])


def training(forward: Callable) -> Callable:
    """Forward and backward of one call."""
    @torch.enable_grad()  # the harness calls without
    def step(*given):
        leaves = [x.detach().requires_grad_() for x in given[:3]]
        y = forward(*leaves, *given[3:-1])
        apart = isinstance(y, tuple)
        gradients = torch.autograd.grad(y, leaves, parts(given[-1]) if apart else given[-1])
        return tuple(part.detach() for part in y) if apart else y.detach(), *gradients

    return step


def _trained(forwards):
    return {name: lambda make=make: training(make()) for name, make in forwards.items()} | {"copy": copy_of_training}


_FORWARD = {"causal-conv1d": package, "fla": fla, "torch": lambda: in_torch}
_NORMED = {name: lambda make=make, norm=torch_norm if name == "torch" else fla_norm: normed(make, norm)
           for name, make in _FORWARD.items()}
_PACKED = {"causal-conv1d": package_packed, "fla": fla_packed}
PEERS: dict[str, dict[str, Callable[..., Callable]]] = {
    "convolution": {**_FORWARD, "copy": lambda: lambda x, weight, bias: copied(x)},
    "convolution_training": _trained(_FORWARD),
    "convolution_packed": {**_PACKED, "copy": lambda: lambda x, weight, bias, cu: copied(x)},
    "convolution_packed_training": _trained(_PACKED),
    "convolution_numbered": {"causal-conv1d": package_numbered,
                             "copy": lambda: lambda x, weight, bias, numbers: copied(x)},
    "convolution_numbered_training": _trained({"causal-conv1d": package_numbered}),
    "convolution_normed": {**_NORMED, "copy": lambda: lambda x, weight, bias: copied(x)},
    "convolution_normed_training": _trained(_NORMED),
    "convolution_step": {"causal-conv1d": package_step, "copy": lambda: lambda x, weight, bias, states: copied(states)},
}

common.PEERS.update(PEERS)
