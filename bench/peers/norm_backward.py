"""The baselines of the norms' backward. Called as (dy, x, weight, rstd, mean): dx, dweight and, of layernorm, dbias.

rstd and mean are given to everyone; bench/peers/common.py lists what is here. Each is made by a function that imports
it."""

from __future__ import annotations

from collections.abc import Callable

import torch

from bench.peers import liger_cute


def _add() -> Callable:
    """The roof: two tensors in and one out, nothing computed."""
    return lambda dy, x, weight, rstd, mean: torch.add(dy, x)


# ---- rmsnorm ---------------------------------------------------------------------------------------------------------


def _rmsnorm_backward(dy, x, weight, rstd, mean):
    hat = x.float() * rstd[:, None]
    g = dy.float() * weight.float()
    dx = (g - hat * (g * hat).mean(-1, keepdim=True)) * rstd[:, None]
    return dx.to(x.dtype), (dy.float() * hat).sum(0).to(weight.dtype)


def _torch_rmsnorm_backward() -> Callable:
    def backward(dy, x, weight, rstd, mean):
        return torch.ops.aten._fused_rms_norm_backward(dy, x, [x.shape[1]], rstd[:, None], weight, [True, True])

    return backward


def _quack_rmsnorm_backward() -> Callable:
    from quack.rmsnorm import rmsnorm_bwd

    return lambda dy, x, weight, rstd, mean: rmsnorm_bwd(x, weight, dy, rstd)[:2]


def _liger_rmsnorm_backward() -> Callable:
    """Not in place: that would overwrite dy, which the others read too."""
    from liger_kernel.ops.rms_norm import _CASTING_MODE_LLAMA, rms_norm_backward
    from liger_kernel.ops.utils import calculate_settings

    def backward(dy, x, weight, rstd, mean):
        block, warps = calculate_settings(x.shape[1])
        return rms_norm_backward(dy, x, weight, rstd, 0.0, _CASTING_MODE_LLAMA.value, block, warps, False, None)

    return backward


# ---- layernorm -------------------------------------------------------------------------------------------------------


def _layernorm_backward(dy, x, weight, rstd, mean):
    hat = (x.float() - mean[:, None]) * rstd[:, None]
    g = dy.float() * weight.float()
    dx = (g - g.mean(-1, keepdim=True) - hat * (g * hat).mean(-1, keepdim=True)) * rstd[:, None]
    return dx.to(x.dtype), (dy.float() * hat).sum(0).to(weight.dtype), dy.float().sum(0).to(weight.dtype)


def _torch_layernorm_backward() -> Callable:
    def backward(dy, x, weight, rstd, mean):
        return torch.ops.aten.native_layer_norm_backward(
            dy, x, [x.shape[1]], mean[:, None], rstd[:, None], weight, weight, [True, True, True]
        )

    return backward


def _quack_layernorm_backward() -> Callable:
    from quack.rmsnorm import layernorm_bwd  # weight must be float32

    return lambda dy, x, weight, rstd, mean: layernorm_bwd(x, weight, dy, rstd, mean, True)


def _liger_layernorm_backward() -> Callable:
    from liger_kernel.ops.layer_norm import layer_norm_backward

    return lambda dy, x, weight, rstd, mean: layer_norm_backward(dy, x, weight, weight, mean, rstd)


def _compiled(function: Callable) -> Callable:
    def make():
        from bench.peers.common import _compiled as compiled

        return compiled(function)

    return make


PEERS: dict[str, dict[str, Callable[..., Callable]]] = liger_cute.added_to({
    "rmsnorm_backward": {
        "add": _add,
        "QuACK": _quack_rmsnorm_backward,
        "Liger": _liger_rmsnorm_backward,
        "torch": _torch_rmsnorm_backward,
        "torch.compile": _compiled(_rmsnorm_backward),
    },
    "layernorm_backward": {
        "add": _add,
        "QuACK": _quack_layernorm_backward,
        "Liger": _liger_layernorm_backward,
        "torch": _torch_layernorm_backward,
        "torch.compile": _compiled(_layernorm_backward),
    },
})
