"""The gradients of attention: from torch tensors to a launch, and what PyTorch's compiler sees of it."""
import math
from typing import Optional

import torch
from torch import Tensor

from tkq import reference_attention_backward as reference_attention
from tkq.attention.backward_plan import plan
from tkq.attention.backward_spec import BackwardSpec, width
from tkq.attention.plan import length_class
from tkq.attention.spec import DTYPES
from tkq.runtime import Recipe, arch, check, dtypes, function, ops

# what decides the kernels (see _launcher) -> (function, configuration); as many as there are kinds of call
_launchers: dict = {}


def attention_backward(do: Tensor, q: Tensor, k: Tensor, v: Tensor, o: Tensor, lse: Tensor,
                       dlse: Optional[Tensor] = None, *, causal: bool = False, softmax_scale: Optional[float] = None,
                       window_size=(None, None), softcap: float = 0.0, sinks: Optional[Tensor] = None,
                       needs: tuple = (True, True, True), deterministic: bool = False):
    """The gradients of ``flash_attn``, from what it took and gave.

    Args:
        do: the gradient of o. Where its strides do not suit TMA it is copied.
        q: (B, Sq, H, D), bfloat16 or float16. k: (B, Sk, Hk, D). v: (B, Sk, Hk, Dv). o: (B, Sq, H, Dv). D and Dv are
            multiples of 8 up to 256. Strides as in ``flash_attn``.
        lse: (B, H, Sq) float32, of any strides. dlse: its gradient, likewise, or None.
        causal, softmax_scale, window_size, softcap, sinks: as in ``flash_attn``.
        needs: which of dq, dk and dv are wanted, and, where there are sinks, their gradient.
        deterministic: the same dq, bit by bit, in each run: it is made by a kernel of its own, which computes the
            scores a second time, 7 products instead of 5. It is else added up in whatever order. dk and dv are the
            same in each run anyhow.

    Returns:
        (dq, dk, dv), contiguous, of the inputs' dtype, and with sinks their gradient (H,), of theirs; None for what is
        not wanted.

    Raises:
        TypeError, ValueError, NotImplementedError, RuntimeError: as ``flash_attn``; all name the argument.

    Source: Dao et al., FlashAttention, 2022, algorithm 4.
    """
    needs = (*needs, False)[:4]
    count = 3 if sinks is None else 4
    if not any(needs):
        return (None,) * count
    left, right = (-1 if side is None else side for side in window_size)
    args = (do, q, k, v, o, lse, dlse, sinks, causal, softmax_scale, left, right, softcap, deterministic, *needs)
    if ops.direct(do, q, k, v, o, lse, dlse, sinks):
        return (_cuda(*args) if q.is_cuda else _cpu(*args))[:count]
    check.refuse_gradient("attention_backward", do=do, q=q, k=k, v=v, o=o, lse=lse, dlse=dlse, sinks=sinks)
    _check(*args[:13])
    return tuple(x if needed else None for x, needed in zip(_op(*args), needs))[:count]


# ---- what can be wrong -----------------------------------------------------------------------------


def _check(do, q, k, v, o, lse, dlse, sinks, causal, softmax_scale, left, right, softcap):
    for name, x in (("q", q), ("k", k), ("v", v), ("o", o), ("do", do)):
        check.dtype(name, x, DTYPES)
        check.rank(name, x, 4)
        if x.dtype != q.dtype:
            raise TypeError(f"attention_backward: {name} is {x.dtype}, q is {q.dtype}; all must have one dtype")
    of_rows = [(name, x) for name, x in (("lse", lse), ("dlse", dlse)) if name == "lse" or x is not None]
    for name, x in of_rows:
        check.dtype(name, x, ("fp32",))
    if sinks is not None:
        check.dtype("sinks", sinks, ("fp32", dtypes.name_of(q.dtype)))
        check.shape("sinks", sinks, (q.shape[2],))
    check.same_device(q=q, k=k, v=v, o=o, do=do, lse=lse, dlse=dlse, sinks=sinks)
    (batch, rows, heads, head_dim), head_dim_v = q.shape, v.shape[3]
    width(head_dim, head_dim_v)
    check.shape("k", k, (batch, None, None, head_dim))
    check.shape("v", v, (*k.shape[:3], head_dim_v))
    for name, x in (("o", o), ("do", do)):
        check.shape(name, x, (batch, rows, heads, head_dim_v))
    for name, x in of_rows:
        check.shape(name, x, (batch, heads, rows))
    kv_heads = k.shape[2]
    if heads and (not kv_heads or heads % kv_heads):
        raise ValueError(f"attention_backward: q has {heads} heads, k has {kv_heads}; q's must be a multiple of k's")
    if softmax_scale is not None:
        check.number("softmax_scale", softmax_scale)
        if not 0 < softmax_scale < math.inf:
            raise ValueError(f"attention_backward: softmax_scale is {softmax_scale}, "
                             "allowed are finite numbers above 0")
    check.number("softcap", softcap)
    if not 0 <= softcap < math.inf:
        raise ValueError(f"attention_backward: softcap is {softcap}, allowed are finite numbers above 0, and 0 for "
                         "none")
    if left < -1 or right < -1:
        raise ValueError(f"attention_backward: window_size is {(left, right)}, allowed are numbers of keys from 0 on, "
                         "and None or -1 for no limit")


