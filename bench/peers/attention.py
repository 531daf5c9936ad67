"""The baselines of attention's forward, with the options of ``tkq.flash_attn`` that they support.

A peer is made for a ``Call`` by a function that imports what it needs, and takes what ``tkq`` takes: (q, k, v), varlen
(q, k, v, cu_seqlens). What a peer cannot do raises NotImplementedError: it is then missing, with that reason.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.nn.functional as F

from bench.peers import common


@dataclass(frozen=True)
class Call:
    """window: (left, right), None for no limit. max_seqlen: of varlen, 0 for a batch of equal sequences."""

    causal: bool = False
    window: tuple = (None, None)
    max_seqlen: int = 0


def ours(call: Call, **more) -> Callable:
    import tkq

    options = dict(causal=call.causal, window_size=call.window, **more)
    if call.max_seqlen:
        n = call.max_seqlen
        return lambda q, k, v, cu, *_: tkq.flash_attn_varlen(q, k, v, cu, cu, n, n, **options)
    return lambda q, k, v, *_: tkq.flash_attn(q, k, v, **options)


def flash_attention_4(call: Call) -> Callable:
    from flash_attn.cute import flash_attn_func, flash_attn_varlen_func

    options, n = dict(causal=call.causal, window_size=call.window), call.max_seqlen
    first = lambda result: result[0] if isinstance(result, tuple) else result
    if n:
        return lambda q, k, v, cu, *_: first(flash_attn_varlen_func(
            q, k, v, cu_seqlens_q=cu, cu_seqlens_k=cu, max_seqlen_q=n, max_seqlen_k=n, **options))
    return lambda q, k, v, *_: first(flash_attn_func(q, k, v, **options))


def flash_attention_3(call: Call) -> Callable:
    from flash_attn_interface import flash_attn_func, flash_attn_varlen_func

    window, n = tuple(-1 if x is None else x for x in call.window), call.max_seqlen
    options = dict(causal=call.causal, window_size=window)
    if n:
        return lambda q, k, v, cu, *_: flash_attn_varlen_func(q, k, v, cu, cu, n, n, **options)
    return lambda q, k, v, *_: flash_attn_func(q, k, v, **options)


def cudnn(call: Call) -> Callable:
    from torch.nn.attention import SDPBackend, sdpa_kernel

    if call.max_seqlen or call.window != (None, None):
        raise NotImplementedError("PyTorch's cuDNN attention takes neither varlen nor windows")

    def attention(q, k, v, *_):
        q, k, v = (x.transpose(1, 2) for x in (q, k, v))
        with sdpa_kernel(SDPBackend.CUDNN_ATTENTION):
            return F.scaled_dot_product_attention(
                q, k, v, is_causal=call.causal, enable_gqa=q.shape[1] != k.shape[1]).transpose(1, 2)

    return attention


def torch_sdpa(call: Call) -> Callable:
    """Whatever backend PyTorch takes."""
    if call.max_seqlen or call.window != (None, None):
        raise NotImplementedError("PyTorch's attention takes neither varlen nor windows")

    def attention(q, k, v, *_):
        q, k, v = (x.transpose(1, 2) for x in (q, k, v))
        return F.scaled_dot_product_attention(
            q, k, v, is_causal=call.causal, enable_gqa=q.shape[1] != k.shape[1]).transpose(1, 2)

    return attention


def halves(call: Call) -> Callable:
    """Ours, on twice as many heads of half the columns: as many FLOPs."""
    attention = ours(call)
    return lambda q, k, v, *_: attention(*(x.unflatten(-1, (2, -1)).flatten(2, 3) for x in (q, k, v)))


PEERS = {"FA4": flash_attention_4, "cuDNN": cudnn, "FA3": flash_attention_3}
OTHER_PROBLEMS = {  # ours, on what a case is set beside: no window; as many heads of K and V as of Q;
    # heads of half the columns
    "all keys": lambda call: ours(Call()),
    "all keys, causal": lambda call: ours(Call(True)),
    "half of the head dim": halves,
    "32/32": lambda call: lambda q, k, v, k_all, v_all: ours(call)(q, k_all, v_all),
}
common.PEERS["attention_forward"] = PEERS | OTHER_PROBLEMS | {"torch SDPA": torch_sdpa}


def pairs(n: int, causal: bool, left: int = -1, right: int = -1) -> float:
    """Pairs of a query and a key that it sees, in a sequence of n; -1: no limit. Causal without a window counts half of
    all, as all libraries count it."""
    if left < 0 and right < 0:
        return n * n / 2 if causal else n * n
    left, right = left if left >= 0 else n, 0 if causal else right if right >= 0 else n
    return sum(min(i + right, n - 1) - max(i - left, 0) + 1 for i in range(n))


def inputs(batch, length, heads, kv_heads, dim, dim_v) -> Callable[[int], tuple]:
    """i -> (q, k, v), bf16."""

    def make(i):
        g = torch.Generator("cuda").manual_seed(i)
        new = lambda h, d: torch.randn(batch, length, h, d, device="cuda", dtype=torch.bfloat16, generator=g)
        return new(heads, dim), new(kv_heads, dim), new(kv_heads, dim_v)

    return make


def varlen_inputs(lengths, heads, kv_heads, dim) -> Callable[[int], tuple]:
    """i -> (q, k, v, cu_seqlens): sequences of these lengths one behind the other."""

    def make(i):
        q, k, v = (x[0] for x in inputs(1, sum(lengths), heads, kv_heads, dim, dim)(i))
        return q, k, v, torch.tensor([0, *lengths], device="cuda").cumsum(0).int()

    return make
