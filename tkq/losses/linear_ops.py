"""tkq.linear_cross_entropy: what PyTorch sees of it."""
from typing import Optional

import torch
from torch import Tensor

from ..reference import losses as reference
from ..reference.losses import Terms
from ..runtime import arguments
from ..runtime.call import autocast, check, debug, ops
from . import launch, linear
from .checks import check_classes, check_targets
from .linear import Layer, Outcome
from .ops import cap

_OPTIONS = arguments.checker("linear_cross_entropy", "ignore_index", "reduction", "label_smoothing", "z_loss")
_TENSORS = arguments.checker("linear_cross_entropy", "x", "weight")
_MOST = torch.finfo(torch.float32).max


def linear_cross_entropy(x: Tensor, weight: Tensor, target: Tensor, *, class_weight: Optional[Tensor] = None,
                         ignore_index: int = -100, reduction: str = "mean", label_smoothing: float = 0.0,
                         z_loss: float = 0.0, softcap: Optional[float] = None) -> Tensor:
    """The cross entropy of F.linear(x, weight), whose logits are never whole in memory; differentiable once, in x
    and weight.

    Rows go in chunks: their logits, in x's type, then the losses, then, over the logits, the gradient, and from that
    the gradients of x and weight. For "mean" and "sum" all of it happens in the forward where x or weight requires a
    gradient, and the backward multiplies by the incoming gradient (a look at it, where that is 1). For "none", or a
    second backward of a retained graph, the backward computes each chunk's logits again.

    At a time a chunk's logits are in memory, at most 512 MB of them or 512 rows, and in fp16 a float32 gradient of
    weight. A gradient of weight in bf16 is rounded once for each chunk, a quarter of the rows as a rule: it is as exact
    as its largest part, so that less is left where the chunks' parts cancel.

    Args:
        x: (..., K), bf16 or fp16, K a multiple of 8, last dimension contiguous.
        weight: (V, K), x's type, last dimension contiguous, V from 1 to 524288.
        target: (...), int32 or int64, as in ``tkq.cross_entropy``. A number that is no class makes NaN of its row's
            gradient in x, and of weight's gradient.
        class_weight, ignore_index, reduction, label_smoothing, z_loss, softcap: weight and so on of
            ``tkq.cross_entropy``.

    Returns:
        float32: () or, for reduction "none", of target's shape.

    Raises:
        TypeError: x or weight is no dense tensor of bf16 or fp16; target is no dense tensor of int32 or int64;
            class_weight is no dense tensor of bf16, fp16 or fp32; ignore_index is no int; reduction is no word;
            label_smoothing, z_loss or softcap is no number.
        ValueError: ignore_index is outside -2^63 to 2^63 - 1; reduction is another word; label_smoothing is outside 0
            to 1; softcap is not above 0; a number that is not finite in float32; shapes that do not match, several
            devices, a last dimension that is not contiguous, no classes, K not a multiple of 8.
        NotImplementedError, IndexError, RuntimeError: as ``tkq.cross_entropy``.

    Under torch.autocast x and weight are cast.

    Source: the chunks are Liger-Kernel's idea (Hsu et al., 2024). CPU tensors take
    ``tkq.reference.losses.linear_cross_entropy``.

    Example::

        x = torch.randn(32, 64, device="cuda", dtype=torch.bfloat16, requires_grad=True)  # the last hidden states
        weight = torch.randn(1000, 64, device="cuda", dtype=torch.bfloat16, requires_grad=True)  # the head of the model
        target = torch.randint(0, 1000, (32,), device="cuda")
        loss = tkq.linear_cross_entropy(x, weight, target)  # () float32
        loss.backward()
    """
    ignore_index, reduction, label_smoothing, z_loss = _OPTIONS(ignore_index, reduction, label_smoothing, z_loss)
    terms = Terms(class_weight, ignore_index, reduction, label_smoothing, z_loss, cap("linear_cross_entropy", softcap))
    if ops.traced() or autocast.on():
        x, weight = autocast.lowered(x, weight)
    _check(x, weight, target, terms)
    mode = ops.route(x, weight, target, class_weight)
    if mode == "direct":
        return _forward(x, weight, target, *terms, False, False)[0]
    check.refuse_gradient("linear_cross_entropy", class_weight=class_weight)
    check.refuse_tangent("linear_cross_entropy", x=x, weight=weight)
    record = torch.is_grad_enabled() and not ops.traced_by_jit()  # then the backward computes them
    call = _Function.apply if mode == "record" else _op
    return call(x, weight, target, *terms, record and x.requires_grad, record and weight.requires_grad)[0]


