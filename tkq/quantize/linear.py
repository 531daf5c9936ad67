"""A linear layer in float8: all three products of a training step, quantised as they come."""
from typing import NamedTuple

import torch
from torch import Tensor, nn
from torch.autograd import Function
from torch.autograd.function import once_differentiable
from torch.nn import functional as F

from ..gemm.fp8_ops import fp8_gemm
from ..norms.spec import MAX_N
from ..runtime.check import under_autocast
from .ops import quantize_fp8

E4M3, E5M2 = torch.float8_e4m3fn, torch.float8_e5m2
RECIPES = ("row", "block", "tensor")
_UNIT = 16  # of every dimension that a product sums over
_TOKENS = 512  # and of tokens where they are rows' lengths: the quantiser of rows is compiled for each length


class Recipe(NamedTuple):
    """granularity: "row", a scale for each row of what a product sums over; "block", one for each 128 of it, and for
    each 128 x 128 of the weight; "tensor", one for each of x, the weight and dy. gradient: dy's float8 type."""

    granularity: str
    gradient: torch.dtype


class Fp8Linear(nn.Linear):
    """`torch.nn.Linear` whose three products (y, and the gradients of x and of the weight) run in float8.

    x, the weight and dy are quantised when they come, by `tkq.quantize_fp8`; parameters keep their type, and so do
    results and gradients: products are added up and rounded once. The bias and its gradient are not quantised.

    Args:
        in_features, out_features: multiples of 16.
        bias, device, dtype: as `torch.nn.Linear`; dtype and x's: bfloat16, float16 or float32.
        granularity: "row": y's product has a scale for each row of x and of the weight; each gradient's product scales
            of its own, over what it sums over. Rows with outliers lose little. "block": a scale for each 128 of a row
            (of a column, in the weight's gradient) of x and dy, and for each 128 x 128 of the weight; sums of 128 are
            added up in float32. It is the most accurate, and quantises x and dy for both their products in one pass.
            "tensor": one scale for all of x, of the weight and of dy, for both products of each. It is the fastest;
            what is small beside the largest element loses the most.
        gradient: dy's type, float8_e4m3fn or float8_e5m2 (more range, a bit less precision).

    Any number of tokens; for the weight's gradient zeros are added to a multiple of 16 or, by rows, of 512. Under
    autocast x is cast as torch casts it, and the result has that type; the weight is quantised from its own. By blocks
    and by tensors, what the backward multiplies by is kept in float8, in place of x and beside the weight.
    """

    def __init__(self, in_features: int, out_features: int, bias: bool = True, device=None, dtype=None, *,
                 granularity: str = "row", gradient: torch.dtype = E4M3):
        for name, size in (("in_features", in_features), ("out_features", out_features)):
            if size % _UNIT:
                raise ValueError(f"Fp8Linear: {name} is {size}, allowed are multiples of {_UNIT}")
        if granularity not in RECIPES:
            raise ValueError(f"Fp8Linear: granularity: got {granularity!r}, allowed are {', '.join(RECIPES)}")
        if gradient not in (E4M3, E5M2):
            raise TypeError(f"Fp8Linear: gradient: got {gradient}, allowed are {E4M3} and {E5M2}")
        super().__init__(in_features, out_features, bias, device, dtype)
        self.recipe = Recipe(granularity, gradient)

    def forward(self, x: Tensor) -> Tensor:
        """x (..., in_features) -> (..., out_features), of x's type."""
        if not x.dim() or x.shape[-1] != self.in_features:
            raise ValueError(f"x: shape is {tuple(x.shape)}, its last dimension must be in_features, "
                             f"{self.in_features}")
        kind = x.device.type
        if under_autocast(kind):
            x = x.to(torch.get_autocast_dtype(kind))
            with torch.autocast(kind, enabled=False):  # the CPU's reference multiplies with torch
                return self.forward(x)
        return together(x, (self,))[0]

    def extra_repr(self) -> str:
        return f"{super().extra_repr()}, granularity={self.recipe.granularity!r}, gradient={self.recipe.gradient}"


def together(x: Tensor, layers) -> list[Tensor]:
    """What each of the layers, of one recipe, makes of x (..., in_features): it is quantised once for all, but by rows.
    """
    rows, first = x.reshape(-1, x.shape[-1]), layers[0]
    rows = rows if rows.stride(-1) == 1 else rows.contiguous()
    parameters = (*(layer.weight for layer in layers), *(layer.bias for layer in layers))
    ys = _Linear.apply(rows, first.recipe, torch.is_grad_enabled(), *parameters)
    return [y.view(*x.shape[:-1], y.shape[-1]) for y in ys]


