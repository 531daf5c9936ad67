"""Several linear layers of one input: q, k and v; gate and up."""
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from ..runtime import ops
from ..runtime.check import under_autocast


def together(x: Tensor, *layers: nn.Linear) -> list[Tensor]:
    """[layer(x) for layer in layers], where plain layers' gradients of x are added up by the products themselves,
    instead of each being written and read once more."""
    plain = all(type(layer) is nn.Linear and layer.bias is None and not _hooked(layer) for layer in layers)
    if not plain or under_autocast(x.device.type) or not ops.recording(x, *(layer.weight for layer in layers)):
        return [layer(x) for layer in layers]
    rows = x.reshape(-1, x.shape[-1])
    results = _Together.apply(rows, *(layer.weight for layer in layers))
    return [y.view(*x.shape[:-1], -1) for y in results]


def _hooked(layer):
    return layer._forward_hooks or layer._forward_pre_hooks or layer._backward_hooks or layer._backward_pre_hooks


def _forward(ctx, x, *weights):
    ctx.save_for_backward(x, *weights)
    ctx.set_materialize_grads(False)
    return tuple(F.linear(x, weight) for weight in weights)


def _backward(ctx, *dys):
    x, *weights = ctx.saved_tensors
    dx, dweights = None, []
    for i, (dy, weight) in enumerate(zip(dys, weights)):
        needed = dy is not None and ctx.needs_input_grad[1 + i]
        dweights.append(torch.mm(dy.t(), x) if needed else None)
        if dy is not None and ctx.needs_input_grad[0]:
            dx = torch.mm(dy, weight) if dx is None else dx.addmm_(dy, weight)
    return dx, *dweights


_Together = ops.eager_function("LinearsTogether", forward=_forward, backward=_backward)