def _check(x, weight, target, terms):
    """Everything that the function promises to refuse. A call is milliseconds, so it is always made."""
    _TENSORS(x, weight)
    for name, t in (("x", x), ("weight", weight)):
        check.last_dim_contiguous(name, t)
    check.rank("weight", weight, 2)
    if x.dim() == 0:
        raise ValueError("x: got shape (), allowed are (..., K)")
    if x.shape[-1] != weight.shape[1] or x.dtype != weight.dtype:
        raise ValueError(f"weight: is {tuple(weight.shape)} {weight.dtype}, x is {tuple(x.shape)} {x.dtype}; allowed "
                         "are (V, K) and (..., K) of one dtype")
    if x.shape[-1] % 8 or not x.shape[-1]:
        raise ValueError(f"x: got shape {tuple(x.shape)}: K is {x.shape[-1]}, allowed are multiples of 8")
    if not weight.shape[0]:
        raise ValueError(f"weight: got shape {tuple(weight.shape)}, allowed are (V, K) with V of 1 and more")
    check_classes(weight.shape[0], x.shape[:-1], target, terms, ("weight", "class_weight"))
    check.same_device(x=x, weight=weight, target=target, class_weight=terms.weight)


# ---- the ops --------------------------------------------------------------------------------------------------------


def _layer(x, weight, target):
    return Layer(x if x.dim() == 2 else x.reshape(-1, x.shape[-1]), weight, launch.flat(target))


def _cuda(x: Tensor, weight: Tensor, target: Tensor, class_weight: Optional[Tensor], ignore_index: int, reduction: str,
          label_smoothing: float, z_loss: float, softcap: float, grad_x: bool,
          grad_weight: bool) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    terms = Terms(class_weight, ignore_index, reduction, label_smoothing, z_loss, softcap)
    found = linear.forward(_layer(x, weight, target), terms, grad_x, grad_weight)
    return tuple(found._replace(loss=found.loss.view(target.shape) if reduction == "none" and target.dim() != 1
                                else found.loss))


def _cpu(x, weight, target, class_weight, ignore_index, reduction, label_smoothing, z_loss, softcap, grad_x,
         grad_weight):
    terms = Terms(class_weight, ignore_index, reduction, label_smoothing, z_loss, softcap)
    found = _empty(x, weight, target, reduction, grad_x, grad_weight)
    found.loss.copy_(reference.linear_cross_entropy(x, weight, target, terms))
    for nothing in (found.saved, found.all):
        nothing.zero_()
    if reduction != "none" and (grad_x or grad_weight):
        one = torch.ones((), device=x.device)
        factor = 1.0 if reduction == "sum" else 1 / linear.gradient_factor(terms, x, one,
                                                                         _inverse(weight, target, terms)[None])
        gradients = reference.linear_cross_entropy_backward(x, weight, target, one * factor, terms,
                                                            found.dweight.dtype)
        for to, gradient in zip(found[3:], gradients):
            if to.numel():
                to.copy_(gradient.view(to.shape))
        found.all[0] = _inverse(weight, target, terms)
    return tuple(found)


def _inverse(weight, target, terms):
    one_row = torch.empty(1, weight.shape[0], device=weight.device)
    return 1 / reference.row_weights(one_row, target.reshape(-1), terms).sum()


def _empty(x, weight, target, reduction, grad_x, grad_weight):
    """Results of the right shapes, on x's device."""
    fused = reduction != "none"
    rows, kind = x.numel() // x.shape[-1], torch.float32 if weight.dtype == torch.float16 else weight.dtype
    return Outcome(
        x.new_empty(target.shape if not fused else (), dtype=torch.float32), x.new_empty(2 * rows, dtype=torch.float32),
        x.new_empty(2, dtype=torch.float32), x.new_empty((rows, x.shape[-1]) if fused and grad_x else 0),
        x.new_empty(weight.shape if fused and grad_weight else 0, dtype=kind))


def _fake(x, weight, target, class_weight, ignore_index, reduction, label_smoothing, z_loss, softcap, grad_x,
          grad_weight):
    return tuple(_empty(x, weight, target, reduction, grad_x, grad_weight))


def _forward(x, weight, target, class_weight, ignore_index, *rest):
    if debug.enabled():
        check_targets(target, weight.shape[0], ignore_index)
    return (_cuda if x.is_cuda else _cpu)(x, weight, target, class_weight, ignore_index, *rest)


