"""The baselines, each in its best configuration. Only this file and norm_backward.py
import them.

A peer is made by a function that imports what it needs and returns a callable with tkq's layout: attention (q, k, v) of
(B, S, H, D) -> (B, S, H, D); norms (x, weight, bias) with x (M, N) -> (M, N); gemm (a, b) -> a @ b.
Layouts are bridged by views: no peer is charged for a copy that is not its own. `find` returns the peers that are
installed and says why the others are not.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence

import torch
import torch.nn.functional as F

from bench.peers import norm_backward

RMS_EPS, LAYER_EPS = 1e-6, 1e-5
os.environ.setdefault("FLASH_ATTENTION_CUTE_DSL_CACHE_ENABLED", "1")  # FA4 keeps what it compiles, as all do
os.environ.setdefault("TRITON_CACHE_AUTOTUNING", "1")  # peers in Triton keep what they choose
for _other in ("FLA_FLASH_QLA", "FLA_FLASH_KDA"):  # "fla" are fla's own kernels, also where it would take these
    os.environ.setdefault(_other, "0")


def find(op: str, names: Sequence[str], **options) -> tuple[dict[str, Callable], dict[str, str]]:
    """The named peers of an operation as callables, and the missing ones with the reason.

    op: a key of `PEERS`; options go to every maker (attention: causal).
    """
    found, missing = {}, {}
    for name in names:
        try:
            found[name] = PEERS[op][name](**options)
        except Exception as problem:  # not installed, or installed and broken: either way it is not there
            missing[name] = f"{type(problem).__name__}: {str(problem)[:200]}"
    return found, missing


def _compiled(function: Callable, mode: str | None = None) -> Callable:
    """torch.compile for one static shape; earlier shapes are forgotten, so that no recompile limit is met."""
    torch._dynamo.reset()
    return torch.compile(function, dynamic=False, fullgraph=True, mode=mode)


# ---- attention ---------------------------------------------------------------------------------------------------


def _sdpa(q, k, v, causal):
    q, k, v = (x.transpose(1, 2) for x in (q, k, v))
    return F.scaled_dot_product_attention(q, k, v, is_causal=causal, enable_gqa=q.shape[1] != k.shape[1]).transpose(
        1, 2
    )


def _sdpa_backend(backend: str) -> Callable:
    def make(causal: bool) -> Callable:
        from torch.nn.attention import SDPBackend, sdpa_kernel

        chosen = getattr(SDPBackend, backend)

        def attention(q, k, v):
            with sdpa_kernel(chosen):
                return _sdpa(q, k, v, causal)

        return attention

    return make


def _torch_attention(causal: bool) -> Callable:
    return lambda q, k, v: _sdpa(q, k, v, causal)


def _compiled_attention(causal: bool) -> Callable:
    return _compiled(_torch_attention(causal))


def _flash_attention_4(causal: bool) -> Callable:
    from flash_attn.cute import flash_attn_func

    def attention(q, k, v):
        result = flash_attn_func(q, k, v, causal=causal)
        return result[0] if isinstance(result, tuple) else result

    return attention


# ---- norms -------------------------------------------------------------------------------------------------------


def copied(x):
    """x, by an elementwise kernel. copy_ becomes a memcpy in a CUDA graph: 2436 GB/s beyond 1 GB on an H100, where an
    elementwise kernel has 3027."""
    return x * 1


def _copy() -> Callable:
    """The roof of everything memory bound: it moves the bytes of x in and out."""
    return lambda x, weight, bias: copied(x)


def _rmsnorm(x, weight, bias):
    y = F.rms_norm(x, x.shape[-1:], weight, RMS_EPS)
    return y if bias is None else y + bias


def _layernorm(x, weight, bias):
    return F.layer_norm(x, x.shape[-1:], weight, bias, LAYER_EPS)


def _quack_rmsnorm() -> Callable:
    from quack import rmsnorm

    return lambda x, weight, bias: rmsnorm(x, weight, bias, eps=RMS_EPS)


def _quack_layernorm() -> Callable:
    from quack.rmsnorm import layernorm_fwd  # weight and bias must be float32

    return lambda x, weight, bias: layernorm_fwd(x, weight, bias, eps=LAYER_EPS)


# ---- gemm --------------------------------------------------------------------------------------------------------

AUTOTUNED = "max-autotune-no-cudagraphs"

PEERS: dict[str, dict[str, Callable[..., Callable]]] = {
    "attention": {
        "FA4": _flash_attention_4,
        "cuDNN": _sdpa_backend("CUDNN_ATTENTION"),
        "flash SDPA": _sdpa_backend("FLASH_ATTENTION"),
        "torch": _torch_attention,
        "torch.compile": _compiled_attention,
    },
    "rmsnorm": {
        "copy": _copy,
        "QuACK": _quack_rmsnorm,
        "torch": lambda: _rmsnorm,
        "torch.compile": lambda: _compiled(_rmsnorm),
        "torch.compile autotuned": lambda: _compiled(_rmsnorm, AUTOTUNED),
    },
    "layernorm": {
        "copy": _copy,
        "QuACK": _quack_layernorm,
        "torch": lambda: _layernorm,
        "torch.compile": lambda: _compiled(_layernorm),
        "torch.compile autotuned": lambda: _compiled(_layernorm, AUTOTUNED),
    },
    "gemm": {
        "cuBLAS": lambda: torch.matmul,
        "torch.compile autotuned": lambda: _compiled(torch.matmul, AUTOTUNED),
    },
    **norm_backward.PEERS,
}
