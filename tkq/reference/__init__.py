"""Every op in plain PyTorch: what it means. The path of CPU tensors, and the oracle of the tests.

Computed in float32 (float64 stays float64), rounded once at the end. Clear rather than fast.
"""
import importlib
from typing import Optional

import torch
from torch import Tensor

from tkq import names as _names
from tkq.reference.attention import flash_attn, flash_attn_varlen, visible
from tkq.reference.dense import gemm
from tkq.reference.precision import _upcast

_OF_OTHERS = {"fp8_gemm": "tkq.reference.fp8", "quantize_fp8": "tkq.reference.fp8",
              "grouped_gemm": "tkq.reference.grouped"}
_FUNCTIONS = (*_OF_OTHERS, "flash_attn", "flash_attn_varlen", "gemm", "layernorm", "rmsnorm",
              "visible")
_MODULES = ("convolution", "flex", "linear_attention", "losses", "norms", "pointwise")


def __getattr__(name):
    if name in _OF_OTHERS:  # with its first use: a norm does not wait for float8
        return getattr(importlib.import_module(_OF_OTHERS[name]), name)
    if name in _MODULES:
        return importlib.import_module(f"tkq.reference.{name}")
    raise _names.unknown("tkq.reference", name, (*_FUNCTIONS, *_MODULES))


def __dir__():
    return _names.listed(globals(), (*_FUNCTIONS, *_MODULES))


def rmsnorm(x: Tensor, weight: Optional[Tensor] = None, bias: Optional[Tensor] = None, eps: float = 1e-6) -> Tensor:
    """x / sqrt(mean(x^2) + eps) * weight + bias over the last dimension (Zhang and Sennrich, 2019)."""
    w = _upcast(x)
    y = w * torch.rsqrt(w.square().mean(-1, keepdim=True) + eps)
    return _affine(y, weight, bias).to(x.dtype)


def layernorm(x: Tensor, weight: Optional[Tensor] = None, bias: Optional[Tensor] = None, eps: float = 1e-5) -> Tensor:
    """(x - mean) / sqrt(var + eps) * weight + bias over the last dimension, var the mean of (x - mean)^2 (Ba et al.,
    2016)."""
    w = _upcast(x)
    mean = w.mean(-1, keepdim=True)
    mean = mean + (w - mean).mean(-1, keepdim=True)  # what rounding left in it: see norms
    centred = w - mean
    y = centred * torch.rsqrt(centred.square().mean(-1, keepdim=True) + eps)
    return _affine(y, weight, bias).to(x.dtype)


def _affine(y, weight, bias):
    y = y if weight is None else y * weight.to(y.dtype)
    return y if bias is None else y + bias.to(y.dtype)