def takes(x: Tensor) -> bool:
    """Do the strides and the address of x suit TMA: last dimension contiguous, the rest multiples of 16 bytes?"""
    return x.stride(-1) == 1 and x.data_ptr() % 16 == 0 and not any(
        x.stride(i) % 8 and x.shape[i] > 1 for i in range(x.dim() - 1))


def _check_layout(name, x):
    if not takes(x):
        raise ValueError(f"attention_backward: {name} has strides {x.stride()} and address {x.data_ptr():#x}; its last "
                         "dimension must be contiguous, its address and other strides multiples of 16 bytes: "
                         "call .clone(memory_format=torch.contiguous_format)")


# ---- CUDA ------------------------------------------------------------------------------------------


def _cuda(do, q, k, v, o, lse, dlse, sinks, causal, softmax_scale, left, right, softcap, deterministic, need_dq,
          need_dk, need_dv, need_dsinks):
    """(dq, dk, dv, dsinks), None for what is not wanted."""
    try:
        if not takes(do):
            do = do.clone(memory_format=torch.contiguous_format)
        (batch, rows, heads, _), (_, keys, kv_heads, _) = q.shape, k.shape
        if not (batch and rows and heads and keys):
            _check(do, q, k, v, o, lse, dlse, sinks, causal, softmax_scale, left, right, softcap)
            return _empty(q, k, v, sinks, dlse, lse, (need_dq, need_dk, need_dv, need_dsinks))
        if heads % kv_heads or not (softmax_scale is None or 0 < softmax_scale < math.inf) or not (
                0 <= softcap < math.inf):
            raise ValueError  # _check says which
        dq = torch.empty(q.shape, dtype=q.dtype, device=q.device) if need_dq else None
        dk = torch.empty(k.shape, dtype=q.dtype, device=q.device)
        dv = torch.empty(v.shape, dtype=q.dtype, device=q.device)
        of_rows = run(do, q, k, v, o, lse, dq, dk, dv, dlse, causal, softmax_scale, (left, right), deterministic,
                      softcap=softcap)
    except Exception:
        # The compiled function checks every dtype, shape, stride and address before it launches; the words for a user
        # are found only when something is wrong.
        _check(do, q, k, v, o, lse, dlse, sinks, causal, softmax_scale, left, right, softcap)
        for name, x in (("q", q), ("k", k), ("v", v), ("o", o)):
            _check_layout(name, x)
        raise
    dsinks = reference_attention.sinks_gradient(sinks, lse, of_rows()) if need_dsinks else None
    return dq, dk if need_dk else None, dv if need_dv else None, dsinks


def _empty(q, k, v, sinks, dlse, lse, needs):
    """No queries, or no keys to see: nothing to launch."""
    zeros = [x.new_zeros(x.shape) if needed else None for x, needed in zip((q, k, v), needs)]
    if not needs[3]:
        return *zeros, None
    return *zeros, reference_attention.sinks_gradient(sinks, lse, torch.zeros_like(lse) if dlse is None else dlse)


