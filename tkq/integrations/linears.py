"""Linear layers that share an input, or whose results are added to something: what a model's module does in one go."""
import torch
from torch import Tensor, nn
from torch.autograd import Function
from torch.nn import functional as F

from .. import gemm
from ..gemm.dense.backward import padded, ready
from ..gemm.dense.ops import multiply
from ..nn import Linear, _gemm_layout
from ..quantize.linear import Fp8Linear
from ..quantize.linear import together as quantised_together
from ..runtime.call import ops
from ..runtime.call.check import under_autocast


def together(x: Tensor, *layers: nn.Module) -> list[Tensor]:
    """[layer(x) for layer in layers]. Of `tkq.nn.Linear` without bias, and of `torch.nn.Linear` in plain eager mode,
    the gradients of x are added up by the products themselves, instead of each being written and read once more. For
    layers in float8, of one recipe, x is quantised once. Any other layers, and layers with hooks or a forward of their
    own (which may bring the weights first), are called one by one."""
    kind = _kind(layers[0])
    if kind is None or under_autocast(x.device.type) or not all(_plain(layer, kind) for layer in layers):
        return [layer(x) for layer in layers]
    if kind is Fp8Linear:
        same = all(layer.recipe == layers[0].recipe for layer in layers)
        return quantised_together(x, layers) if same else [layer(x) for layer in layers]
    ours, weights = kind is Linear, tuple(layer.weight for layer in layers)
    apply = _Together.apply if ops.recording(x, *weights) else _Traced.apply if ours and ops.traced() else None
    if apply is None:
        return [layer(x) for layer in layers]
    rows = x.reshape(-1, x.shape[-1])
    results = apply(ours, _gemm_layout(rows) if ours else rows, *weights)
    return [y.view(*x.shape[:-1], y.shape[-1]) for y in results]


def added(layer: nn.Module, x: Tensor, residual: Tensor) -> Tensor:
    """residual + layer(x), in one kernel where the layer is a `tkq.nn.Linear` without bias."""
    if not _plain(layer, Linear) or under_autocast(x.device.type) or residual.dtype != layer.weight.dtype:
        return residual + layer(x)
    rows, sums = x.reshape(-1, x.shape[-1]), residual.reshape(-1, residual.shape[-1])
    return gemm(rows, layer.weight.t(), c=sums, beta=1.0).view(residual.shape)


def changed(module: nn.Module) -> bool:
    """Does a call of it run more than its class's forward: hooks, or a forward that was set on the module itself, as
    accelerate's to bring weights?"""
    return bool(module._forward_hooks or module._forward_pre_hooks or module._backward_hooks
                or module._backward_pre_hooks or "forward" in module.__dict__)


def _kind(layer):
    """Which of the linear layers that are known here it computes as; None: none of them."""
    if type(layer) is nn.Linear:
        return nn.Linear
    forward = type(layer).forward  # not isinstance: a subclass may compute more
    return Linear if forward is Linear.forward else Fp8Linear if forward is Fp8Linear.forward else None


def _plain(layer, kind):
    """Is it a layer of a kind, without hooks and, but for float8, without bias?"""
    return _kind(layer) is kind and (kind is Fp8Linear or layer.bias is None) and not changed(layer)


def _forward(ctx, ours, x, *weights):
    ctx.save_for_backward(x, *weights)
    ctx.set_materialize_grads(False)
    ctx.ours = ours
    return tuple(gemm(x, w.t()) if ours else F.linear(x, w) for w in weights)


def _backward(ctx, *dys):
    x, *weights = ctx.saved_tensors
    dx, dweights = None, []
    for i, (dy, weight) in enumerate(zip(dys, weights)):
        if dy is not None and ctx.ours:
            dy = ready(dy)
        wanted = dy is not None and ctx.needs_input_grad[2 + i]
        dweights.append((multiply(dy.t(), x, 1.0) if ctx.ours else torch.mm(dy.t(), x)) if wanted else None)
        if dy is None or not ctx.needs_input_grad[1]:
            continue
        if ctx.ours:
            dx = _added_up(dx, dy, weight, dx)
        else:
            dx = torch.mm(dy, weight) if dx is None else dx.addmm_(dy, weight)
    return None, dx, *dweights


def _added_up(dx, dy, weight, out=None):
    """dx + dy @ weight, or without a dx, for any number of outputs."""
    if dx is None:
        return multiply(dy, weight, 1.0)
    if dy.shape[1] % 8:
        dy, weight = padded(dy, weight)
    return gemm(dy, weight, c=dx, beta=1.0, out=out)


_Together = ops.eager_function("LinearsTogether", forward=_forward, backward=_backward,
                               of="tkq.integrations: linear layers of one input")


class _Traced(Function):
    """The same of `tkq.nn.Linear` for torch.compile: nothing is written in place. Why inputs have no names is in
    `Fp8Linear`'s function."""

    @staticmethod
    def forward(ctx, *inputs):
        _, x, *weights = inputs
        ctx.save_for_backward(x, *weights)
        return tuple(gemm(x, w.t()) for w in weights)

    @staticmethod
    def backward(ctx, *dys):
        x, *weights = ctx.saved_tensors
        dx, dys = None, [dy.contiguous() for dy in dys]  # how they lie is not known yet, where this is traced
        for dy, weight in zip(dys, weights) if ctx.needs_input_grad[1] else ():
            dx = _added_up(dx, dy, weight)
        return None, dx, *(multiply(dy.t(), x, 1.0) if wanted else None
                           for dy, wanted in zip(dys, ctx.needs_input_grad[2:]))
