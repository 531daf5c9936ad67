"""A linear layer in float8: all three products of a training step, quantised as they come."""
import functools
from typing import NamedTuple

import torch
from torch import Tensor, nn
from torch.autograd import Function

from ..gemm.fp8.ops import fp8_gemm
from ..granularity import members
from ..runtime.arguments.granularities import RENAMED, parse
from ..runtime.call import check, ops
from .ops import quantize_fp8, quantize_padded

E4M3, E5M2 = torch.float8_e4m3fn, torch.float8_e5m2
WIDE = torch.bfloat16, torch.float16, torch.float32
WEIGHTS = {"row": "row", "1x128": "128x128", "tensor": "tensor"}  # the weight's granularity, by that of x and dy
LONG = 65536  # sums of more tokens are added up in float32, every 128 of them: the tensor cores' own are cut off
_UNIT = 16  # of every dimension that a product sums over


class Recipe(NamedTuple):
    """granularity: "row", a scale for each row of what a product sums over; "1x128", one for each 128 of it, and for
    each 128 x 128 of the weight; "tensor", one for each of x, the weight and dy. gradient: dy's float8 type.
    keep_weight: is the weight's transpose quantised with the weight, and not in the backward?"""

    granularity: str
    gradient: torch.dtype
    keep_weight: bool = True


class Fp8Linear(nn.Linear):
    """`torch.nn.Linear` whose three products (y, and the gradients of x and of the weight) run in float8.

    x, the weight and dy are quantised when they come, by `tkq.quantize_fp8`; parameters keep their type, and so do
    results and gradients: products are added up and rounded once. The bias and its gradient are not quantised.

    Args:
        in_features, out_features: multiples of 16.
        bias, device, dtype: as `torch.nn.Linear`; dtype and x's: bfloat16, float16 or float32.
        granularity: "row": y's product has a scale for each row of x and of the weight; each gradient's product scales
            of its own, over what it sums over. Rows with outliers lose little. "1x128": a scale for each 128 of a row
            (of a column, in the weight's gradient) of x and dy, and "128x128" for the weight; sums of 128 are added up
            in float32. It is the most accurate; the products of the others are faster. "tensor": one scale for all of
            x, of the weight and of dy; what is small beside the largest element loses the most. Or the member of
            torch.nn.functional.ScalingType: RowWise, BlockWise1x128, TensorWise.
        gradient: dy's type, float8_e4m3fn or float8_e5m2 (more range, a bit less precision).
        keep_weight: the weight's float8 along its outputs stays until the backward, a byte an element; False: the
            weight is quantised again then, which is what a sharded one wants (FSDP frees it between the two).

    x, the weight and dy are quantised for both their products at once, and for the backward x.t() is saved in float8
    in place of x. Any number of tokens; for the weight's gradient zeros are added to a multiple of 16. Under autocast x
    is cast as torch casts it, and the result has that type; the weight is quantised from its own.
    """

    def __init__(self, in_features: int, out_features: int, bias: bool = True, device=None, dtype=None, *,
                 granularity: str = "row", gradient: torch.dtype = E4M3, keep_weight: bool = True):
        for name, size in (("in_features", in_features), ("out_features", out_features)):
            check.size(f"Fp8Linear: {name}", size, _UNIT)
        check.flag("Fp8Linear: keep_weight", keep_weight)
        granularity = parse("Fp8Linear: granularity", granularity, WEIGHTS)
        if granularity not in tuple(WEIGHTS):  # which need not be something that a table can be asked for
            raise ValueError(f"Fp8Linear: granularity: got {granularity!r}, allowed are "
                             f"{', '.join(map(repr, WEIGHTS))}, and {members(WEIGHTS)}")
        if gradient not in (E4M3, E5M2):
            raise TypeError(f"Fp8Linear: gradient: got {gradient}, allowed are {E4M3} and {E5M2}")
        super().__init__(in_features, out_features, bias, device, dtype)
        self.recipe = Recipe(granularity, gradient, keep_weight)

    def forward(self, x: Tensor) -> Tensor:
        """x (..., in_features) -> (..., out_features), of x's type."""
        check.tensor("x", x)
        if not x.dim() or x.shape[-1] != self.in_features:
            raise ValueError(f"x: shape is {tuple(x.shape)}, its last dimension must be in_features, "
                             f"{self.in_features}")
        kind = x.device.type
        if check.under_autocast(kind):
            x = x.to(torch.get_autocast_dtype(kind))
            with torch.autocast(kind, enabled=False):  # the CPU's reference multiplies with torch
                return self.forward(x)
        return together(x, (self,))[0]

    def __setstate__(self, state):
        """Modules that an earlier version pickled have an old name."""
        super().__setstate__(state)
        old = self.recipe.granularity
        self.recipe = self.recipe._replace(granularity=RENAMED.get(old, old))

    def extra_repr(self) -> str:
        return f"{super().extra_repr()}, granularity={self.recipe.granularity!r}, gradient={self.recipe.gradient}"


