"""Modules that take the place of torch.nn's: the same constructor arguments, parameters and state-dict names.

RMSNorm, LayerNorm, Softmax, LogSoftmax, CrossEntropyLoss and Linear are subclasses of torch's, so `isinstance`,
`reset_parameters`, `state_dict` and pickles are theirs, and they take what torch's take but for this: float64, class
probabilities and uint8 for targets, no columns at all, and softmax of a single number, are refused by name. Inputs and
a loss's weights of classes are copied where their last dimension is not contiguous, which the functions leave to the
caller; parameters, which the modules themselves make contiguous, are not. Linear takes 16 bits and in_features of a
multiple of 8; Softmax wants its dim.

Under autocast Linear, Fp8Linear and LinearCrossEntropyLoss cast as torch does. The others keep their input's type
(losses are float32), where torch's norms and softmax give float32: the kernels compute in float32 all the same.

SwiGLU, GEGLU, RotaryEmbedding and LinearCrossEntropyLoss are modules around functions that torch.nn has not, or not in
every version; RMSNormQuant and LayerNormQuant are norms for products in float8, of models that are not trained.
GatedDeltaNet, BasedAttention, HedgehogAttention, KimiDeltaAttention and Mamba2 are mixers, whole layers with their
projections. ShortConvolution is the convolution of a few taps that they begin with, HyenaFilterConv one as long as the
sequence, of a filter that a small network makes.
"""
import importlib as _importlib
from typing import Optional

import torch
from torch import Tensor, nn

from . import names as _names
from .norms.ops import layernorm, rmsnorm
from .runtime import arguments
from .runtime.call import check

__all__ = ["GEGLU", "BasedAttention", "CrossEntropyLoss", "Fp8Linear", "GatedDeltaNet", "HedgehogAttention",  # noqa: F822
           "HyenaFilterConv", "KimiDeltaAttention", "LayerNorm", "LayerNormQuant", "Linear", "LinearCrossEntropyLoss",
           "LogSoftmax", "Mamba2", "RMSNorm", "RMSNormQuant", "RotaryEmbedding", "ShortConvolution", "Softmax",
           "SwiGLU"]

# what constructors are given, refused there and not in the first forward
_loss = arguments.checker("cross_entropy", "ignore_index", "reduction", "label_smoothing", "z_loss", "softcap",
                          "inplace_backward", called="CrossEntropyLoss")
_linear_loss = arguments.checker("linear_cross_entropy", "ignore_index", "reduction", "label_smoothing", "z_loss",
                                 "softcap", called="LinearCrossEntropyLoss")
_softmax = {name: arguments.checker("softmax", "dim", "scale", called=name) for name in ("Softmax", "LogSoftmax")}
_eps = {name: arguments.checker(name.lower(), "eps", called=name) for name in ("RMSNorm", "LayerNorm")}
_layout = {name: arguments.checker(name.lower(), "layout", called=name) for name in ("SwiGLU", "GEGLU")}
_approximate = arguments.checker("geglu", "approximate", called="GEGLU")


# with their first use: they bring kernels of their own
_LATER = {"Fp8Linear": "quantize.linear", "GatedDeltaNet": "linear_attention.layers",
          "KimiDeltaAttention": "linear_attention.kimi_layer", "Mamba2": "linear_attention.mamba2_layer",
          "HedgehogAttention": "linear_attention.hedgehog.layers", "BasedAttention": "linear_attention.based.layer",
          "ShortConvolution": "linear_attention.short_convolution", "HyenaFilterConv": "convolution.fft.layer",
          "RotaryEmbedding": "pointwise.rotary_embedding"}


def __getattr__(name):
    if name in _LATER:
        return getattr(_importlib.import_module(f"tkq.{_LATER[name]}"), name)
    raise _names.unknown("tkq.nn", name, __all__)


def __dir__():
    return _names.listed(globals(), __all__)


class RMSNorm(nn.RMSNorm):
    """`torch.nn.RMSNorm` on `tkq.rmsnorm`. normalized_shape: the last dimensions, all of them together normalised.

    eps: None is the smallest float32 above 1, less 1, as in torch (which computes 16-bit types in float32)."""

    def __init__(self, normalized_shape, eps: Optional[float] = None, elementwise_affine: bool = True, device=None,
                 dtype=None):
        eps = None if eps is None else _eps["RMSNorm"](eps)
        super().__init__(normalized_shape, eps, elementwise_affine, device, dtype)

    def forward(self, x: Tensor) -> Tensor:
        eps = torch.finfo(torch.float32).eps if self.eps is None else self.eps
        if len(self.normalized_shape) == 1:
            _check("x", x, self.normalized_shape)
            return rmsnorm(_contiguous(x), self.weight, eps=eps)
        rows, weight = _flat("x", x, self.normalized_shape, self.weight)
        return rmsnorm(rows, weight, eps=eps).view(x.shape)


