"""The gradients of attention: from torch tensors to a launch, and what PyTorch's compiler sees of it."""
import math
from typing import Optional

import torch
from torch import Tensor

from tkq import reference_attention
from tkq.attention.backward_plan import plan
from tkq.attention.backward_spec import BackwardSpec
from tkq.attention.plan import length_class
from tkq.attention.spec import DTYPES
from tkq.runtime import Recipe, arch, check, dtypes, function, ops

Window = tuple[Optional[int], Optional[int]]

# what decides the kernels (see _launcher) -> (function, configuration); as many as there are kinds of call
_launchers: dict = {}


def attention_backward(do: Tensor, q: Tensor, k: Tensor, v: Tensor, o: Tensor, lse: Tensor,
                       dlse: Optional[Tensor] = None, *, causal: bool = False, softmax_scale: Optional[float] = None,
                       window_size: Window = (None, None), needs: tuple[bool, bool, bool] = (True, True, True),
                       deterministic: bool = False) -> tuple[Optional[Tensor], Optional[Tensor], Optional[Tensor]]:
    """The gradients of ``flash_attn``, from what it took and gave.

    Args:
        do: the gradient of o. Where its strides do not suit TMA it is copied.
        q, o: (B, Sq, H, D), bfloat16 or float16, D 64, 128 or 256. k, v: (B, Sk, Hk, D). Strides as in ``flash_attn``.
        lse: (B, H, Sq) float32, of any strides. dlse: its gradient, likewise, or None.
        causal, softmax_scale: as in ``flash_attn``.
        window_size: (left, right), how many keys a query sees before and behind the one it is aligned with, key
            i + Sk - Sq for query i, inclusive; None: all. causal is right = 0.
        needs: which of dq, dk and dv are wanted.
        deterministic: the same dq, bit by bit, in each run: it is made by a kernel of its own, which computes the
            scores a second time, 7 products instead of 5. It is else added up in whatever order. dk and dv are the
            same in each run anyhow.

    Returns:
        (dq, dk, dv), contiguous, of the inputs' dtype; None for what is not wanted.

    Raises:
        TypeError, ValueError, NotImplementedError, RuntimeError: as ``flash_attn``; all name the argument.

    Source: Dao et al., FlashAttention, 2022, algorithm 4.
    """
    if not any(needs):
        return None, None, None
    args = do, q, k, v, o, lse, dlse, causal, softmax_scale, *window_size, *needs, deterministic
    if ops.direct(do, q, k, v, o, lse, dlse):
        return _cuda(*args) if q.is_cuda else _cpu(*args)
    check.refuse_gradient("attention_backward", do=do, q=q, k=k, v=v, o=o, lse=lse, dlse=dlse)
    _check(do, q, k, v, o, lse, dlse, softmax_scale, window_size)
    return tuple(x if needed else None for x, needed in zip(_op(*args), needs))


# ---- what can be wrong -----------------------------------------------------------------------------


def _check(do, q, k, v, o, lse, dlse, softmax_scale, window_size):
    for name, x in (("q", q), ("k", k), ("v", v), ("o", o), ("do", do)):
        check.dtype(name, x, DTYPES)
        check.rank(name, x, 4)
        if x.dtype != q.dtype:
            raise TypeError(f"attention_backward: {name} is {x.dtype}, q is {q.dtype}; all must have one dtype")
    check.dtype("lse", lse, ("fp32",))
    if dlse is not None:
        check.dtype("dlse", dlse, ("fp32",))
    check.same_device(q=q, k=k, v=v, o=o, do=do, lse=lse, dlse=dlse)
    batch, rows, heads, head_dim = q.shape
    BackwardSpec(dtypes.name_of(q.dtype), head_dim)
    check.shape("k", k, (batch, None, None, head_dim))
    check.shape("v", v, tuple(k.shape))
    for name, x in (("o", o), ("do", do)):
        check.shape(name, x, tuple(q.shape))
    for name, x in (("lse", lse), *([] if dlse is None else [("dlse", dlse)])):
        check.shape(name, x, (batch, heads, rows))
    kv_heads = k.shape[2]
    if heads and (not kv_heads or heads % kv_heads):
        raise ValueError(f"attention_backward: q has {heads} heads, k has {kv_heads}; q's must be a multiple of k's")
    if softmax_scale is not None:
        check.number("softmax_scale", softmax_scale)
        if not 0 < softmax_scale < math.inf:
            raise ValueError(f"attention_backward: softmax_scale is {softmax_scale}, "
                             "allowed are finite numbers above 0")
    for side in window_size:
        if side is not None and side < 0:
            raise ValueError(f"attention_backward: window_size is {window_size}, allowed are None and numbers from 0")


def takes(x: Tensor) -> bool:
    """Do the strides and the address of x suit TMA: last dimension contiguous, the rest multiples of 16 bytes?"""
    return x.stride(3) == 1 and x.data_ptr() % 16 == 0 and not any(
        x.stride(i) % 8 and x.shape[i] > 1 for i in range(3))


def _check_layout(name, x):
    if not takes(x):
        raise ValueError(f"attention_backward: {name} has strides {x.stride()} and address {x.data_ptr():#x}; its last "
                         "dimension must be contiguous, its address and other strides multiples of 16 bytes: "
                         "call .clone(memory_format=torch.contiguous_format)")


# ---- CUDA ------------------------------------------------------------------------------------------


