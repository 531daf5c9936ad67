"""causal-conv1d's functions on tkq: its names and order of arguments (of 1.6).

    from tkq.integrations.causal_conv1d import causal_conv1d_fn, causal_conv1d_update, causal_conv1d_varlen_states

Tensors are (B, dim, S), as that package has them, of any of its two orders in memory. bf16, fp16 and fp32, W from 2 to
8: see `tkq.causal_conv1d` and `tkq.causal_conv1d_step`, whose errors say what these do not take. Refused by name, with
NotImplementedError: ``cache_seqlens``, of states that are ring buffers.
"""
from __future__ import annotations

import functools

import torch
from torch import Tensor

from .. import causal_conv1d, causal_conv1d_step
from ..convolution.states import final_state
from ..runtime.call import check, memory, ops

__all__ = ["causal_conv1d_fn", "causal_conv1d_update", "causal_conv1d_varlen_states"]

FN, UPDATE, STATES = __all__
# what tkq's functions and their arguments are called here
_OF_FN = ("causal_conv1d:", f"{FN}:"), ("initial_state", "initial_states"), (
    "output_final_state", "return_final_states")
_OF_UPDATE = ("causal_conv1d_step", UPDATE), ("conv_states", "conv_state"), ("cache_indices", "conv_state_indices")


def causal_conv1d_fn(x: Tensor, weight: Tensor, bias: Tensor | None = None, seq_idx: Tensor | None = None,
                     initial_states: Tensor | None = None, return_final_states: bool = False,
                     final_states_out: Tensor | None = None, activation: str | None = None):
    """`tkq.causal_conv1d` of x (B, dim, S). seq_idx: (B, S), int32: neighbouring tokens of one number are a sequence,
    which sees no other. (Numbers below 0 are numbers like others here; causal-conv1d gives zeros for them.) As there,
    it goes without states. final_states_out: where the final states are written, (B, dim, W - 1), bf16, fp16 or fp32,
    with return_final_states; its elements lie apart from one another, and from those of x, weight and bias.

    Returns out (B, dim, S), or (out, final states)."""
    check.tensor(f"{FN}: x", x)
    check.rank(f"{FN}: x", x, 3)
    check.flag(f"{FN}: return_final_states", return_final_states)
    activation, tokens = _activation(FN, activation), x.mT
    if final_states_out is not None:
        if not return_final_states:
            raise ValueError(f"{FN}: final_states_out is given, allowed is with return_final_states")
        _check_out(final_states_out, x, weight, bias, initial_states)
    if seq_idx is None:
        found = _named(_OF_FN, causal_conv1d, tokens, weight, bias, activation, initial_states, return_final_states)
        if not return_final_states:
            return found.mT
        y, final = found
        return y.mT, final if final_states_out is None else final_states_out.copy_(final)
    if initial_states is not None or return_final_states:
        raise ValueError(f"{FN}: seq_idx is given, allowed are initial_states None and return_final_states False")
    check.dtype(f"{FN}: seq_idx", seq_idx, ("int32", "int64"))
    check.shape(f"{FN}: seq_idx", seq_idx, tuple(tokens.shape[:2]))
    return _named(_OF_FN, functools.partial(causal_conv1d, seq_idx=seq_idx), tokens, weight, bias, activation).mT


def _check_out(out, x, weight, bias, states):
    """It is written behind the op, which knows nothing of it."""
    check.dtype(f"{FN}: final_states_out", out, ("bf16", "fp16", "fp32"))
    check.tensor(f"{FN}: weight", weight)
    check.rank(f"{FN}: weight", weight, 2)
    check.shape(f"{FN}: final_states_out", out, (*x.shape[:2], weight.shape[1] - 1))
    check.same_device(x=x, final_states_out=out)
    check.refuse_overlap(FN, final_states_out=out)
    if ops.route(x, weight, bias, states, out) == "op":  # tracers' tensors have no memory
        return
    memory.refuse_shared(FN, {"final_states_out": out}, dict(x=x, weight=weight, bias=bias))
    check.refuse_inference(FN, final_states_out=out)
    if torch.is_grad_enabled():
        check.refuse_leaf(FN, final_states_out=out)