class LayerNorm(nn.LayerNorm):
    """`torch.nn.LayerNorm` on `tkq.layernorm`. normalized_shape: the last dimensions, all of them together normalised.
    """

    def __init__(self, normalized_shape, eps: float = 1e-5, elementwise_affine: bool = True, bias: bool = True,
                 device=None, dtype=None):
        super().__init__(normalized_shape, _eps["LayerNorm"](eps), elementwise_affine, bias, device, dtype)

    def forward(self, input: Tensor) -> Tensor:
        if len(self.normalized_shape) == 1:
            _check("input", input, self.normalized_shape)
            return layernorm(_contiguous(input), self.weight, self.bias, eps=self.eps)
        rows, weight, bias = _flat("input", input, self.normalized_shape, self.weight, self.bias)
        return layernorm(rows, weight, bias, eps=self.eps).view(input.shape)


class _Quantised:
    """What RMSNormQuant and LayerNormQuant have beside a norm's constructor, parameters and state dict."""

    def __init__(self, normalized_shape, *args, granularity: str = "row", **kwargs):
        super().__init__(normalized_shape, *args, **kwargs)
        if len(self.normalized_shape) != 1:
            raise NotImplementedError(f"{type(self).__name__}: normalized_shape: got {tuple(self.normalized_shape)}, "
                                      "allowed is one dimension, the last")
        self.granularity = self._taken(granularity)

    def _rows(self, x: Tensor, residual: Optional[Tensor]) -> tuple[Tensor, dict]:
        """x, and the options that both functions take."""
        _check("x", x, self.normalized_shape)
        if residual is not None:
            check.tensor("residual", residual)
        total = None if residual is None else _contiguous(residual)
        return _contiguous(x), dict(residual=total, prenorm=total is not None, granularity=self.granularity)

    def extra_repr(self) -> str:
        return f"{super().extra_repr()}, granularity={self.granularity!r}"


class RMSNormQuant(_Quantised, RMSNorm):
    """`RMSNorm`, its result in float8 with its scales, as `tkq.fp8_gemm` takes them: `tkq.rmsnorm_quant`.

    granularity: "row", a scale for each row, or "1x128", one for each 128 columns of it; or torch's ScalingType."""

    _taken = staticmethod(arguments.checker("rmsnorm_quant", "granularity", called="RMSNormQuant"))

    def forward(self, x: Tensor, residual: Optional[Tensor] = None) -> tuple[Tensor, ...]:
        """x, residual, which is added to it before: (..., N), bf16, fp16 or fp32.

        Returns (q, scale), with a residual (q, scale, the sum): q float8_e4m3fn, of x's shape; scale float32, (M, 1) or
        (M, ceil(N / 128)) for the M rows; q * scale is the norm.

        Raises:
            NotImplementedError: a gradient is asked for: call it under `torch.no_grad()`, or after
                `requires_grad_(False)`.
            ValueError: shapes that do not match, a granularity that there is not; otherwise as `tkq.rmsnorm_quant`."""
        from .norms.quant_ops import rmsnorm_quant

        x, options = self._rows(x, residual)
        eps = torch.finfo(torch.float32).eps if self.eps is None else self.eps
        return rmsnorm_quant(x, self.weight, eps=eps, **options)


class LayerNormQuant(_Quantised, LayerNorm):
    """`LayerNorm` likewise: `tkq.layernorm_quant`. granularity: as of RMSNormQuant."""

    _taken = staticmethod(arguments.checker("layernorm_quant", "granularity", called="LayerNormQuant"))

    def forward(self, x: Tensor, residual: Optional[Tensor] = None) -> tuple[Tensor, ...]:
        """As RMSNormQuant's."""
        from .norms.quant_ops import layernorm_quant

        x, options = self._rows(x, residual)
        return layernorm_quant(x, self.weight, self.bias, eps=self.eps, **options)


def _contiguous(x):
    """x where its last dimension is contiguous, as functions want it; else a copy."""
    return x if x.stride()[-1] == 1 or x.shape[-1] == 1 else x.contiguous()


def _of_classes(weight):
    """A loss's weights of classes, None or as functions want them."""
    return weight if weight is None or not weight.dim() else _contiguous(weight)


def _gemm_layout(x):
    """x where gemm takes it: its last dimension is contiguous or, of a matrix, either; else a copy."""
    return x if x.stride()[-1:] == (1,) or (x.dim() == 2 and x.stride(0) == 1) else x.contiguous()