def _cuda(do, q, k, v, o, lse, dlse, causal, softmax_scale, left, right, need_dq, need_dk, need_dv, deterministic):
    try:
        if not takes(do):
            do = do.clone(memory_format=torch.contiguous_format)
        (batch, rows, heads, _), (_, keys, kv_heads, _) = q.shape, k.shape
        if not (batch and rows and heads and keys):
            return _empty(do, q, k, v, o, lse, dlse, softmax_scale, (left, right), (need_dq, need_dk, need_dv))
        if heads % kv_heads or not (softmax_scale is None or 0 < softmax_scale < math.inf) or min(
                left or 0, right or 0) < 0:
            raise ValueError  # _check says which
        dq = torch.empty(q.shape, dtype=q.dtype, device=q.device) if need_dq else None
        dk = torch.empty(k.shape, dtype=q.dtype, device=q.device)
        dv = torch.empty(k.shape, dtype=q.dtype, device=q.device)
        run(do, q, k, v, o, lse, dq, dk, dv, dlse, causal, softmax_scale, (left, right), deterministic)
    except Exception:
        # The compiled function checks every dtype, shape, stride and address before it launches; the words for a user
        # are found only when something is wrong.
        _check(do, q, k, v, o, lse, dlse, softmax_scale, (left, right))
        for name, x in (("q", q), ("k", k), ("v", v), ("o", o)):
            _check_layout(name, x)
        raise
    return dq, dk if need_dk else None, dv if need_dv else None


def _empty(do, q, k, v, o, lse, dlse, softmax_scale, window_size, needs):
    """No queries, or no keys to see: nothing to launch."""
    _check(do, q, k, v, o, lse, dlse, softmax_scale, window_size)
    return tuple(x.new_zeros(x.shape) if needed else None for x, needed in zip((q, k, v), needs))


def run(do, q, k, v, o, lse, dq, dk, dv, dlse=None, causal=False, softmax_scale=None, window_size=(None, None),
        deterministic=False, config=None):
    """Launch the kernels into dq (B, Sq, H, D; or None), dk and dv (B, Sk, Hk, D), with no more checks than the
    compiled function makes.

    config: a BackwardConfig instead of the plan's: for tests and tuning."""
    batch, rows, heads, head_dim = q.shape
    (left, right), index = window_size, q.get_device()
    right = 0 if causal else right
    length = length_class(k.shape[1])
    key = (q.dtype, head_dim, left is None, right is None, dq is None, dlse is None, deterministic, length, index,
           config)
    launcher = _launchers.get(key)
    if launcher is None:
        launcher = _launchers[key] = _launcher(q, *key[2:8], config)
    kernels, floats = launcher
    scale = head_dim**-0.5 if softmax_scale is None else softmax_scale
    workspace = torch.empty(batch * heads * floats(rows), dtype=torch.float32, device=q.device)
    kernels(do, q, k, v, o, lse, dlse, dq, dk, dv, workspace, scale, left or 0, right or 0)


def _launcher(q, no_left, no_right, no_dq, no_dlse, deterministic, length, config):
    arch.require_hopper(q.device)
    spec = BackwardSpec(dtypes.name_of(q.dtype), q.shape[3], not no_left, not no_right, not no_dq, not no_dlse,
                        bool(deterministic))
    config = config or plan(spec, length)
    kernels = function(Recipe("tkq.attention.backward:build", (spec, config)))
    return kernels, lambda rows: config.workspace_floats(spec, rows)


# ---- CPU, tracing ----------------------------------------------------------------------------------


def _cpu(do, q, k, v, o, lse, dlse, causal, softmax_scale, left, right, need_dq, need_dk, need_dv, deterministic):
    _check(do, q, k, v, o, lse, dlse, softmax_scale, (left, right))
    found = reference_attention.flash_attn_backward(do, q, k, v, o, lse, dlse, causal, softmax_scale, (left, right))
    return tuple(x if needed else None for x, needed in zip(found, (need_dq, need_dk, need_dv)))


# The op returns three tensors always: an empty one for what is not wanted.


def _as_tensors(found, q):
    return tuple(q.new_empty(0) if x is None else x for x in found)


def _op_cuda(do: Tensor, q: Tensor, k: Tensor, v: Tensor, o: Tensor, lse: Tensor, dlse: Optional[Tensor], causal: bool,
             softmax_scale: Optional[float], left: Optional[int], right: Optional[int], need_dq: bool, need_dk: bool,
             need_dv: bool, deterministic: bool) -> tuple[Tensor, Tensor, Tensor]:
    return _as_tensors(_cuda(do, q, k, v, o, lse, dlse, causal, softmax_scale, left, right, need_dq, need_dk, need_dv,
                             deterministic), q)


def _op_cpu(do: Tensor, q: Tensor, k: Tensor, v: Tensor, o: Tensor, lse: Tensor, dlse: Optional[Tensor], causal: bool,
            softmax_scale: Optional[float], left: Optional[int], right: Optional[int], need_dq: bool, need_dk: bool,
            need_dv: bool, deterministic: bool) -> tuple[Tensor, Tensor, Tensor]:
    return _as_tensors(_cpu(do, q, k, v, o, lse, dlse, causal, softmax_scale, left, right, need_dq, need_dk, need_dv,
                            deterministic), q)


def _op_fake(do, q, k, v, o, lse, dlse, causal, softmax_scale, left, right, need_dq, need_dk, need_dv, deterministic):
    return tuple(x.new_empty(x.shape) if needed else q.new_empty(0)
                 for x, needed in ((q, need_dq), (k, need_dk), (v, need_dv)))


_op = ops.torch_op("flash_attn_backward", cuda=_op_cuda, cpu=_op_cpu, fake=_op_fake)
