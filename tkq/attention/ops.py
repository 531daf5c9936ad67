"""tkq.flash_attn: what PyTorch sees of attention."""
import math
from typing import Optional

import torch
from torch import Tensor

from tkq import reference
from tkq.attention.plan import length_class, plan
from tkq.attention.spec import DTYPES, AttentionSpec
from tkq.runtime import Recipe, arch, check, counters, dtypes, function, ops

# (dtype, head_dim, causal, lse?, length, device, config) -> (kernel, processors); as many as there are kinds of call
_launchers: dict = {}


def flash_attn(q: Tensor, k: Tensor, v: Tensor, *, causal: bool = False, softmax_scale: Optional[float] = None,
               return_lse: bool = False):
    """Exact attention, softmax(scale * q @ k.T) @ v, without the score matrix in memory.

    Args:
        q: (B, Sq, H, D), bfloat16 or float16, D 64 or 128.
        k, v: (B, Sk, Hk, D), as q. H is a multiple of Hk: each K/V head serves H / Hk consecutive query heads
            (GQA, MQA). Sq and Sk may be any length, also 0.
            The last dimension of q, k and v is contiguous; base and other strides are multiples of 16 bytes, also 0:
            slices of a packed qkv tensor and expanded heads go in without a copy.
        causal: query i sees the keys up to i + Sk - Sq: the last query sees the last key.
        softmax_scale: above 0; 1 / sqrt(D) where not given.
        return_lse: also return the log-sum-exp of each row's scaled scores.

    Returns:
        o (B, Sq, H, D), contiguous, of q's dtype; with return_lse the pair (o, lse), lse (B, H, Sq) float32, natural
        logarithm. A row that sees no key has o = 0 and lse = -inf.

    Raises:
        TypeError: q, k or v not a tensor, of another dtype than allowed or than q; a scale that is not a number.
        ValueError: shapes that do not go together, devices that differ, strides or a base that TMA cannot take, a scale
            that is not above 0.
        NotImplementedError: a head_dim that is not supported, or a gradient asked for.
        RuntimeError: a GPU other than Hopper.

    Source: Dao et al., FlashAttention, 2022; Shah et al., FlashAttention-3, 2024. CPU tensors take
    ``tkq.reference.flash_attn``.
    """
    if ops.direct(q, k, v):
        o, lse = (_cuda if q.is_cuda else _cpu)(q, k, v, causal, softmax_scale, return_lse)
    else:
        check.refuse_gradient("flash_attn", q=q, k=k, v=v)
        _check(q, k, v, softmax_scale)  # here too: the dispatcher's own words name no argument
        o, lse = _op(q, k, v, causal, softmax_scale, return_lse)
        lse = lse if return_lse else None
    return (o, lse) if return_lse else o


def _check(q, k, v, softmax_scale):
    """Everything that can be wrong with a call; names the argument, what came and what is allowed."""
    for name, x in (("q", q), ("k", k), ("v", v)):
        check.dtype(name, x, DTYPES)
        check.rank(name, x, 4)
        if x.dtype != q.dtype:
            raise TypeError(f"flash_attn: {name} is {x.dtype}, q is {q.dtype}; all three must have one dtype")
    check.same_device(q=q, k=k, v=v)
    (batch, _, heads, head_dim), (_, keys, kv_heads, _) = q.shape, k.shape
    AttentionSpec(dtypes.name_of(q.dtype), head_dim)
    if k.shape != (batch, keys, kv_heads, head_dim):
        raise ValueError(f"flash_attn: k is {tuple(k.shape)}, q is {tuple(q.shape)}; "
                         f"allowed is (B, Sk, Hk, D) with q's B = {batch} and D = {head_dim}")
    if v.shape != k.shape:
        raise ValueError(f"flash_attn: v is {tuple(v.shape)}, k is {tuple(k.shape)}; allowed is k's shape")
    if heads and (not kv_heads or heads % kv_heads):
        raise ValueError(f"flash_attn: q has {heads} heads, k has {kv_heads}; q's must be a multiple of k's")
    if softmax_scale is None:
        return
    check.number("softmax_scale", softmax_scale)
    if not 0 < softmax_scale < math.inf:  # not isfinite, which Dynamo does not trace for a float that varies
        raise ValueError(f"flash_attn: softmax_scale is {softmax_scale}, allowed are finite numbers above 0")


