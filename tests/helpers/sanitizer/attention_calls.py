"""One small call of each kind of attention kernel, beside the same call on the CPU; for a sanitizer.

    python -m tests.helpers.sanitizer.attention_calls [FAMILY ...] [--list]

As `tests/helpers/sanitizer/calls.py`, whose command line this has.
"""
from __future__ import annotations

import sys
from dataclasses import replace

import torch

from tests.helpers.sanitizer.calls import BF16, main, on, randn
from tests.helpers.sanitizer.flex_calls import own_functions
from tkq import reference
from tkq.attention.arguments import Lengths, Options
from tkq.attention.backward import ops
from tkq.attention.backward.ops import attention_backward
from tkq.attention.backward.plan import SINGLE
from tkq.attention.backward.varlen_ops import attention_varlen_backward
from tkq.reference import attention_backward as formula


def qkv(rows, keys, heads, kv_heads, dim, dim_v=None):
    return randn(0, 1, rows, heads, dim), randn(1, 1, keys, kv_heads, dim), randn(2, 1, keys, kv_heads, dim_v or dim)


def forward(device):
    """Plans of short, medium and long sequences: two consumers and three, pairs of blocks, O through its own tile,
    through Q's and from registers."""
    import tkq

    for rows, keys, dims, causal in ((150, 300, (128, 128), True), (200, 200, (128, 128), False),
                                     (130, 8200, (128, 128), False), (130, 8200, (128, 128), True),
                                     (200, 2100, (64, 64), False), (150, 300, (96, 96), True),
                                     (150, 300, (192, 128), True), (150, 300, (192, 192), False),
                                     (150, 300, (256, 256), True), (200, 200, (256, 256), False),
                                     (150, 300, (512, 512), True)):
        q, k, v = on(device, *qkv(rows, keys, 2, 1, *dims))
        found = tkq.flash_attn(q, k, v, causal=causal, return_lse=True)
        yield f"{rows} x {keys} D{dims[0]}/{dims[1]} {'causal' if causal else 'full'}", found


def options(device):
    """Limits on either side, softcap, sinks, heads that share a tile."""
    import tkq

    sinks = randn(3, 4, dtype=torch.float32)
    for name, rows, more in (("window", 200, dict(window_size=(70, 20))),
                             ("far window", 800, dict(window_size=(700, 0))),
                             ("softcap", 100, dict(softcap=15.0)), ("packed heads", 3, dict(causal=True))):
        q, k, v, s = on(device, *qkv(rows, 900, 4, 1, 128), sinks)
        yield name, tkq.flash_attn(q, k, v, sinks=s, return_lse=True, **more)


