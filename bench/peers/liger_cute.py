"""Liger's kernels in the CuTe DSL, its second implementation next to Triton's: called as bench/peers/common.py and
bench/peers/losses.py call the peers of the same operation. Only this file imports them.

Each is the launcher behind Liger's own dispatch, which beyond the sizes that a kernel takes would quietly run Triton's:
that one is timed as "Liger". What a kernel does not take raises, and is a failure with its reason.
"""

from __future__ import annotations

from collections.abc import Callable

import torch

RMS_EPS, LAYER_EPS = 1e-6, 1e-5
MOST_COLUMNS = 32768  # of a row in most of its kernels
NAME = "Liger CuTe"


def names(columns: int) -> tuple[str, ...]:
    """The peer, of rows that its kernels take."""
    return (NAME,) if columns <= MOST_COLUMNS else ()


def _rmsnorm() -> Callable:
    from liger_kernel.ops.backends._cutedsl.rms_norm import _CASTING_MODE_LLAMA, _rms_norm_cutedsl_forward

    return lambda x, weight, bias: _rms_norm_cutedsl_forward(x, weight, RMS_EPS, 0.0, _CASTING_MODE_LLAMA)[0]


def _layernorm() -> Callable:
    from liger_kernel.ops.backends._cutedsl.layer_norm import _layer_norm_cutedsl_forward

    return lambda x, weight, bias: _layer_norm_cutedsl_forward(x, weight, bias, LAYER_EPS)[0]


def _added() -> Callable:
    from liger_kernel.ops.backends._cutedsl.fused_add_rms_norm import _fused_add_rms_norm_cutedsl_forward
    from liger_kernel.ops.backends._cutedsl.rms_norm import _CASTING_MODE_LLAMA

    return lambda x, residual, weight: _fused_add_rms_norm_cutedsl_forward(
        x, residual, weight, RMS_EPS, 0.0, _CASTING_MODE_LLAMA)[:2]


def _rmsnorm_backward() -> Callable:
    """Not in place: that would overwrite dy, which the others read too."""
    from liger_kernel.ops.backends._cutedsl.rms_norm import _CASTING_MODE_LLAMA, _rms_norm_cutedsl_backward

    return lambda dy, x, weight, rstd, mean: _rms_norm_cutedsl_backward(
        dy, x, weight, rstd, False, _CASTING_MODE_LLAMA)


def _layernorm_backward() -> Callable:
    from liger_kernel.ops.backends._cutedsl.layer_norm import _layer_norm_cutedsl_backward

    return lambda dy, x, weight, rstd, mean: _layer_norm_cutedsl_backward(dy, x, weight, weight, mean, rstd)


def _softmax() -> Callable:
    from liger_kernel.ops.backends._cutedsl.softmax import _softmax_cutedsl_forward

    return lambda x: _softmax_cutedsl_forward(x)[0]


def _softmax_backward() -> Callable:
    from liger_kernel.ops.backends._cutedsl.softmax import _softmax_cutedsl_backward

    return lambda y, dy: _softmax_cutedsl_backward(dy, y)


def _cross_entropy(logits, target, gradient: bool) -> torch.Tensor:
    """The losses of rows; with the gradient, that is written over the logits."""
    from liger_kernel.ops.backends._cutedsl.cross_entropy import cross_entropy_loss_and_grad_cutedsl

    return cross_entropy_loss_and_grad_cutedsl(logits, target, None, -100, 0.0, 0.0, "none", None, len(target),
                                               float(len(target)), 0.0, False, False, False, gradient)[0]


def _losses() -> Callable:
    import liger_kernel.ops.backends._cutedsl.cross_entropy  # noqa: F401  raises where it is not there

    return lambda logits, target: _cross_entropy(logits, target, False)


def _both() -> Callable:
    """On logits of its own, copied once for each set: the gradient is written over them, and the others read them."""
    import liger_kernel.ops.backends._cutedsl.cross_entropy  # noqa: F401

    own = {}

    def both(logits, target):
        key = logits.data_ptr()
        if key not in own:
            own[key] = logits.clone()
        mine = own[key]
        return _cross_entropy(mine, target, True).sum(), mine

    return both


def _linear() -> Callable:
    from liger_kernel.ops.cutedsl.ops.fused_linear_cross_entropy_sm90 import liger_fused_linear_cross_entropy_sm90

    from bench.peers.losses import with_gradients

    return with_gradients(liger_fused_linear_cross_entropy_sm90)


def _rope_qk() -> Callable:
    """In place, with tables (1, S, D) of two equal halves, made before the clock runs: once for each table."""
    from liger_kernel.ops.cutedsl.ops.rope import rope_forward

    whole = {}

    def turn(q, k, cos, sin):
        key = cos.data_ptr()
        if key not in whole:
            whole[key] = [torch.cat((t, t), -1)[None].contiguous() for t in (cos, sin)]
        a, b, _, _ = rope_forward(q.transpose(1, 2), k.transpose(1, 2), *whole[key])
        return a.transpose(1, 2), b.transpose(1, 2)

    return turn


def _swiglu() -> Callable:
    from liger_kernel.ops.backends._cutedsl.swiglu import _swiglu_cutedsl_forward

    return lambda gate, up: _swiglu_cutedsl_forward(gate, up, 1.0, 1.0)[2]


def _swiglu_backward() -> Callable:
    from liger_kernel.ops.backends._cutedsl.swiglu import _swiglu_cutedsl_backward

    return lambda dy, gate, up: _swiglu_cutedsl_backward(dy, gate, up, 1.0, 1.0)


def _geglu() -> Callable:
    from liger_kernel.ops.backends._cutedsl.geglu import _geglu_cutedsl_forward

    return lambda gate, up: _geglu_cutedsl_forward(gate, up)[2]


def _geglu_backward() -> Callable:
    from liger_kernel.ops.backends._cutedsl.geglu import _geglu_cutedsl_backward

    return _geglu_cutedsl_backward


PEERS: dict[str, Callable[[], Callable]] = {
    "rmsnorm": _rmsnorm,
    "layernorm": _layernorm,
    "rmsnorm + residual": _added,
    "rmsnorm_backward": _rmsnorm_backward,
    "layernorm_backward": _layernorm_backward,
    "softmax": _softmax,
    "softmax_backward": _softmax_backward,
    "cross_entropy": _losses,
    "both": _both,
    "linear_cross_entropy": _linear,
    "rope_qk": _rope_qk,
    "swiglu": _swiglu,
    "swiglu backward": _swiglu_backward,
    "geglu_tanh": _geglu,
    "geglu_tanh backward": _geglu_backward,
}


def added_to(found: dict[str, dict[str, Callable]]) -> dict[str, dict[str, Callable]]:
    """These peers of operations, and Liger's in the CuTe DSL of those that it has."""
    return {op: {**named, NAME: PEERS[op]} if op in PEERS else named for op, named in found.items()}