def causal_conv1d_update(x: Tensor, conv_state: Tensor, weight: Tensor, bias: Tensor | None = None,
                         activation: str | None = None, cache_seqlens: Tensor | None = None,
                         conv_state_indices: Tensor | None = None) -> Tensor:
    """`tkq.causal_conv1d_step` of x (B, dim) or (B, dim, T). conv_state (B, dim, L), L of W - 1 and more, is updated in
    place: tokens move down, and the last L stay.

    cache_seqlens: None. Numbers of tokens, with which conv_state would be a ring buffer that begins at cache_seqlens
    modulo L, are refused with NotImplementedError. Returns out, of x's shape."""
    check.tensor(f"{UPDATE}: x", x)
    check.rank(f"{UPDATE}: x", x, 2, 3)
    if cache_seqlens is not None:
        raise NotImplementedError(f"{UPDATE}: cache_seqlens: got a {type(cache_seqlens).__name__}, supported is None")
    y = _named(_OF_UPDATE, causal_conv1d_step, x if x.dim() == 2 else x.mT, conv_state, weight, bias,
               _activation(UPDATE, activation), conv_state_indices)
    return y if x.dim() == 2 else y.mT


def causal_conv1d_varlen_states(x: Tensor, cu_seqlens: Tensor, state_len: int) -> Tensor:
    """The last tokens of packed sequences, as states to go on from with `causal_conv1d_update`.

    Args:
        x: (tokens, dim), bf16, fp16 or fp32, any strides.
        cu_seqlens: (batch + 1,), int32 or int64, where sequences begin and end, rising. It stays on the GPU; whatever
            it says, nothing is read outside x: numbers beyond the tokens are their number, one below a number before
            it is that one.
        state_len: tokens of a state, from 1 on.

    Returns:
        (batch, dim, state_len) of x's type, contiguous: the last state_len tokens of each sequence, the latest last;
        zeros in front of those of a shorter one. Differentiable in x.

    Raises:
        TypeError, ValueError: other types, shapes, devices; state_len below 1.

    Source: causal-conv1d's function of that name. In plain PyTorch, on any device.

    Example::

        cu_seqlens = torch.tensor([0, 5, 7], device="cuda", dtype=torch.int32)
        states = causal_conv1d_varlen_states(torch.randn(7, 64, device="cuda"), cu_seqlens, 3)  # (2, 64, 3)
    """
    check.dtype(f"{STATES}: x", x, ("bf16", "fp16", "fp32"))
    check.rank(f"{STATES}: x", x, 2)
    check.dtype(f"{STATES}: cu_seqlens", cu_seqlens, ("int32", "int64"))
    check.rank(f"{STATES}: cu_seqlens", cu_seqlens, 1)
    if not cu_seqlens.shape[0]:
        raise ValueError(f"{STATES}: cu_seqlens: has no numbers, allowed are 1 and more")
    check.same_device(x=x, cu_seqlens=cu_seqlens)
    check.size(f"{STATES}: state_len", state_len)
    return final_state(x[None], None, cu_seqlens, state_len + 1)


def _named(names, function, *given):
    """A call whose errors have the names that these functions have: asked beforehand, each call would pay for it."""
    try:
        return function(*given)
    except (TypeError, ValueError, NotImplementedError) as error:
        if type(error) not in (TypeError, ValueError, NotImplementedError):
            raise
        words = str(error)
        for theirs, ours in names:
            words = words.replace(theirs, ours)
        raise type(error)(words) from None


def _activation(name, activation):
    if activation not in (None, "silu", "swish"):
        raise ValueError(f"{name}: activation: got {activation!r}, allowed are None, 'silu' and 'swish'")
    return activation and "silu"
