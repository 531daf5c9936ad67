"""The baselines of softmax and the losses.

Called as the question says: softmax (x); softmax_backward (y, dy); cross_entropy and cross_entropy_mean (logits,
target); cross_entropy_backward (logits, target, dloss, saved, lse), where saved is what tkq's forward keeps; both, the
sum of the losses and its gradient (logits, target); linear_cross_entropy (x, weight, target) with its backward.

Liger's cross entropy makes loss and gradient at once, and writes the gradient over the logits, which the others read
too: it comes last. Its host waits for the GPU in every call.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.nn.functional as F

from bench.peers import liger_cute
from bench.peers.common import _compiled, copied
from tkq.losses import launch
from tkq.reference.losses import Terms

# ---- softmax --------------------------------------------------------------------------------------------------------


def _softmax(x):
    return torch.softmax(x, -1)


def _softmax_backward(y, dy):
    w, g = y.float(), dy.float()
    return (w * (g - (g * w).sum(-1, keepdim=True))).to(y.dtype)


def _quack_softmax() -> Callable:
    from quack.softmax import softmax_fwd

    return softmax_fwd


def _quack_softmax_backward() -> Callable:
    from quack.softmax import softmax_bwd

    return lambda y, dy: softmax_bwd(dy, y)


def _liger_softmax() -> Callable:
    from liger_kernel.ops.softmax import _softmax_forward

    return lambda x: _softmax_forward(x)[0]


def _liger_softmax_backward() -> Callable:
    from liger_kernel.ops.softmax import _softmax_backward
    from liger_kernel.ops.utils import calculate_settings

    return lambda y, dy: _softmax_backward(dy, y, *calculate_settings(y.shape[-1]), False)


def _torch_softmax_backward() -> Callable:
    return lambda y, dy: torch.ops.aten._softmax_backward_data(dy, y, -1, y.dtype)


# ---- cross entropy --------------------------------------------------------------------------------------------------


def _losses(logits, target):
    return F.cross_entropy(logits.float(), target, reduction="none")


def _mean(logits, target):
    return F.cross_entropy(logits.float(), target)


def _gradient(logits, target, dloss, lse):
    p = torch.exp(logits.float() - lse[:, None])
    hit = torch.arange(logits.shape[1], device=logits.device) == target[:, None]
    return ((p - hit.float()) * dloss[:, None]).to(logits.dtype)


def _compiled_gradient() -> Callable:
    gradient = _compiled(_gradient)
    return lambda logits, target, dloss, saved, lse: gradient(logits, target, dloss, lse)


def _both(logits, target):
    w = logits.float()
    lse = w.logsumexp(-1)
    loss = (lse - w.gather(1, target[:, None])[:, 0]).sum()
    hit = torch.arange(logits.shape[1], device=logits.device) == target[:, None]
    return loss, (torch.exp(w - lse[:, None]) - hit.float()).to(logits.dtype)


def _apart(logits, target):
    """tkq's forward and backward, one after the other."""
    terms = Terms(reduction="sum")
    loss, saved = launch.forward(logits, target, terms)
    one = torch.ones((), device=logits.device)
    return loss, launch.backward(logits, target, one, saved, terms)


def _quack_losses() -> Callable:
    from quack.cross_entropy import cross_entropy_fwd

    return lambda logits, target: cross_entropy_fwd(logits, target)


def _quack_mean() -> Callable:
    from quack.cross_entropy import cross_entropy

    return lambda logits, target: cross_entropy(logits, target)


def _quack_backward() -> Callable:
    from quack.cross_entropy import cross_entropy_bwd

    return lambda logits, target, dloss, saved, lse: cross_entropy_bwd(logits, target, dloss, lse)


def _quack_both() -> Callable:
    from quack.cross_entropy import cross_entropy_fwd

    return lambda logits, target: _summed(*cross_entropy_fwd(logits, target, return_dx=True))


def _liger_both() -> Callable:
    from liger_kernel.transformers.functional import liger_cross_entropy

    def both(logits, target):
        loss = liger_cross_entropy(logits.detach().requires_grad_(), target, reduction="sum")
        return loss, logits

    return both


def _summed(losses, gradient):
    return losses.sum(), gradient


# ---- of a linear layer ----------------------------------------------------------------------------------------------


def with_gradients(loss_of: Callable) -> Callable:
    """(loss, dx, dweight) of a loss of (x, weight, target)."""

    def run(x, weight, target):
        with torch.enable_grad():
            x, weight = x.detach().requires_grad_(), weight.detach().requires_grad_()
            loss = loss_of(x, weight, target)
            return loss.detach(), *torch.autograd.grad(loss, (x, weight))

    return run


def _torch_linear() -> Callable:
    return with_gradients(lambda x, weight, target: F.cross_entropy(F.linear(x, weight), target))


def _quack_linear() -> Callable:
    from quack.linear_cross_entropy import chunked_linear_cross_entropy

    return with_gradients(chunked_linear_cross_entropy)


def _liger_linear() -> Callable:
    from liger_kernel.ops.fused_linear_cross_entropy import LigerFusedLinearCrossEntropyFunction as Function

    def loss(x, weight, target):
        found = Function.apply(x, weight, target)
        return found[0] if isinstance(found, tuple) else found

    return with_gradients(loss)


PEERS: dict[str, dict[str, Callable[..., Callable]]] = liger_cute.added_to({
    "softmax": {
        "copy": lambda: lambda x: copied(x),
        "QuACK": _quack_softmax,
        "Liger": _liger_softmax,
        "torch": lambda: _softmax,
        "torch.compile": lambda: _compiled(_softmax),
    },
    "softmax_backward": {
        "add": lambda: torch.add,
        "QuACK": _quack_softmax_backward,
        "Liger": _liger_softmax_backward,
        "torch": _torch_softmax_backward,
        "torch.compile": lambda: _compiled(_softmax_backward),
    },
    "cross_entropy": {
        "QuACK": _quack_losses,
        "torch": lambda: _losses,
        "torch.compile": lambda: _compiled(_losses),
    },
    "cross_entropy_mean": {
        "QuACK": _quack_mean,
        "torch": lambda: _mean,
        "torch.compile": lambda: _compiled(_mean),
    },
    "cross_entropy_backward": {
        "copy": lambda: lambda logits, target, dloss, saved, lse: copied(logits),
        "QuACK": _quack_backward,
        "torch.compile": _compiled_gradient,
    },
    "both": {
        "copy": lambda: lambda logits, target: copied(logits),
        "tkq apart": lambda: _apart,
        "QuACK": _quack_both,
        "torch.compile": lambda: _compiled(_both),
        "Liger": _liger_both,
    },
    "linear_cross_entropy": {
        "QuACK": _quack_linear,
        "Liger": _liger_linear,
        "torch": _torch_linear,
    },
})