def together(x: Tensor, layers) -> list[Tensor]:
    """What each of the layers, of one recipe, makes of x (..., in_features), which is quantised once for all."""
    rows, first = x.reshape(-1, x.shape[-1]), layers[0]
    rows = rows if rows.stride(-1) == 1 else rows.contiguous()
    if ops.traced_by_jit():
        with torch.no_grad():
            ys = _products(rows, layers)
    else:
        for layer in layers:
            _check_weight(layer.weight)
            check.refuse_tangent("Fp8Linear", x=x, weight=layer.weight, bias=layer.bias)
        parameters = (*(layer.weight for layer in layers), *(layer.bias for layer in layers))
        try:
            ys = _Linear.apply(rows, first.recipe, torch.is_grad_enabled(), *parameters)
        except RuntimeError as error:
            ops.refuse_functorch("Fp8Linear", error)
            raise
    return [y.view(*x.shape[:-1], y.shape[-1]) for y in ys[:len(layers)]]


def _check_weight(weight):
    """What the quantiser would call x."""
    if weight.dtype not in WIDE:
        check.dtype("Fp8Linear: weight", weight, ("bf16", "fp16", "fp32"))


def _products(x, layers):
    """The forward alone, of which torch.jit.trace keeps the ops: a program that it made has no gradient here, and says
    so when one is asked for."""
    granularity = layers[0].recipe.granularity
    q, scale = quantize_fp8(x, granularity)
    weights = (quantize_fp8(layer.weight, WEIGHTS[granularity]) for layer in layers)
    return [fp8_gemm(q, w.t(), scale, scale_w.t(), bias=layer.bias, out_dtype=x.dtype)
            for (w, scale_w), layer in zip(weights, layers)]


class _Linear(Function):
    @staticmethod
    def forward(ctx, *inputs):
        """inputs: x, the recipe, recording, the layers' weights, then their biases. recording: is a gradient recorded
        where this is called? In here grad mode is off, and under no_grad needs_input_grad still says what requires one.

        All in one, as torch.compile, where nothing is recorded, leaves ctx out when there are as many inputs as
        parameters by name."""
        x, recipe, recording, *parameters = inputs
        n = len(parameters) // 2
        weights, biases = parameters[:n], parameters[n:]
        saves_x = recording and any(ctx.needs_input_grad[3:3 + n])
        q, scale, *saved = _quantised(x, recipe, E4M3, saves_x)
        saved = list(saved)  # Dynamo of torch 2.11 has a tuple
        ys, needs_dx = [], recording and ctx.needs_input_grad[0]
        for weight, bias in zip(weights, biases):
            w, scale_w, *transposed = quantize_fp8(weight, WEIGHTS[recipe.granularity],
                                                   transpose=needs_dx and recipe.keep_weight)
            ys.append(fp8_gemm(q, w.t(), scale, scale_w.t(), bias=bias, out_dtype=x.dtype))
            saved += transposed or [weight] * needs_dx
        # an empty result stands for x and the weights, whose float8 leads nowhere: `ops.once`
        if saves_x and needs_dx:
            ys.append(x.new_empty(0))
            saved.append(ys[-1])
        ctx.save_for_backward(*saved)
        ctx.recipe, ctx.saves_x, ctx.dtype = recipe, saves_x, x.dtype
        ctx.weights, ctx.biased = [w.dtype for w in weights], [None if b is None else b.dtype for b in biases]
        ctx.set_materialize_grads(False)
        return tuple(ys)

    @staticmethod
    @functools.partial(ops.once, "Fp8Linear")
    def backward(ctx, *dys):
        n, saved = len(ctx.weights), ctx.saved_tensors
        x, of_weights = (saved[:2], saved[2:]) if ctx.saves_x else (None, saved)
        each, dys = 2 if ctx.recipe.keep_weight else 1, dys[:n]
        wants_x, _, _, *wants = ctx.needs_input_grad
        wants = [wanted and dys[i % n] is not None for i, wanted in enumerate(wants)]
        dx, dweights = None, [None] * n
        for i, dy in enumerate(dys):
            if dy is None:
                continue
            weight = of_weights[each * i:each * (i + 1)] if wants_x else None
            more, dweights[i] = _gradients(dy.contiguous(), weight, x if wants[i] else None, ctx.recipe,
                                           (ctx.dtype, ctx.weights[i]))
            dx = more if dx is None else dx.add_(more)
        dbiases = [dy.sum(0, dtype=torch.float32).to(dtype) if wanted else None
                   for dy, dtype, wanted in zip(dys, ctx.biased, wants[n:])]
        return dx, None, None, *dweights, *dbiases


def _gradients(dy, weight, x, recipe, dtypes):
    """(dx, dweight), of dtypes. weight, x: the transposes' float8 and scales, None where dx or dweight is not wanted;
    of the weight it may be the weight itself, alone."""
    dx = dweight = None
    q, scale, *transposed = _quantised(dy, recipe, recipe.gradient, x is not None)
    if weight is not None:
        if not recipe.keep_weight:
            weight = quantize_fp8(*weight, WEIGHTS[recipe.granularity], transpose=True)[2:]
        dx = fp8_gemm(q, weight[0].t(), scale, weight[1].t(), out_dtype=dtypes[0])
    if x is not None:
        dweight = fp8_gemm(transposed[0], x[0].t(), transposed[1], x[1].t(), out_dtype=dtypes[1],
                           accumulate="fp32" if x[0].shape[1] > LONG else None)
    return dx, dweight


def _quantised(x, recipe, dtype, both):
    """(q, scale) of x (M, K); with ``both`` those of x.t() too, to whose rows zeros are added, to a multiple of 16."""
    if both:
        return quantize_padded(x, recipe.granularity, dtype, _UNIT)
    return quantize_fp8(x, recipe.granularity, dtype)
