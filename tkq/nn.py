"""Modules that take the place of torch.nn's: the same constructor arguments, parameters and state-dict names.

They are subclasses of torch's, so `isinstance`, `reset_parameters`, `extra_repr`, `state_dict` and pickles are theirs.
"""
from typing import Optional

import torch
from torch import Tensor, nn

from .norms.ops import layernorm, rmsnorm
from .runtime.check import under_autocast

__all__ = ["CrossEntropyLoss", "LayerNorm", "Linear", "RMSNorm"]


def __getattr__(name):
    if name == "Fp8Linear":  # with its first use: it brings the float8 kernels
        from .quantize.linear import Fp8Linear
        return Fp8Linear
    raise AttributeError(f"module 'tkq.nn' has no attribute {name!r}")


class RMSNorm(nn.RMSNorm):
    """`torch.nn.RMSNorm` on `tkq.rmsnorm`. normalized_shape: the last dimensions, all of them together normalised.

    eps: None is the smallest float32 above 1, less 1, as in torch (which computes 16-bit types in float32)."""

    def forward(self, x: Tensor) -> Tensor:
        eps = torch.finfo(torch.float32).eps if self.eps is None else self.eps
        if len(self.normalized_shape) == 1:
            _check(x, self.normalized_shape)
            return rmsnorm(x, self.weight, eps=eps)
        rows, weight = _flat(x, self.normalized_shape, self.weight)
        return rmsnorm(rows, weight, eps=eps).view(x.shape)


class LayerNorm(nn.LayerNorm):
    """`torch.nn.LayerNorm` on `tkq.layernorm`. normalized_shape: the last dimensions, all of them together normalised.
    """

    def forward(self, x: Tensor) -> Tensor:
        if len(self.normalized_shape) == 1:
            _check(x, self.normalized_shape)
            return layernorm(x, self.weight, self.bias, eps=self.eps)
        rows, weight, bias = _flat(x, self.normalized_shape, self.weight, self.bias)
        return layernorm(rows, weight, bias, eps=self.eps).view(x.shape)


def _check(x, normalized_shape):
    if tuple(x.shape[-len(normalized_shape):]) != tuple(normalized_shape):
        raise ValueError(f"x: shape is {tuple(x.shape)}, its last dimensions must be normalized_shape, "
                         f"{tuple(normalized_shape)}")


def _flat(x, normalized_shape, *vectors):
    """x with its normalised dimensions made one, and the vectors, which have them, too."""
    _check(x, normalized_shape)
    return x.flatten(-len(normalized_shape)), *(None if v is None else v.flatten() for v in vectors)


class CrossEntropyLoss(nn.CrossEntropyLoss):
    """`torch.nn.CrossEntropyLoss` on `tkq.cross_entropy`, for targets that are class indices. The loss is float32.

    z_loss, softcap, inplace_backward: as `tkq.cross_entropy`, which torch has not."""

    def __init__(self, weight: Optional[Tensor] = None, size_average=None, ignore_index: int = -100, reduce=None,
                 reduction: str = "mean", label_smoothing: float = 0.0, *, z_loss: float = 0.0,
                 softcap: Optional[float] = None, inplace_backward: bool = False):
        super().__init__(weight, size_average, ignore_index, reduce, reduction, label_smoothing)
        self.z_loss, self.softcap, self.inplace_backward = z_loss, softcap, inplace_backward

    def forward(self, logits: Tensor, target: Tensor) -> Tensor:
        """logits: (C,), (N, C) or (N, C, d1, ...), as torch has them; the last is copied, its classes brought last.
        target: without C; int32 or int64."""
        from . import cross_entropy  # with the first call: not everyone who wants a norm wants it

        if target.is_floating_point():
            raise NotImplementedError("CrossEntropyLoss: target: got probabilities of classes, allowed are indices")
        if logits.dim() > 2:
            logits = logits.movedim(1, -1).contiguous()
        return cross_entropy(logits, target, weight=self.weight, ignore_index=self.ignore_index,
                             reduction=self.reduction, label_smoothing=self.label_smoothing, z_loss=self.z_loss,
                             softcap=self.softcap, inplace_backward=self.inplace_backward)


class Linear(nn.Linear):
    """`torch.nn.Linear` on `tkq.gemm`, forward and backward: bfloat16 and float16, in_features a multiple of 8. Under
    autocast the input and the weight are cast as torch casts them."""

    def forward(self, x: Tensor) -> Tensor:
        """x: (..., in_features). Returns (..., out_features)."""
        from . import gemm  # with the first call: not everyone who wants a norm wants it

        if not x.dim() or x.shape[-1] != self.in_features:
            raise ValueError(f"x: shape is {tuple(x.shape)}, its last dimension must be in_features, "
                             f"{self.in_features}")
        weight, bias, kind = self.weight, self.bias, x.device.type
        if under_autocast(kind):
            dtype = torch.get_autocast_dtype(kind)
            x, weight = x.to(dtype), weight.to(dtype)
        if x.dim() == 2:
            return gemm(x, weight.t(), bias=bias)
        y = gemm(x.reshape(-1, self.in_features), weight.t(), bias=bias)
        return y.view(*x.shape[:-1], self.out_features)
