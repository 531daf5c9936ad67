"""The baselines of norms with options; those of the plain norms are in bench/peers/common.py, except Liger's.

Called as the question says: norms (x, weight, bias); with a residual (x, residual, weight), both results; heads
(x, weight) with x a (B, S, H, D) slice; quantising (x, weight[, bias]), or (x, residual, weight). `plain` is tkq's own
norm that writes x's type: what a quantising one may cost 5 % more than.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.nn.functional as F

import tkq
from bench.peers import liger_cute
from bench.peers.common import LAYER_EPS, RMS_EPS, _compiled, _rmsnorm, copied
from tkq.norms.spec import GROUP

# ---- Liger ---------------------------------------------------------------------------------------------------------


def _liger_rmsnorm() -> Callable:
    from liger_kernel.transformers.functional import liger_rms_norm

    return lambda x, weight, bias: liger_rms_norm(x, weight, RMS_EPS, in_place=False)


def _liger_layernorm() -> Callable:
    from liger_kernel.transformers.functional import liger_layer_norm

    return lambda x, weight, bias: liger_layer_norm(x, weight, bias, LAYER_EPS)


# ---- with a residual -------------------------------------------------------------------------------------------------


def _added(x, residual, weight):
    h = x.float() + residual.float()
    y = h * torch.rsqrt(h.square().mean(-1, keepdim=True) + RMS_EPS) * weight.float()
    return y.to(x.dtype), h.to(residual.dtype)


def _quack_added() -> Callable:
    from quack import rmsnorm

    return lambda x, residual, weight: rmsnorm(x, weight, residual=residual, eps=RMS_EPS, prenorm=True)


def _liger_added() -> Callable:
    from liger_kernel.ops.fused_add_rms_norm import LigerFusedAddRMSNormFunction

    return lambda x, residual, weight: LigerFusedAddRMSNormFunction.apply(
        x, residual, weight, RMS_EPS, 0.0, "llama", False
    )


def _two_copies() -> Callable:
    """Moves the same bytes: two tensors in, two out."""
    return lambda x, residual, weight: (copied(x), copied(residual))


# ---- quantising ------------------------------------------------------------------------------------------------------


def _quantised(granularity: str, kind: str = "rmsnorm") -> Callable:
    """What a model writes, for torch.compile to fuse."""

    def norm(x, weight):
        wide, vector = x.float(), weight.float()
        y = (F.layer_norm(wide, wide.shape[-1:], vector, None, RMS_EPS) if kind == "layernorm" else
             _rmsnorm(wide, vector, None))
        groups = y.unflatten(-1, (-1, GROUP)) if granularity == "1x128" else y.unsqueeze(-2)
        scale = (groups.abs().amax(-1, keepdim=True) / 448.0).clamp_min(2.0**-126)
        q = (groups / scale).to(torch.float8_e4m3fn).flatten(-2)
        return q, scale.squeeze(-1)

    return norm


def _plain(kind: str = "rmsnorm") -> Callable:
    norm = getattr(tkq, kind)
    return lambda x, weight, bias=None: norm(x, weight, bias=bias, eps=RMS_EPS)


def _plain_added() -> Callable:
    return lambda x, residual, weight: tkq.rmsnorm(x, weight, residual=residual, prenorm=True, eps=RMS_EPS)


# ---- heads -----------------------------------------------------------------------------------------------------------


def _heads(x, weight):
    return _rmsnorm(x.float(), None, None).mul(weight.float()).to(x.dtype)


def _quack_heads() -> Callable:
    from quack import rmsnorm

    return lambda x, weight: rmsnorm(x, weight, eps=RMS_EPS)


def _per_head_backward(dy, x, weight, rstd):
    hat = x.float() * rstd.view(*x.shape[:-1], 1)
    g = dy.float() * weight.float()
    dx = (g - hat * (g * hat).mean(-1, keepdim=True)) * rstd.view(*x.shape[:-1], 1)
    return dx.to(x.dtype), (dy.float() * hat).sum((0, 1)).to(weight.dtype)


PEERS: dict[str, dict[str, Callable[..., Callable]]] = liger_cute.added_to({
    "rmsnorm + residual": {
        "copy": _two_copies,
        "QuACK": _quack_added,
        "Liger": _liger_added,
        "torch.compile": lambda: _compiled(_added),
    },
    "rmsnorm_quant row": {"plain": _plain, "torch.compile": lambda: _compiled(_quantised("row"))},
    "rmsnorm_quant 1x128": {"plain": _plain, "torch.compile": lambda: _compiled(_quantised("1x128"))},
    "rmsnorm_quant + bias row": {"plain": _plain},
    "rmsnorm_quant + bias 1x128": {"plain": _plain},
    "layernorm_quant row": {
        "plain": lambda: _plain("layernorm"),
        "torch.compile": lambda: _compiled(_quantised("row", "layernorm")),
    },
    "layernorm_quant 1x128": {"plain": lambda: _plain("layernorm")},
    "layernorm_quant + bias row": {"plain": lambda: _plain("layernorm")},
    "layernorm_quant + bias 1x128": {"plain": lambda: _plain("layernorm")},
    "rmsnorm_quant + residual": {"plain": _plain_added},
    "rmsnorm heads": {
        "copy": lambda: lambda x, weight: copied(x),
        "QuACK": _quack_heads,
        "torch.compile": lambda: _compiled(_heads),
    },
    "rmsnorm heads backward": {
        "add": lambda: lambda dy, x, weight, rstd: torch.add(dy, x),
        "torch.compile": lambda: _compiled(_per_head_backward),
    },
})
LIGER = {"rmsnorm": _liger_rmsnorm, "layernorm": _liger_layernorm}
