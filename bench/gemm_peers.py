"""tkq.gemm's peers: cuBLAS through torch, QuACK as it comes and tuned. Only this file and peers.py import them."""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.nn.functional as F

QUACK_NAMES = {"gelu_tanh": "gelu_tanh_approx", "relu": "relu"}  # QuACK's gemm_act knows no silu and no erf


def _quack(tuned: bool) -> Callable:
    def make():
        from quack.gemm_interface import gemm

        return lambda a, b: gemm(a, b, tuned=tuned)

    return make


def _quack_linear(activation: str) -> Callable:
    from quack.gemm_interface import gemm, gemm_act

    if not activation:
        return lambda a, b, bias: gemm(a, b, bias=bias, tuned=False)
    name = QUACK_NAMES[activation]
    return lambda a, b, bias: gemm_act(a, b, bias=bias, activation=name, store_preact=False, tuned=False)[1]


ACTIVATIONS = {"": lambda x: x, "relu": F.relu, "silu": F.silu, "gelu": F.gelu,
               "gelu_tanh": lambda x: F.gelu(x, approximate="tanh")}


def _torch_linear(activation: str) -> Callable:
    act = ACTIVATIONS[activation]
    return lambda a, b, bias: act(torch.addmm(bias, a, b))


def _plain(activation: str) -> Callable:
    """tkq's own product without an epilogue: what a fused one is to cost no more than."""
    import tkq

    return lambda a, b, bias: tkq.gemm(a, b)


PEERS = {
    "gemm": {
        "cuBLAS": lambda: torch.matmul,
        "QuACK": _quack(False),
        "QuACK tuned": _quack(True),
    },
    "gemm_linear": {
        "torch": _torch_linear,
        "QuACK": _quack_linear,
        "plain": _plain,
    },
    "gemm_batched": {"cuBLAS": lambda: torch.bmm},
}