def run(do, q, k, v, o, lse, dq, dk, dv, dlse=None, causal=False, softmax_scale=None, window_size=(-1, -1),
        deterministic=False, config=None, softcap=0.0):
    """Launch the kernels into dq (B, Sq, H, D; or None), dk and dv (B, Sk, Hk, D), with no more checks than the
    compiled function makes.

    config: a BackwardConfig instead of the plan's: for tests and tuning.
    Returns a function that gives dlse - rowsum(o * do), (B, H, Sq) float32, and 0 for rows that see no key."""
    batch, rows, heads, head_dim = q.shape
    index, head_dim_v, keys = q.get_device(), v.shape[3], k.shape[1]
    left, right, length = window_size[0], 0 if causal else window_size[1], length_class(keys)
    left, right = -1 if left >= keys - 1 else left, -1 if right >= rows - 1 else right  # limits that limit nothing
    key = (q.dtype, head_dim, head_dim_v, left < 0, right < 0, softcap == 0.0, dq is None, dlse is None, deterministic,
           length, index, config)
    launcher = _launchers.get(key)
    if launcher is None:
        launcher = _launchers[key] = launcher_of(q.device, key)
    kernels, spec, config = launcher
    workspace = torch.empty(batch * heads * config.workspace_floats(spec, rows), dtype=torch.float32, device=q.device)
    scale = head_dim**-0.5 if softmax_scale is None else softmax_scale
    kernels(do, q, k, v, o, lse, dlse, dq, dk, dv, workspace, None, (scale, softcap, left, right))

    def of_rows():
        tiles = -(-rows // config.tile)
        stats = workspace[:2 * batch * heads * tiles * config.tile].view(batch, heads, tiles, 2, config.tile)
        return stats[:, :, :, 1].reshape(batch, heads, -1)[:, :, :rows]

    return of_rows


def launcher_of(device, key, **more):
    """(the compiled function, its spec and configuration). key: as ``run`` makes it; more: of the spec."""
    arch.require_hopper(device)
    dtype, head_dim, head_dim_v, no_left, no_right, no_softcap, no_dq, no_dlse, deterministic, length = key[:10]
    spec = BackwardSpec(dtypes.name_of(dtype), width(head_dim, head_dim_v), not no_left, not no_right, not no_softcap,
                        not no_dq, not no_dlse, bool(deterministic), **more)
    config = key[11] or plan(spec, length)
    return function(Recipe("tkq.attention.backward:build", (spec, config))), spec, config


# ---- CPU, tracing ----------------------------------------------------------------------------------


def _cpu(do, q, k, v, o, lse, dlse, sinks, causal, softmax_scale, left, right, softcap, deterministic, need_dq,
         need_dk, need_dv, need_dsinks):
    _check(do, q, k, v, o, lse, dlse, sinks, causal, softmax_scale, left, right, softcap)
    found = reference_attention.flash_attn_backward(do, q, k, v, o, lse, dlse, causal, softmax_scale, (left, right),
                                                    softcap, sinks)
    needs = need_dq, need_dk, need_dv, need_dsinks
    return tuple(x if needed else None for x, needed in zip((*found, None), needs))


# The op returns four tensors always: an empty one for what is not wanted.


def _as_tensors(found, q):
    return tuple(q.new_empty(0) if x is None else x for x in found)


def _op_cuda(do: Tensor, q: Tensor, k: Tensor, v: Tensor, o: Tensor, lse: Tensor, dlse: Optional[Tensor],
             sinks: Optional[Tensor], causal: bool, softmax_scale: Optional[float], left: int, right: int,
             softcap: float, deterministic: bool, need_dq: bool, need_dk: bool, need_dv: bool,
             need_dsinks: bool) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    return _as_tensors(_cuda(do, q, k, v, o, lse, dlse, sinks, causal, softmax_scale, left, right, softcap,
                             deterministic, need_dq, need_dk, need_dv, need_dsinks), q)


def _op_cpu(do, q, k, v, o, lse, dlse, sinks, causal, softmax_scale, left, right, softcap, deterministic, need_dq,
            need_dk, need_dv, need_dsinks):
    return _as_tensors(_cpu(do, q, k, v, o, lse, dlse, sinks, causal, softmax_scale, left, right, softcap,
                            deterministic, need_dq, need_dk, need_dv, need_dsinks), q)


def _op_fake(do, q, k, v, o, lse, dlse, sinks, causal, softmax_scale, left, right, softcap, deterministic, need_dq,
             need_dk, need_dv, need_dsinks):
    return tuple(x.new_empty(x.shape) if needed else q.new_empty(0)
                 for x, needed in ((q, need_dq), (k, need_dk), (v, need_dv), (sinks, need_dsinks)))


_op = ops.torch_op("flash_attn_backward", cuda=_op_cuda, cpu=_op_cpu, fake=_op_fake)
