"""tkq.flex_attention, tkq's own kernels and torch's FlexAttention, for bench/ops/flex_attention.py.

Candidates take and give (B, S, H, D): flex_attention gets it as views with heads before rows, flash_attn as it is. Of
gradients they take (do, q, k, v, o, lse), o and lse of ``tkq.flex_attention``; whoever needs its own o and lse, or a
graph of autograd's, makes it when these inputs come first, which is before any clock runs.

FlexAttention is compiled, with kernel_options={"BACKEND": "TRITON"}, and {"BACKEND": "FLASH"}, its kernels of FA4.
"""

from __future__ import annotations

import functools
import importlib
from collections.abc import Callable

import torch
from torch._functorch import config as compiled_autograd

from bench.peers import attention, common
from bench.peers.flex_masks import BESIDE, SAME, Kind, Size, functions, lengths

TRITON, FA4 = "FlexAttention", "FlexAttention on FA4"


def swapped(*tensors):
    """Heads before rows, or rows before heads."""
    return tuple(x.transpose(1, 2) for x in tensors)


# ---- forward -----------------------------------------------------------------------------------------------------


def of_flex(attend: Callable, kind: Kind, size: Size, **options) -> Callable:
    """What calls flex_attention, torch's or ours."""
    def call(q, k, v):
        score_mod, block_mask = functions(kind, size, q.device)
        return attend(*swapped(q, k, v), score_mod=score_mod, block_mask=block_mask, **options).transpose(1, 2)

    return call


def ours(kind: Kind, size: Size) -> Callable:
    import tkq

    return of_flex(tkq.flex_attention, kind, size)


def with_lse(kind: Kind, size: Size) -> Callable:
    """Ours, giving (o, lse)."""
    import tkq

    def call(q, k, v):
        o, lse = tkq.flex_attention(*swapped(q, k, v), *functions(kind, size, q.device), return_lse=True)
        return o.transpose(1, 2), lse

    return call


def torchs(kind: Kind, size: Size, backend: str = "TRITON") -> Callable:
    from torch.nn.attention.flex_attention import flex_attention

    if backend == "FLASH":
        importlib.import_module("flash_attn.cute")  # what is missing is said here, not by the compiler
    return of_flex(common._compiled(flex_attention), kind, size, kernel_options={"BACKEND": backend})


@functools.cache
def starts(size: Size, device: torch.device) -> torch.Tensor:
    """cu_seqlens of the documents of all sequences."""
    return torch.tensor([0, *lengths(size) * size.batch], device=device).cumsum(0).int()


def own(kind: Kind, size: Size) -> Callable:
    """flash_attn, or flash_attn_varlen on the documents of all sequences, one behind the other."""
    asked = kind.call(size)
    run = attention.ours(asked)
    if not asked.max_seqlen:
        return run
    return lambda q, k, v: batched(run(*packed(q, k, v), starts(size, q.device)), size)


def packed(*tensors):
    return tuple(x.flatten(0, 1) for x in tensors)


def batched(x, size: Size):
    return x.unflatten(0, (size.batch, size.length))


# ---- backward ----------------------------------------------------------------------------------------------------


def ours_backward(kind: Kind, size: Size) -> Callable:
    """What autograd calls, without it."""
    from tkq.attention.flex.check import OP, blocks_of, scale_of
    from tkq.attention.flex.devices import gradients
    from tkq.attention.flex.functions.trace import trace
    from tkq.attention.flex.launch import Call

    def call(do, q, k, v, o, lse):
        do, q, k, v, o = swapped(do, q, k, v, o)
        score_mod, block_mask = functions(kind, size, q.device)
        mask_mod, blocks = blocks_of(block_mask, q, k)
        score = None if score_mod is None else trace("score_mod", score_mod, OP)
        asked = Call(q, k, v, score, trace("mask_mod", mask_mod, OP), blocks, scale_of(None, size.dim))
        return swapped(*gradients(asked, (do, o, lse, None), (True,) * 3, ())[0])

    return call


def own_backward(kind: Kind, size: Size) -> Callable:
    from tkq.attention.arguments import Lengths, Options
    from tkq.attention.backward import ops, varlen_ops

    asked, known = kind.call(size), {}
    forward = attention.ours(asked, return_lse=True)
    options = Options(asked.causal, None, *(-1 if n is None else n for n in asked.window))

    def dense(do, q, k, v, *_):
        key = q.data_ptr()
        if key not in known:
            known[key] = forward(q, k, v)
        return ops.attention_backward((do, q, k, v, *known[key], None), None, options)[:3]

    def documents(do, q, k, v, *_):
        key, cu, n = q.data_ptr(), starts(size, q.device), asked.max_seqlen
        do, q, k, v = packed(do, q, k, v)
        if key not in known:
            known[key] = forward(q, k, v, cu)
        found = varlen_ops.attention_varlen_backward((do, q, k, v, *known[key], None), None,
                                                     Lengths(cu, cu, None, None, n, n), options)
        return tuple(batched(x, size) for x in found[:3])

    return documents if asked.max_seqlen else dense


def recorded(forward: Callable) -> Callable:
    """The gradients by autograd, on a graph that was recorded for these inputs the first time."""
    graphs = {}

    def record(*tensors):
        leaves = [x.detach().requires_grad_() for x in tensors]
        return forward(*leaves), leaves

    def call(do, q, k, v, o, lse):
        # a graph that is used again may give none of its buffers away; what compiles and what runs it looks that up,
        # in its own thread
        keeps = compiled_autograd.patch(donated_buffer=False)
        with torch.enable_grad(), torch.autograd.set_multithreading_enabled(False), keeps:
            key = q.data_ptr()
            if key not in graphs:
                graphs[key] = record(q, k, v)
            found, leaves = graphs[key]
            return torch.autograd.grad(found, leaves, do, retain_graph=True)

    return call


def torchs_backward(kind: Kind, size: Size, backend: str = "TRITON") -> Callable:
    return recorded(torchs(kind, size, backend))


# ---- block masks -------------------------------------------------------------------------------------------------


def block_mask() -> Callable:
    import tkq

    return lambda mask_mod, n, device: tkq.create_block_mask(mask_mod, None, None, n, n, device=device)


def torchs_block_mask() -> Callable:
    from torch.nn.attention.flex_attention import create_block_mask

    torch._dynamo.reset()
    compiled = torch.compile(create_block_mask, dynamic=False)
    return lambda mask_mod, n, device: compiled(mask_mod, None, None, n, n, device=device)


def _named(own_, torchs_):
    return {SAME: own_, BESIDE: own_, TRITON: torchs_, FA4: functools.partial(torchs_, backend="FLASH")}


PEERS = {"flex_attention": _named(own, torchs), "flex_attention_backward": _named(own_backward, torchs_backward),
         "create_block_mask": {"torch.compile": torchs_block_mask}}
common.PEERS.update(PEERS)