def _check(name, x, normalized_shape):
    check.tensor(name, x)
    if tuple(x.shape[-len(normalized_shape):]) != tuple(normalized_shape):
        raise ValueError(f"{name}: shape is {tuple(x.shape)}, its last dimensions must be normalized_shape, "
                         f"{tuple(normalized_shape)}")


def _flat(name, x, normalized_shape, *vectors):
    """x with its normalised dimensions made one, and the vectors, which have them, too."""
    _check(name, x, normalized_shape)
    return _contiguous(x.flatten(-len(normalized_shape))), *(None if v is None else v.flatten() for v in vectors)


class CrossEntropyLoss(nn.CrossEntropyLoss):
    """`torch.nn.CrossEntropyLoss` on `tkq.cross_entropy`, for targets that are class indices. The loss is float32.

    z_loss, softcap, inplace_backward: as `tkq.cross_entropy`, which torch has not."""

    def __init__(self, weight: Optional[Tensor] = None, size_average=None, ignore_index: int = -100, reduce=None,
                 reduction: str = "mean", label_smoothing: float = 0.0, *, z_loss: float = 0.0,
                 softcap: Optional[float] = None, inplace_backward: bool = False):
        super().__init__(weight, size_average, ignore_index, reduce, reduction, label_smoothing)
        _, _, _, self.z_loss, self.softcap, self.inplace_backward = _loss(
            self.ignore_index, self.reduction, self.label_smoothing, z_loss, softcap, inplace_backward)
        if weight is not None:
            check.rank("CrossEntropyLoss: weight", weight, 1)

    def forward(self, input: Tensor, target: Tensor) -> Tensor:
        """input: logits (C,), (N, C) or (N, C, d1, ...), as torch has them; the last is copied, its classes brought
        last. target: without C; int32 or int64."""
        from .losses.ops import cross_entropy  # with the first call: not everyone who wants a norm wants it

        check.tensor("input", input)
        check.tensor("target", target)
        if target.is_floating_point():
            raise NotImplementedError("CrossEntropyLoss: target: got probabilities of classes, allowed are indices")
        if input.dim():
            input = input.movedim(1, -1).contiguous() if input.dim() > 2 else _contiguous(input)
        return cross_entropy(input, target, weight=_of_classes(self.weight), ignore_index=self.ignore_index,
                             reduction=self.reduction, label_smoothing=self.label_smoothing, z_loss=self.z_loss,
                             softcap=self.softcap, inplace_backward=self.inplace_backward)

    def extra_repr(self) -> str:
        """Nothing, as torch's, but for what torch's has not."""
        extra = dict(z_loss=(self.z_loss, 0.0), softcap=(self.softcap, None),
                     inplace_backward=(self.inplace_backward, False))
        return ", ".join(f"{name}={value}" for name, (value, default) in extra.items() if value != default)


class LinearCrossEntropyLoss(nn.Module):
    """A linear layer without bias, and the cross entropy of its results, on `tkq.linear_cross_entropy`: the logits are
    never whole in memory. The layer is `linear`, as in torch's module of this name; a model that has its weight
    elsewhere sets `linear.weight`.

    in_features: a multiple of 8. dtype: bfloat16 or float16. weight: of classes. All else as `CrossEntropyLoss`."""

    def __init__(self, in_features: int, num_classes: int, *, weight: Optional[Tensor] = None, ignore_index: int = -100,
                 reduction: str = "mean", label_smoothing: float = 0.0, z_loss: float = 0.0,
                 softcap: Optional[float] = None, device=None, dtype=torch.bfloat16):
        from .losses.spec import MAX_V

        super().__init__()
        check.size("LinearCrossEntropyLoss: in_features", in_features, 8)
        check.size("LinearCrossEntropyLoss: num_classes", num_classes)
        if num_classes > MAX_V:
            raise NotImplementedError(f"LinearCrossEntropyLoss: num_classes is {num_classes}, supported are up to "
                                      f"{MAX_V}")
        if weight is not None:
            check.tensor("LinearCrossEntropyLoss: weight", weight)
            check.shape("LinearCrossEntropyLoss: weight", weight, (num_classes,))
        ignore_index, reduction, label_smoothing, z_loss, softcap = _linear_loss(ignore_index, reduction,
                                                                                 label_smoothing, z_loss, softcap)
        self.linear = nn.Linear(in_features, num_classes, bias=False, device=device, dtype=dtype)
        self.register_buffer("weight", weight)
        self.options = dict(ignore_index=ignore_index, reduction=reduction, label_smoothing=label_smoothing,
                            z_loss=z_loss, softcap=softcap)

    def forward(self, input: Tensor, target: Tensor) -> Tensor:
        """input: (..., in_features). target: (...)."""
        from .losses.linear_ops import linear_cross_entropy

        check.tensor("input", input)
        input = _contiguous(input) if input.dim() else input
        return linear_cross_entropy(input, self.linear.weight, target, class_weight=_of_classes(self.weight),
                                    **self.options)

    def extra_repr(self) -> str:
        return ", ".join(f"{name}={value!r}" for name, value in self.options.items())