def _setup(ctx, inputs, output):
    x, weight, target, class_weight, *ctx.terms, ctx.grad_x, ctx.grad_weight = inputs
    found = Outcome(*output)
    ctx.mark_non_differentiable(*found[1:])
    ctx.set_materialize_grads(False)  # or the backward gets zeros as large as x and weight for dx and dweight
    ctx.save_for_backward(x, weight, target, class_weight, *found[1:])
    ctx.handed_out = False


def _backward(ctx, dloss, *_):
    if dloss is None:
        return (None,) * 11
    x, weight, target, class_weight, saved, all, dx, dweight = ctx.saved_tensors
    terms, (needs_x, needs_weight) = Terms(class_weight, *ctx.terms), ctx.needs_input_grad[:2]
    # not computed where the call was traced of other tensors, by torch.jit
    missing = (needs_x and not ctx.grad_x) or (needs_weight and not ctx.grad_weight)
    if terms.reduction == "none" or ctx.handed_out or missing:
        dx, dweight = _recomputed(x, weight, target, dloss, saved, all, terms, needs_x, needs_weight)
    elif ops.route(x, weight, target, dloss) != "op":
        ctx.handed_out = True  # from here on these are the caller's, and what is saved is no longer what it was
        dx, dweight = _multiplied(dx, dweight, linear.gradient_factor(terms, x, dloss, all), weight)
    else:
        factor = linear.gradient_factor(terms, x, dloss, all)
        dx, dweight = (linear.times(g, factor, t.dtype) for g, t in ((dx, x), (dweight, weight)))
    return (dx.view(x.shape) if needs_x else None, dweight if needs_weight else None, *[None] * 9)


def _multiplied(dx, dweight, factor, weight):
    """In place, where that is possible."""
    if not dx.is_cuda:
        return linear.times(dx, factor, dx.dtype), linear.times(dweight, factor, weight.dtype)
    if dx.numel():
        launch.scale_(dx, factor)
    if dweight.dtype != weight.dtype:
        factor = factor.nan_to_num(nan=_MOST, posinf=_MOST, neginf=-_MOST)  # 0 stays 0, the rest is infinite in fp16
        dweight = torch.mul(dweight, factor, out=torch.empty_like(dweight, dtype=weight.dtype))
    elif dweight.numel():
        launch.scale_(dweight, factor)
    return dx.detach(), dweight.detach()  # fresh tensors of that memory, which autograd may keep without a copy


# ---- gradients recomputed ----------------------------------------------------------------------------------------


def _recomputed(x, weight, target, dloss, saved, all, terms, grad_x, grad_weight):
    call = _op_backward
    if ops.route(x, weight, target, dloss) != "op":
        call = _cuda_backward if x.is_cuda else _cpu_backward
    return call(x, weight, target, dloss, saved, all, *terms, grad_x, grad_weight)


def _cuda_backward(x: Tensor, weight: Tensor, target: Tensor, dloss: Tensor, saved: Tensor, all: Tensor,
                   class_weight: Optional[Tensor], ignore_index: int, reduction: str, label_smoothing: float,
                   z_loss: float, softcap: float, grad_x: bool, grad_weight: bool) -> tuple[Tensor, Tensor]:
    terms = Terms(class_weight, ignore_index, reduction, label_smoothing, z_loss, softcap)
    dloss = dloss.reshape(-1) if reduction == "none" else dloss
    return linear.backward(_layer(x, weight, target), terms, dloss, saved, all, grad_x, grad_weight)


def _cpu_backward(x, weight, target, dloss, saved, all, *rest):
    *terms, grad_x, grad_weight = rest
    dx, dweight = reference.linear_cross_entropy_backward(x, weight, target, dloss, Terms(*terms))
    return (dx.reshape(-1, x.shape[-1]).contiguous() if grad_x else x.new_empty(0),
            dweight if grad_weight else x.new_empty(0))


def _fake_backward(x, weight, target, dloss, saved, all, *rest):
    *_, grad_x, grad_weight = rest
    return (x.new_empty((x.numel() // x.shape[-1], x.shape[-1]) if grad_x else 0),
            weight.new_empty(weight.shape if grad_weight else 0))


_op = ops.torch_op("linear_cross_entropy", cuda=_cuda, cpu=_cpu, fake=_fake, setup=_setup, backward=_backward)
_op_backward = ops.torch_op("linear_cross_entropy_backward", cuda=_cuda_backward, cpu=_cpu_backward,
                            fake=_fake_backward)
_Function = ops.eager_function("LinearCrossEntropy", forward=_forward, setup=_setup, backward=_backward,
                               of="linear_cross_entropy")