class _Linear(Function):
    @staticmethod
    def forward(ctx, x, recipe, recording, *parameters):
        """parameters: the layers' weights, then their biases. recording: is a gradient recorded where this is called?
        In here grad mode is off, and under no_grad needs_input_grad still says what requires one."""
        products, n = _PRODUCTS[recipe.granularity], len(parameters) // 2
        weights, biases = parameters[:n], parameters[n:]
        keep = recording and any(ctx.needs_input_grad[3:3 + n])
        ys, kept, turned = products.forward(x, weights, biases, recording and ctx.needs_input_grad[0], keep)
        ctx.save_for_backward(*kept, *turned)
        ctx.recipe, ctx.kept, ctx.dtype = recipe, len(kept), x.dtype
        ctx.weights, ctx.biased = [w.dtype for w in weights], [None if b is None else b.dtype for b in biases]
        ctx.set_materialize_grads(False)
        return tuple(ys)

    @staticmethod
    @once_differentiable
    def backward(ctx, *dys):
        n, products = len(dys), _PRODUCTS[ctx.recipe.granularity]
        kept, turned = ctx.saved_tensors[:ctx.kept], ctx.saved_tensors[ctx.kept:]
        of_each = len(turned) // n
        wants_x, _, _, *wants = ctx.needs_input_grad
        wants = [wanted and dys[i % n] is not None for i, wanted in enumerate(wants)]
        x = products.kept(kept) if any(wants[:n]) else None
        dx, dweights = None, [None] * n
        for i, dy in enumerate(dys):
            if dy is None:
                continue
            weight = turned[i * of_each:(i + 1) * of_each] if wants_x else None
            more, dweights[i] = products.backward(dy.contiguous(), weight, x if wants[i] else None,
                                                  ctx.recipe.gradient, (ctx.dtype, ctx.weights[i]))
            dx = more if dx is None else dx.add_(more)
        dbiases = [dy.sum(0, dtype=torch.float32).to(dtype) if wanted else None
                   for dy, dtype, wanted in zip(dys, ctx.biased, wants[n:])]
        return dx, None, None, *dweights, *dbiases


def _padded(x):
    """Rows to a multiple of 16: zeros, which add nothing to the weight's gradient."""
    missing = -x.shape[0] % _UNIT
    return F.pad(x, (0, 0, 0, missing)) if missing else x


class _Rows:
    """A scale for each row of both operands. What is summed over is another dimension in each product, so each
    quantises for itself."""

    @staticmethod
    def forward(x, weights, biases, turn, keep):
        """(ys, what the weights' gradients want of x, what x's gradient wants of the weights): the latter ones where
        keep and turn say that there will be such gradients."""
        ys = [_by_rows(x, weight, E4M3, x.dtype, bias) for weight, bias in zip(weights, biases)]
        return ys, (x,) if keep else (), weights if turn else ()

    @staticmethod
    def kept(kept):
        """x, as the weights' gradients want it."""
        return _turned(kept[0])

    @staticmethod
    def backward(dy, weight, x, gradient, dtypes):
        """(dx, dweight), of dtypes. weight, x: as kept, None where dx or dweight is not wanted."""
        dx = dweight = None
        if weight is not None:
            dx = _by_rows(dy, weight[0].t().contiguous(), gradient, dtypes[0])
        if x is not None:
            dweight = _by_rows(_turned(dy), x, gradient, dtypes[1])
        return dx, dweight


def _turned(x):
    """x.t(), contiguous, with columns of zeros."""
    missing = -x.shape[0] % _TOKENS
    return F.pad(x.t(), (0, missing)) if missing else x.t().contiguous()


def _by_rows(x, w, of_x, dtype, bias=None):
    """x (M, K) @ w (N, K).t() + bias, with a scale for each row of both. Where rows are longer than the quantiser takes
    (a weight's gradient: as long as there are tokens), in parts with scales of their own, added up in float32."""
    if x.shape[1] <= MAX_N:
        (q, scale), (v, scale_v) = quantize_fp8(x, dtype=of_x), quantize_fp8(w)
        return fp8_gemm(q, v.t(), scale, scale_v.t(), bias=bias, out_dtype=dtype)
    (first, *parts), (other, *others) = x.split(MAX_N, 1), w.split(MAX_N, 1)
    y = _by_rows(first, other, of_x, torch.float32, bias)
    for part, other in zip(parts, others):
        y += _by_rows(part, other, of_x, torch.float32)
    return y.to(dtype)


class _BothWays:
    """x, weights and dy are quantised together with their transposes, each in one pass; those of x and of the weights
    are kept for the backward, in place of them. As `_Rows` otherwise.

    of_x, of_weight: granularities of `quantize_fp8`; of_x is dy's too."""

    def __init__(self, of_x, of_weight):
        self.of_x, self.of_weight = of_x, of_weight

    def forward(self, x, weights, biases, turn, keep):
        q, scale, *kept = quantize_fp8(_padded(x) if keep else x, self.of_x, transpose=keep)
        q, scale = self._rows(x.shape[0], q, scale)
        ys, turned = [], []
        for weight, bias in zip(weights, biases):
            w, scale_w, *other = quantize_fp8(weight, self.of_weight, transpose=turn)
            ys.append(fp8_gemm(q, w.t(), scale, scale_w.t(), bias=bias, out_dtype=x.dtype))
            turned += other
        return ys, kept, turned

    def _rows(self, rows, q, scale):
        """Without those that were padded. Not of the product, afterwards: a view could not be written in place."""
        return q[:rows], scale if self.of_x == "tensor" else scale[:rows]

    @staticmethod
    def kept(kept):
        return kept

    def backward(self, dy, weight, x, gradient, dtypes):
        both, dx, dweight = x is not None, None, None
        q, scale, *turned = quantize_fp8(_padded(dy) if both else dy, self.of_x, gradient, transpose=both)
        if weight is not None:
            q, scale = self._rows(dy.shape[0], q, scale)
            dx = fp8_gemm(q, weight[0].t(), scale, weight[1].t(), out_dtype=dtypes[0])
        if both:
            dweight = fp8_gemm(turned[0], x[0].t(), turned[1], x[1].t(), out_dtype=dtypes[1])
        return dx, dweight


_PRODUCTS = {"row": _Rows(), "block": _BothWays("block", "tile"), "tensor": _BothWays("tensor", "tensor")}