def float8(device):
    """Float8 q, k and v, of both layouts of v and both ways to accumulate; a tile that O is wider than."""
    import tkq

    for dim, accumulate, causal in ((64, "two_level", True), (128, "fast", False), (256, "two_level", True)):
        q, k, v = (x.to(torch.float8_e4m3fn) for x in on(device, *qkv(150, 304, 4, 2, dim)))
        scale = on(device, randn(3, 1, 2, dtype=torch.float32).abs())[0]
        given = dict(k_descale=scale, accumulate=accumulate, causal=causal, return_lse=True)
        yield f"float8 D{dim}", tkq.flash_attn_fp8(q, k, v, **given)
        of = tkq.quantize_qkv(*on(device, *qkv(150, 304, 4, 2, dim)))
        yield f"quantize_qkv D{dim}", [x.float() for x in of]
        *wide, cos, sin = on(device, *qkv(304, 304, 4, 2, dim), *randn(4, 2, 304, dim // 2, dtype=torch.float32))
        of = tkq.quantize_qkv(*wide, rotate=True, smooth_k=True, cos=cos, sin=sin)
        yield f"quantize_qkv D{dim}, with options", [x.float() for x in of]
        by_columns = v.permute(0, 2, 3, 1).contiguous().permute(0, 3, 1, 2)
        yield f"float8 D{dim}, keys contiguous", tkq.flash_attn_fp8(q, k, by_columns, **given)


def varlen(device):
    """Sequences of any length, also of none, in use up to some row."""
    import tkq

    cu = torch.tensor([0, 150, 150, 151, 300], dtype=torch.int32)
    used = torch.tensor([100, 0, 1, 149], dtype=torch.int32)
    for dim, causal, more in ((128, True, {}), (64, False, {}), (256, True, {}), (128, True, dict(seqused_k=used))):
        q, k, v, c, *u = on(device, *(x[0] for x in qkv(300, 300, 2, 1, dim)), cu, *more.values())
        o = tkq.flash_attn_varlen(q, k, v, c, c, 150, 150, causal=causal, **dict(zip(more, u)))
        yield f"D{dim} {'causal' if causal else 'full'} {', '.join(more)}", (o,)


def packed_float8(device):
    """Sequences of any length, also of none; keys packed, and in pages of which one is not there."""
    import tkq

    cu = torch.tensor([0, 150, 150, 151, 300], dtype=torch.int32)
    used = torch.tensor([100, 0, 1, 149], dtype=torch.int32)
    table = torch.tensor([[3, 0], [-1, 9], [2, 1], [1, 4]], dtype=torch.int32)
    for dim, accumulate in ((64, "fast"), (128, "two_level")):
        q, k, v = (x[0].to(torch.float8_e4m3fn) for x in on(device, *qkv(300, 400, 4, 2, dim)))
        c, u, pages, scale = on(device, cu, used, table, randn(3, 4, 2, dtype=torch.float32).abs())
        given = dict(k_descale=scale, accumulate=accumulate, causal=True, return_lse=True)
        yield f"packed float8 D{dim}", tkq.flash_attn_fp8_varlen(q, k[:300], v[:300], c, c, 150, 150, **given)
        yield f"float8 pages D{dim}", tkq.flash_attn_fp8_varlen(
            q, k.view(5, 80, 2, dim), v.view(5, 80, 2, dim), c, None, 150, 160, seqused_k=u, block_table=pages, **given)


def gradients(device):
    """Blocks that have one task, that stay, also with dQ made behind, that by query heads; dQ by a kernel of its own,
    and in one order."""
    stays = {"store_from_registers": True, "persistent": True}
    behind = {**stays, "helper_warps": True, "registers": (32, 64, 208)}
    forms = (("by itself", {}), ("stays", stays), ("dQ by itself", {}), ("dQ in order", None), ("behind", behind),
             ("behind, by query heads", {**behind, "dq_reduce": "bulk", "by_query_head": True, "heads_per_task": 1}))
    for dim in (64, 128, 256, 512):
        q, k, v = qkv(130, 200, 2, 1, dim)
        o, lse = reference.flash_attn(q, k, v, True)
        do, q, k, v, o, lse = on(device, randn(3, *q.shape), q, k, v, o, lse)
        for name, change in forms:
            if (dim == 256 and name.startswith("behind")) or (dim == 512 and name != "by itself"):
                continue
            if device == "cpu":
                found = formula.flash_attn_backward(do, q, k, v, o, lse, None, True)[:3]
            else:
                found = [torch.empty_like(x) for x in (q, k, v)]
                ops.run((do, q, k, v, o, lse, None), found, Options(True), deterministic=name.startswith("dQ"),
                        config=config_of(dim, change))
            yield f"D{dim} {name}", found


def config_of(dim, change):
    return None if change is None or dim == 512 else replace(SINGLE[dim], **change)


def more_forward(device):
    """Long causal sequences of head_dim 64, fp16; of packed sequences pairs of blocks that fetch their tasks, long
    causal ones, O from registers, other widths, queries that are not in use."""
    import tkq

    for rows, keys, dim, dtype in ((130, 8200, 64, BF16), (150, 300, 128, torch.float16)):
        q, k, v = on(device, *(x.to(dtype) for x in qkv(rows, keys, 2, 2, dim)))
        yield f"{rows} x {keys} D{dim} {dtype}", tkq.flash_attn(q, k, v, causal=True, return_lse=True)
    cu = torch.tensor([0, 150, 150, 151, 300], dtype=torch.int32)
    used = torch.tensor([100, 0, 1, 149], dtype=torch.int32)
    for dims, causal, longest, more in (
            ((128, 128), False, 8200, {}), ((128, 128), True, 8200, {}), ((192, 128), True, 150, {}),
            ((96, 96), True, 150, {}), ((64, 64), True, 150, dict(seqused_q=used, seqused_k=used))):
        q, k, v, c, *u = on(device, *(x[0] for x in qkv(300, 300, 2, 2, *dims)), cu, *more.values())
        found = tkq.flash_attn_varlen(q, k, v, c, c, longest, longest, causal=causal, return_lse=True,
                                      **dict(zip(more, u)))
        yield f"packed D{dims[0]}/{dims[1]} up to {longest} {'causal' if causal else 'full'} {', '.join(more)}", found


def more_gradients(device):
    """All keys, windows, softcap, sinks, a gradient of lse."""
    sinks = randn(5, 4, dtype=torch.float32)
    for dim, given, more in ((128, Options(), {}), (64, Options(False, None, 70, 0), {}),
                             (128, Options(False, None, 70, 20), {}), (128, Options(True, None, -1, -1, 15.0), {}),
                             (256, Options(True, None, -1, -1, 15.0), {}), (128, Options(True), dict(dlse=True)),
                             (128, Options(False, None, 70, 0), dict(deterministic=True))):
        q, k, v = qkv(130, 200, 4, 4, dim)
        o, lse = reference.flash_attn(q, k, v, *given, sinks)
        dlse = randn(4, *lse.shape, dtype=torch.float32) if more.get("dlse") else None
        do, q, k, v, o, lse, s = on(device, randn(3, *q.shape), q, k, v, o, lse, sinks)
        dlse = None if dlse is None else dlse.to(device)
        yield f"D{dim} {given} {more}", attention_backward((do, q, k, v, o, lse, dlse), s, given,
                                                           deterministic=more.get("deterministic", False))


def shared_heads(device):
    """Query heads that share K/V heads, of short, medium and long sequences: a tile's first part of dQ stored, two
    query heads at a time. In bf16 dS is a product of pairs, in fp16 it is not; and so of long packed sequences."""
    causal = Options(True)
    for dtype in (BF16, torch.float16):
        for keys in (200, 2100, 8300):
            q, k, v = (x.to(dtype) for x in qkv(130, keys, 8, 2, 128))
            o, lse = reference.flash_attn(q, k, v, True)
            tensors = *on(device, randn(3, *q.shape).to(dtype), q, k, v, o, lse), None
            yield f"D128 8/2 130 x {keys} {dtype}", attention_backward(tensors, None, causal)[:3]
    cu = torch.tensor([0, 150, 150, 151, 300], dtype=torch.int32)
    q, k, v = (x[0].half() for x in qkv(300, 300, 2, 2, 128))
    o, lse = reference.flash_attn_varlen(q, k, v, cu, cu, None, None, *causal)
    *tensors, c = on(device, randn(3, *q.shape).half(), q, k, v, o, lse, cu)
    found = attention_varlen_backward((*tensors, None), None, Lengths(c, c, None, None, 8300, 8300), causal)
    yield "packed D128 up to 8300 fp16", found[:3]


def varlen_gradients(device):
    """Of packed sequences: dQ from block to block, blocks that have one task, that stay, with dQ made behind, also the
    statistics; dQ by a kernel of its own; windows, softcap, rows that are not in use."""
    cu = torch.tensor([0, 150, 150, 151, 300], dtype=torch.int32)
    used = torch.tensor([100, 0, 1, 149], dtype=torch.int32)
    causal, window, capped = Options(True), Options(False, None, 70, 0), Options(True, None, -1, -1, 15.0)
    for dim, heads, kv_heads, longest, given, in_use, deterministic in (
            (64, 2, 1, 150, causal, False, False), (128, 2, 1, 150, causal, False, False),
            (64, 2, 1, 900, causal, False, False), (64, 2, 2, 900, causal, False, False),
            (128, 2, 1, 900, causal, False, False), (128, 2, 2, 4096, causal, False, False),
            (128, 2, 2, 4096, Options(), False, False), (128, 2, 1, 4096, causal, False, False),
            (128, 2, 2, 8200, causal, False, False),
            (256, 2, 1, 150, causal, False, False), (128, 2, 1, 150, causal, False, True),
            (128, 2, 1, 150, window, False, False), (128, 2, 1, 150, capped, False, False),
            (128, 2, 1, 150, causal, True, False)):
        q, k, v = (x[0] for x in qkv(300, 300, heads, kv_heads, dim))
        sinks, of_use = randn(5, heads, dtype=torch.float32), (used, used) if in_use else ()
        o, lse = reference.flash_attn_varlen(q, k, v, cu, cu, *(of_use or (None, None)), *given, sinks)
        do, q, k, v, o, lse, s, c, *u = on(device, randn(3, *q.shape), q, k, v, o, lse, sinks, cu, *of_use)
        lengths = Lengths(c, c, *(u or (None, None)), longest, longest)
        found = attention_varlen_backward((do, q, k, v, o, lse, None), s, lengths, given, deterministic=deterministic)
        yield f"D{dim} {heads}/{kv_heads} up to {longest} {given} {in_use} {deterministic}", found


FAMILIES = {f.__name__: f for f in (forward, options, float8, packed_float8, varlen, gradients, more_forward,
                                    more_gradients, shared_heads, varlen_gradients, own_functions)}

if __name__ == "__main__":
    sys.exit(main(FAMILIES))
