"""tkq.cross_entropy: what PyTorch sees of it."""
from typing import Optional

import torch
from torch import Tensor

from ..reference import losses as reference
from ..reference.losses import Terms
from ..runtime import arguments
from ..runtime.call import check, debug, ops
from . import launch
from .checks import check_call, check_targets

_WORDS = "ignore_index", "reduction", "label_smoothing", "z_loss"
_OPTIONS = arguments.checker("cross_entropy", *_WORDS, "inplace_backward")
_OPTIONS_OF_BOTH = arguments.checker("cross_entropy_and_gradient", *_WORDS, "inplace")
_CAPS = {name: arguments.checker(name, "softcap") for name in ("cross_entropy", "cross_entropy_and_gradient",
                                                               "linear_cross_entropy")}


def cross_entropy(logits: Tensor, target: Tensor, *, weight: Optional[Tensor] = None, ignore_index: int = -100,
                  reduction: str = "mean", label_smoothing: float = 0.0, z_loss: float = 0.0,
                  softcap: Optional[float] = None, inplace_backward: bool = False) -> Tensor:
    """Cross entropy between logits and classes; differentiable once, in logits. As torch.nn.functional.cross_entropy,
    where that has the option, but classes always lie in the last dimension.

    Of a row x with target t and class weights w (1 where none are given):
        z = softcap * tanh(x / softcap), or x without a softcap; lse = log(sum(exp(z)))
        loss = (1 - label_smoothing) * w[t] * (lse - z[t]) + label_smoothing / V * sum(w * (lse - z)) + z_loss * lse^2
    "mean" is the sum of the rows' losses over the sum of w[t] of the rows that are not ignored.
    Computed in float32 from one read of the logits; rows are added up in a fixed order.

    Args:
        logits: (..., V), bf16, fp16 or fp32, V from 1 to 524288, odd ones too; last dimension contiguous. Rows may be
            any distance apart: a view x[:, :V] is read in place. Leading dimensions that no single row stride describes
            are copied first.
        target: (...), int32 or int64: classes, or ignore_index. A row with any other number, however far from the
            classes, has the loss NaN, and a gradient of NaN; nothing outside the row is read or written for it. With
            class weights it makes the mean NaN for all rows, as its own weight is not known. Inside
            ``tkq.runtime.call.debug.checks()`` it is an IndexError (which waits for the GPU).
        weight: (V,), contiguous, bf16, fp16 or fp32. Not differentiable.
        ignore_index: rows with this target have the loss 0, the gradient 0 and no part in the mean. Any 64-bit integer,
            also a class.
        reduction: "none", "mean" or "sum". The mean of no rows, or of ignored ones only, is NaN, and its gradient 0.
            Where all weights that count are 0, both are NaN, but for the gradient of ignored rows.
        label_smoothing: from 0 to 1 (Szegedy et al., 2015).
        z_loss: what the square of lse is multiplied by, before the reduction (Chowdhery et al., PaLM, 2022).
        softcap: above 0 (Gemma 2, 2024). With it, z is good to softcap * 2^-22.
        inplace_backward: in eager mode on a GPU the backward writes the gradient over the logits, which saves that much
            memory. Nothing else may need the logits then; where autograd does, it says so. Not for logits that are a
            leaf with a gradient: its own numbers would be gone. torch.compile decides for itself, and on the CPU
            the gradient is always a tensor of its own.

    Returns:
        float32: () or, for reduction "none", of target's shape.

    Raises:
        TypeError: logits or weight is no dense tensor of bf16, fp16 or fp32; target is no dense tensor of int32 or
            int64; ignore_index is no int; reduction is no word; label_smoothing, z_loss or softcap is no number;
            inplace_backward is no bool.
        ValueError: ignore_index is outside -2^63 to 2^63 - 1; reduction is another word; label_smoothing is outside 0
            to 1; softcap is not above 0; a number that is not finite in float32; shapes that do not match, several
            devices, a last dimension that is not contiguous, no classes; inplace_backward with logits that share
            memory, as of expand.
        NotImplementedError: V > 524288; a gradient of weight asked for.
        IndexError: see target.
        RuntimeError: a GPU other than Hopper; inplace_backward with a leaf that requires a gradient, or a view of one.

    CPU tensors take ``tkq.reference.losses.cross_entropy``.

    Example::

        logits = torch.randn(32, 1000, device="cuda", dtype=torch.bfloat16, requires_grad=True)
        target = torch.randint(0, 1000, (32,), device="cuda")
        loss = tkq.cross_entropy(logits, target, label_smoothing=0.1, z_loss=1e-4)  # () float32
        loss.backward()
    """
    softcap = 0.0 if softcap is None else cap("cross_entropy", softcap)
    if inplace_backward is False and not (ops.traced() or debug.enabled()):
        found = launch.call_cache.take(logits, target, weight, ignore_index, reduction, label_smoothing, z_loss,
                                       softcap,
                                       False)
        if found is not None:
            return found[0]
    ignore_index, reduction, label_smoothing, z_loss, inplace_backward = _OPTIONS(
        ignore_index, reduction, label_smoothing, z_loss, inplace_backward)
    terms = weight, ignore_index, reduction, label_smoothing, z_loss, softcap  # a Terms, without its cost
    mode = ops.route(logits, target, weight)
    if mode == "direct":
        return (launch.forward(logits, target, terms, False) if logits.is_cuda else _on_cpu(logits, target, terms))[0]
    if weight is not None:
        check.refuse_gradient("cross_entropy", weight=weight)
    if mode == "record":
        if inplace_backward:
            check.refuse_leaf("cross_entropy", logits=logits)
            check.refuse_overlap("cross_entropy", logits=logits)
        return _Recorded.apply(logits, target, terms, inplace_backward)
    check.refuse_tangent("cross_entropy", logits=logits)
    check_call(logits, target, Terms(*terms))  # here too: the dispatcher's own words name no argument
    return _op(logits, target, *terms, inplace_backward)[0]