def _check_layout(name, x):
    if x.stride(3) != 1:
        raise ValueError(f"flash_attn: {name} has strides {x.stride()}; "
                         "its last dimension must be contiguous: call .contiguous()")
    for i in range(3):
        if x.stride(i) % 8 and x.shape[i] > 1:
            raise ValueError(f"flash_attn: {name} has strides {x.stride()}; "
                             f"stride {i} must be a multiple of 8 elements (16 bytes): call .contiguous()")
    if x.data_ptr() % 16:
        raise ValueError(f"flash_attn: {name} begins at an address that is not a multiple of 16 bytes: "
                         "call .clone()")


def _cuda(q, k, v, causal, softmax_scale, return_lse):
    try:
        return _forward(q, k, v, causal, softmax_scale, return_lse)
    except Exception:
        # The compiled function checks every dtype, shape, stride and address before it launches; the words for a user
        # are found only when something is wrong.
        _check(q, k, v, softmax_scale)
        for name, x in (("q", q), ("k", k), ("v", v)):
            _check_layout(name, x)
        raise


def _forward(q, k, v, causal, softmax_scale, return_lse):
    """(o, lse or None)"""
    batch, rows, heads, _ = q.shape
    _, keys, kv_heads, _ = k.shape
    if not (batch and rows and heads and keys):
        return _empty(q, k, v, softmax_scale, return_lse)
    if heads % kv_heads or not (softmax_scale is None or 0 < softmax_scale < math.inf):
        raise ValueError  # _check says which
    o = torch.empty_like(q) if q.is_contiguous() else q.new_empty(q.shape)
    # Only where it is asked for: an allocation is 3 us of a call's 18 (H100's host). Sizes one by one, with a device:
    # torch parses this faster than new_empty.
    lse = torch.empty(batch, heads, rows, dtype=torch.float32, device=q.device) if return_lse else None
    run(q, k, v, o, lse, causal, softmax_scale)
    return o, lse


def _empty(q, k, v, softmax_scale, return_lse):
    """No queries, or no keys to see: nothing to launch."""
    _check(q, k, v, softmax_scale)
    shape = q.shape[0], q.shape[2], q.shape[1]
    return q.new_zeros(q.shape), q.new_full(shape, -math.inf, dtype=torch.float32) if return_lse else None


def run(q, k, v, o, lse=None, causal=False, softmax_scale=None, config=None):
    """Launch the kernel into o (B, Sq, H, D) and lse (B, H, Sq), with no more checks than the compiled function makes.

    config: an AttentionConfig instead of the plan's: for tests and tuning."""
    head_dim, index, length = q.shape[3], q.get_device(), length_class(k.shape[1])
    key = (q.dtype, head_dim, causal, lse is None, length, index, config)
    launcher = _launchers.get(key)
    if launcher is None:
        launcher = _launchers[key] = _launcher(q, causal, lse is not None, length, config)
    kernel, processors = launcher
    scale = head_dim**-0.5 if softmax_scale is None else softmax_scale
    kernel(q, k, v, o, lse, counters.counter(index), scale, processors)


def _launcher(q, causal, lse, length, config):
    arch.require_hopper(q.device)
    spec = AttentionSpec(dtypes.name_of(q.dtype), q.shape[3], bool(causal), lse)
    recipe = Recipe("tkq.attention.forward:build", (spec, config or plan(spec, length)))
    return function(recipe), arch.processors(q.device)


def _cpu(q, k, v, causal, softmax_scale, return_lse):
    _check(q, k, v, softmax_scale)
    o, lse = reference.flash_attn(q, k, v, causal, softmax_scale)
    return o, lse if return_lse else None


# The op returns two tensors always: an empty lse where none is asked for.


def _op_cuda(q: Tensor, k: Tensor, v: Tensor, causal: bool, softmax_scale: Optional[float],
             return_lse: bool) -> tuple[Tensor, Tensor]:
    o, lse = _cuda(q, k, v, causal, softmax_scale, return_lse)
    return o, q.new_empty(0, dtype=torch.float32) if lse is None else lse


def _op_cpu(q: Tensor, k: Tensor, v: Tensor, causal: bool, softmax_scale: Optional[float],
            return_lse: bool) -> tuple[Tensor, Tensor]:
    o, lse = _cpu(q, k, v, causal, softmax_scale, return_lse)
    return o, q.new_empty(0, dtype=torch.float32) if lse is None else lse


def _op_fake(q: Tensor, k: Tensor, v: Tensor, causal: bool, softmax_scale: Optional[float],
             return_lse: bool) -> tuple[Tensor, Tensor]:
    batch, rows, heads, _ = q.shape
    return q.new_empty(q.shape), q.new_empty((batch, heads, rows) if return_lse else (0,), dtype=torch.float32)


_op = ops.torch_op("flash_attn", cuda=_op_cuda, cpu=_op_cpu, fake=_op_fake)