class Softmax(nn.Softmax):
    """`torch.nn.Softmax` on `tkq.softmax`. dim must be named: torch's guess, where it is None, is refused.

    scale: multiplies the input before."""

    def __init__(self, dim: Optional[int] = None, *, scale: float = 1.0):
        dim, scale = _given("Softmax", dim, scale)
        super().__init__(dim)
        self.scale = scale

    def forward(self, input: Tensor) -> Tensor:
        from .softmax.ops import softmax

        check.tensor("input", input)
        return softmax(input, dim=self.dim, scale=self.scale)

    def extra_repr(self) -> str:
        return _with_scale(self, super().extra_repr())


class LogSoftmax(nn.LogSoftmax):
    """`torch.nn.LogSoftmax` on `tkq.log_softmax`. Otherwise as `Softmax`."""

    def __init__(self, dim: Optional[int] = None, *, scale: float = 1.0):
        dim, scale = _given("LogSoftmax", dim, scale)
        super().__init__(dim)
        self.scale = scale

    def forward(self, input: Tensor) -> Tensor:
        from .softmax.ops import log_softmax

        check.tensor("input", input)
        return log_softmax(input, dim=self.dim, scale=self.scale)

    def extra_repr(self) -> str:
        return _with_scale(self, super().extra_repr())


def _given(name, dim, scale):
    if dim is None:
        raise NotImplementedError(f"{name}: dim: got None, allowed is a dimension by its number")
    return _softmax[name](dim, scale)


def _with_scale(module, text):
    return text if module.scale == 1.0 else f"{text}, scale={module.scale}"


class SwiGLU(nn.Module):
    """silu(gate) * up, on `tkq.swiglu`. layout: of one tensor that has both, "split" or "interleaved"."""

    def __init__(self, layout: str = "split"):
        super().__init__()
        self.layout = _layout["SwiGLU"](layout)

    def forward(self, gate: Tensor, up: Optional[Tensor] = None) -> Tensor:
        """gate, up: (..., N). Or both in one, (..., 2 N)."""
        from .pointwise.gated_ops import swiglu

        return swiglu(gate, up, layout=self.layout)

    def extra_repr(self) -> str:
        return f"layout={self.layout!r}"


class GEGLU(SwiGLU):
    """gelu(gate) * up, on `tkq.geglu`. approximate: "none" or "tanh", as torch.nn.GELU."""

    def __init__(self, approximate: str = "none", layout: str = "split"):
        super().__init__(_layout["GEGLU"](layout))
        self.approximate = _approximate(approximate)

    def forward(self, gate: Tensor, up: Optional[Tensor] = None) -> Tensor:
        from .pointwise.gated_ops import geglu

        return geglu(gate, up, approximate=self.approximate, layout=self.layout)

    def extra_repr(self) -> str:
        return f"approximate={self.approximate!r}, {super().extra_repr()}"


class Linear(nn.Linear):
    """`torch.nn.Linear` on `tkq.gemm`, forward and backward: bfloat16 and float16, in_features a multiple of 8. Under
    autocast the input and the weight are cast as torch casts them."""

    def __init__(self, in_features: int, out_features: int, bias: bool = True, device=None, dtype=None):
        if isinstance(in_features, int) and in_features % 8:
            raise ValueError(f"Linear: in_features is {in_features}, allowed are multiples of 8")
        super().__init__(in_features, out_features, bias, device, dtype)

    def forward(self, input: Tensor) -> Tensor:
        """input: (..., in_features). Returns (..., out_features)."""
        from .gemm.dense.ops import gemm  # with the first call: not everyone who wants a norm wants it

        check.tensor("input", input)
        x = _gemm_layout(input)
        if not x.dim() or x.shape[-1] != self.in_features:
            raise ValueError(f"input: shape is {tuple(x.shape)}, its last dimension must be in_features, "
                             f"{self.in_features}")
        if x.dim() == 2:
            return gemm(x, self.weight.t(), bias=self.bias)
        y = gemm(x.flatten(0, -2) if x.dim() > 1 else x[None], self.weight.t(), bias=self.bias)
        return y.view(*x.shape[:-1], self.out_features)