def cap(op: str, softcap) -> float:
    """A public function's softcap as the kernels have it: 0 for none."""
    return 0.0 if softcap is None else _CAPS[op](softcap)


def cross_entropy_and_gradient(logits: Tensor, target: Tensor, *, weight: Optional[Tensor] = None,
                               ignore_index: int = -100, reduction: str = "mean", label_smoothing: float = 0.0,
                               z_loss: float = 0.0, softcap: Optional[float] = None, inplace: bool = False) -> tuple:
    """(loss, its gradient for logits), in one read and one write of rows that stay on the chip: two thirds of what
    ``cross_entropy`` and its backward move. For code that goes on with ``logits.backward(gradient)``: autograd records
    nothing here.

    reduction: "mean" or "sum". inplace: the gradient is written over the logits, no two of which may share memory;
    autograd follows as for any in-place operation. Otherwise as ``tkq.cross_entropy``, which does not do this by
    itself: its logits stay what they are until the backward, whatever is done in between.

    Raises:
        TypeError: logits or weight is no dense tensor of bf16, fp16 or fp32; target is no dense tensor of int32 or
            int64; ignore_index is no int; reduction is no word; label_smoothing, z_loss or softcap is no number;
            inplace is no bool.
        ValueError: ignore_index is outside -2^63 to 2^63 - 1; reduction is another word; label_smoothing is outside 0
            to 1; softcap is not above 0; a number that is not finite in float32; shapes that do not match, several
            devices, a last dimension that is not contiguous, no classes; inplace with logits that share memory.
        NotImplementedError, IndexError: as ``tkq.cross_entropy``.
        RuntimeError: a GPU other than Hopper; inplace with a leaf that requires a gradient, or a view of one, where
            gradients are recorded.

    Example::

        x = torch.randn(32, 64, device="cuda", requires_grad=True)
        logits = x @ torch.randn(64, 1000, device="cuda")
        target = torch.randint(0, 1000, (32,), device="cuda")
        loss, gradient = tkq.cross_entropy_and_gradient(logits.detach(), target)  # () float32; (32, 1000) float32
        logits.backward(gradient)
    """
    ignore_index, reduction, label_smoothing, z_loss, inplace = _OPTIONS_OF_BOTH(
        ignore_index, reduction, label_smoothing, z_loss, inplace)
    terms = Terms(weight, ignore_index, reduction, label_smoothing, z_loss, cap("cross_entropy_and_gradient", softcap))
    check_call(logits, target, terms)
    if weight is not None:
        check.refuse_gradient("cross_entropy_and_gradient", weight=weight)
    if inplace and not ops.traced():  # there torch copies, and says so itself
        if torch.is_grad_enabled():
            check.refuse_leaf("cross_entropy_and_gradient", logits=logits)
        check.refuse_overlap("cross_entropy_and_gradient", logits=logits)
        check.refuse_inference("cross_entropy_and_gradient", logits=logits)
    traced = ops.route(logits, target, weight) == "op"
    if traced:
        check.refuse_tangent("cross_entropy_and_gradient", logits=logits)
    with torch.no_grad():
        if traced:
            loss, gradient = _op_both(logits.detach(), target, *terms)  # torch.jit.trace keeps no grad mode
            return loss, logits.copy_(gradient) if inplace else gradient
        if logits.is_cuda:
            return launch.both(logits, target, terms, inplace)
        loss, _ = _on_cpu(logits, target, terms)
        gradient = reference.cross_entropy_backward(logits, target, torch.ones((), device=logits.device), terms)
        return loss, logits.copy_(gradient) if inplace else gradient


# ---- the CPU, what the dispatcher sees, gradients -------------------------------------------------------------------


def _on_cpu(logits, target, terms):
    terms = Terms(*terms)
    check_call(logits, target, terms)
    if debug.enabled():
        check_targets(target, logits.shape[-1], terms.ignore_index)
    rows = logits.numel() // logits.shape[-1]
    loss = reference.cross_entropy(logits, target, terms).to(torch.float32, copy=True)  # no view
    return loss, torch.zeros(launch.saved_size(rows, terms.reduction), device=logits.device)


def _cuda(logits: Tensor, target: Tensor, weight: Optional[Tensor], ignore_index: int, reduction: str,
          label_smoothing: float, z_loss: float, softcap: float, inplace: bool) -> tuple[Tensor, Tensor]:
    terms = Terms(weight, ignore_index, reduction, label_smoothing, z_loss, softcap)
    loss, saved = _launched(logits, target, terms)
    for unwritten in _unwritten(saved, logits.numel() // logits.shape[-1], terms):
        unwritten.zero_()  # a result of an op is the same in each call
    return loss, saved


def _unwritten(saved, rows, terms):
    """The parts of what a forward saves that no backward reads, and that it does not always write."""
    of_mean, of_classes, losses = (2 * rows + n for n in range(3))  # see `class_rows.Saved`
    if not rows:
        return [saved]
    if terms.label_smoothing and terms.reduction != "mean":
        return [saved[of_mean:of_classes], saved[losses:]]
    return [saved[losses if terms.label_smoothing else of_classes if terms.reduction == "mean" else of_mean:]]


def _launched(logits, target, terms):
    found = None if debug.enabled() else launch.call_cache.take(logits, target, *terms, True)
    return found or launch.forward(logits, target, terms)


def _cpu(logits, target, weight, ignore_index, reduction, label_smoothing, z_loss, softcap, inplace):
    return _on_cpu(logits, target, Terms(weight, ignore_index, reduction, label_smoothing, z_loss, softcap))


def _fake(logits, target, weight, ignore_index, reduction, label_smoothing, z_loss, softcap, inplace):
    rows = logits.numel() // logits.shape[-1]
    return (logits.new_empty(target.shape if reduction == "none" else (), dtype=torch.float32),
            logits.new_empty(launch.saved_size(rows, reduction), dtype=torch.float32))


def _setup(ctx, inputs, output):
    logits, target, weight, *ctx.terms, _ = inputs
    ctx.mark_non_differentiable(output[1])
    ctx.set_materialize_grads(False)  # no zeros for what has no gradient
    ctx.save_for_backward(logits, target, weight, output[1])


def _backward(ctx, dloss, _):
    if dloss is None:
        return (None,) * 9
    logits, target, weight, saved = ctx.saved_tensors
    return _op_backward(logits, target, dloss, saved, weight, *ctx.terms), *[None] * 8


def _record(ctx, logits, target, terms, inplace):
    """The same in plain eager mode, past the dispatcher."""
    loss, saved = (_launched if logits.is_cuda else _on_cpu)(logits, target, terms)
    ctx.terms, ctx.inplace = terms, inplace
    ctx.save_for_backward(logits, target, terms[0], saved)
    return loss


def _recorded_backward(ctx, dloss):
    logits, target, weight, saved = ctx.saved_tensors
    if ops.route(logits, target, weight, dloss) == "op":
        dlogits = _op_backward(logits, target, dloss, saved, *ctx.terms)
    elif logits.is_cuda:
        dlogits = launch.backward(logits, target, dloss, saved, ctx.terms, ctx.inplace)
        if ctx.inplace:
            torch.autograd.graph.increment_version(logits)  # any other backward that saved them raises
    else:
        dlogits = _cpu_backward(logits, target, dloss, saved, *ctx.terms)
    return dlogits, None, None, None


def _cuda_backward(logits: Tensor, target: Tensor, dloss: Tensor, saved: Tensor, weight: Optional[Tensor],
                   ignore_index: int, reduction: str, label_smoothing: float, z_loss: float, softcap: float) -> Tensor:
    terms = Terms(weight, ignore_index, reduction, label_smoothing, z_loss, softcap)
    return launch.backward(logits, target, dloss, saved, terms)


def _cpu_backward(logits, target, dloss, saved, weight, *terms):
    gradient = reference.cross_entropy_backward(logits, target, dloss, Terms(weight, *terms))
    return logits.new_empty_strided(logits.shape, launch.gradient_stride(logits)).copy_(gradient)


def _fake_backward(logits, target, dloss, saved, weight, *terms):
    return logits.new_empty_strided(logits.shape, launch.gradient_stride(logits))


def _cuda_both(logits: Tensor, target: Tensor, weight: Optional[Tensor], ignore_index: int, reduction: str,
               label_smoothing: float, z_loss: float, softcap: float) -> tuple[Tensor, Tensor]:
    terms = Terms(weight, ignore_index, reduction, label_smoothing, z_loss, softcap)
    return launch.both(logits, target, terms, False)


def _cpu_both(logits, target, *terms):
    loss, saved = _on_cpu(logits, target, terms)
    return loss, _cpu_backward(logits, target, torch.ones((), device=logits.device), saved, *terms)


def _fake_both(logits, target, *terms):
    return logits.new_empty((), dtype=torch.float32), _fake_backward(logits, target, None, None, *terms)


_op = ops.torch_op("cross_entropy", cuda=_cuda, cpu=_cpu, fake=_fake, setup=_setup, backward=_backward)
_op_backward = ops.torch_op("cross_entropy_backward", cuda=_cuda_backward, cpu=_cpu_backward, fake=_fake_backward)
_op_both = ops.torch_op("cross_entropy_and_gradient", cuda=_cuda_both, cpu=_cpu_both, fake=_fake_both)
_Recorded = ops.eager_function("CrossEntropy", forward=_record, backward=_recorded_backward, of="cross_entropy")
