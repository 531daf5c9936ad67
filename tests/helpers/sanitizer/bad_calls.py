"""One small call of each op that takes indices, with indices that no caller means, beside the same call on the CPU; for
a sanitizer: nothing outside the tensors is read or written.

    python -m tests.helpers.sanitizer.bad_calls [FAMILY ...] [--list]

As `tests/helpers/sanitizer/calls.py`, whose command line this has.
"""
from __future__ import annotations

import sys

import torch
import torch.nn.functional as F
from torch.autograd import grad

from tests.helpers.ops.bad_indices import CUTS, labels, positions
from tests.helpers.sanitizer.calls import main, on, randn
from tkq import reference
from tkq.attention.arguments import Lengths, Options
from tkq.attention.backward.varlen_ops import attention_varlen_backward

EVERYTHING = dict(label_smoothing=0.1, z_loss=1e-3, softcap=20.0)


def summed(*found):
    """The numbers with 0 for NaN, and where there is NaN; with a 1 behind them, as there may be none."""
    flat = [F.pad(x.detach().float().flatten(), (0, 1), value=1.0) for x in found]
    return [part for x in flat for part in (x.nan_to_num(0.0), x.isnan().float())]


def of_classes(device, V, rows, dtype, options):
    import tkq
    from tkq.losses.ops import cross_entropy_and_gradient

    target, _ = labels(V, dtype, rows)
    x, t, w = on(device, randn(0, rows, V, grad=True), target, randn(1, V).float().abs() + 0.1)
    given = dict(weight=w if options else None, ignore_index=1 << 40 if options else -1, **options)
    loss = tkq.cross_entropy(x, t, reduction="none", **given)
    yield f"{dtype} {V} {options}", summed(loss, *grad(loss.sum(), x))
    loss = tkq.cross_entropy(x, t, **given)
    yield f"{dtype} {V} {options} mean", summed(loss, *grad(loss, x))
    both = cross_entropy_and_gradient(x.detach(), t, **given)
    yield f"{dtype} {V} {options} at once", summed(*both)


def cross_entropy(device):
    """Rows that are held, of 32- and 64-bit labels; class weights are looked up with them."""
    for V, dtype, options in ((1000, torch.int64, EVERYTHING), (1000, torch.int32, {}), (8, torch.int64, {})):
        yield from of_classes(device, V, 32, dtype, options)


def long_rows(device):
    """Rows that begin anywhere, of a cluster, that are streamed."""
    for V, options in ((50257, {}), (131072, {}), (131072, EVERYTHING)):
        yield from of_classes(device, V, 24, torch.int64, options)


def linear(device):
    import tkq

    for dtype in (torch.bfloat16, torch.float16):
        target, _ = labels(1000, torch.int64, 32)
        x, w, t, cw = on(device, randn(0, 32, 64, dtype=dtype, grad=True), randn(1, 1000, 64, dtype=dtype, grad=True),
                         target, randn(2, 1000).float().abs() + 0.1)
        for class_weight in (None, cw):
            for reduction in ("none", "mean", "sum"):
                loss = tkq.linear_cross_entropy(x, w, t, class_weight=class_weight, ignore_index=-1,
                                                reduction=reduction)
                yield f"linear {dtype} {reduction}", summed(loss, *grad(loss.sum(), (x, w)))


def rope(device):
    import tkq

    cos, sin = tkq.rope_cos_sin(64, 64, device="cpu")
    for dtype in (torch.int32, torch.int64):
        ids = positions(64, dtype)
        x, c, s, i = on(device, randn(0, 1, 64, 3, 64, grad=True), cos, sin, ids)
        y = tkq.rope(x, c, s, position_ids=i[None])
        yield f"position_ids {dtype}", summed(y, *grad(y, x, torch.ones_like(y)))
        x, o = on(device, randn(0, 64, 2, 3, 64, grad=True), ids)
        y = tkq.rope(x, c, s, seqlen_offsets=o)
        yield f"seqlen_offsets {dtype}", summed(y, *grad(y, x, torch.ones_like(y)))
    for cuts in CUTS:
        x, k, c, s, cu, o = on(device, randn(0, 300, 3, 64), randn(1, 300, 1, 64), cos, sin,
                               torch.tensor(cuts, dtype=torch.int32), torch.tensor([0, 2**31 - 1, -3, 5]))
        for offsets in (0, 2**31 - 1, o):
            yield f"cu_seqlens {cuts}", summed(*tkq.rope_qk(x, k, c, s, cu_seqlens=cu, seqlen_offsets=offsets))


def grouped(device):
    import tkq

    for cuts in CUTS:
        ends = torch.tensor(cuts, dtype=torch.int32)
        last = int(ends.clamp(0, 304).max())
        x, y, b, offsets = on(device, randn(0, 304, 136, grad=True), randn(1, 304, 264),
                              randn(2, 5, 136, 264, grad=True), ends)
        c = tkq.grouped_gemm(x, b, offsets)
        yield f"along M {cuts}", summed(c[:last], *grad(c[:last].float().sum(), (x, b)))
        yield f"along K {cuts}", summed(tkq.grouped_gemm(x.detach().t(), y, offsets))
        found = (*tkq.quantize_fp8(randn(0, 304, 128), "1x128", transpose=True)[2:],
                 *tkq.quantize_fp8(randn(1, 304, 264), "1x128", transpose=True)[2:])
        xt, sx, yt, sy = on(device, *found)
        yield f"float8 along K {cuts}", summed(tkq.grouped_gemm(xt, yt.t(), offsets, scale_a=sx, scale_b=sy.t()))


USED = torch.tensor([1 << 30, -3, -(1 << 31), 20], dtype=torch.int32)  # lengths in use that are none


def packed(device, cuts, dim, heads, in_use):
    """(q, k, v, do, o, lse), o and lse from the CPU, cu_seqlens and what is in use."""
    cu = torch.tensor(cuts, dtype=torch.int32)
    used = (USED, USED) if in_use else (None, None)
    q, k, v, do = (randn(i, 300, n, dim) for i, n in enumerate((heads, 1, 1, heads)))
    o, lse = reference.flash_attn_varlen(q, k, v, cu, cu, *used, True)
    # where cu does not begin with 0, which is an error on the CPU, that counts as 0
    given = cu if device != "cpu" else torch.cat((cu[:1] * 0, cu[1:]))
    q, k, v, do, o, lse, given = on(device, q, k, v, do, o, lse, given)
    return (q, k, v, do, o, lse), given, on(device, *used) if in_use else used


def attention(device):
    """Sequences by the running maximum of cu_seqlens; longest: what is said, and is not so."""
    import tkq

    for dim, heads, longest, in_use in ((128, 2, 0, False), (64, 2, 900, True), (128, 1, 8200, False)):
        for cuts in CUTS:
            (q, k, v, *_), cu, used = packed(device, cuts, dim, heads, in_use)
            o, lse = tkq.flash_attn_varlen(q, k, v, cu, cu, longest, longest, causal=True, return_lse=True,
                                           seqused_q=used[0], seqused_k=used[1])
            yield f"{cuts} D{dim} up to {longest}", summed(o, lse.nan_to_num(neginf=-9.0))


def backward(device, dim, heads, longest, in_use, deterministic=False):
    for cuts in CUTS:
        (q, k, v, do, o, lse), cu, used = packed(device, cuts, dim, heads, in_use)
        found = attention_varlen_backward((do, q, k, v, o, lse, None), None, Lengths(cu, cu, *used, longest, longest),
                                          Options(True), deterministic=deterministic)
        yield f"{cuts} D{dim} up to {longest} {deterministic}", summed(*found[:3])


def gradients(device):
    """Of blocks that have one task; dQ by a kernel of its own."""
    yield from backward(device, 128, 2, 0, False)
    yield from backward(device, 64, 2, 150, True, deterministic=True)


def gradients_of_long(device):
    """Of persistent blocks with helper warps that convert dQ, also the statistics."""
    yield from backward(device, 64, 2, 900, True)
    yield from backward(device, 128, 1, 8200, False)


def steps(device):
    """Rows that a pool does not have, of both types; numbers of accepted tokens that are none."""
    import tkq

    for dtype in (torch.int32, torch.int64):
        end = torch.iinfo(dtype)
        rows = torch.tensor([0, -1, 5, 6, end.max, end.min, -7, 3], dtype=dtype)
        for T, accepted in ((1, None), (2, torch.tensor([0, 1, 2, 3, end.max, end.min, -1, 1], dtype=dtype))):
            q, k, v, g, pool, at, n = on(
                device, randn(0, 8, T, 2, 64), randn(1, 8, T, 2, 64) / 8, randn(2, 8, T, 4, 64),
                -randn(3, 8, T, 4).float().abs(), randn(4, 6, 4, 64, 64).float(),
                rows if accepted is None else torch.stack((rows, rows.flip(0)), 1)[:, :T],
                rows if accepted is None else accepted)
            o = tkq.gated_delta_rule_step(q, k, v, g, g.sigmoid(), pool, state_indices=at,
                                          num_accepted_tokens=None if accepted is None else n)
            yield f"gated_delta_rule_step {dtype} {T}", summed(o) + (summed(pool) if accepted is None else [])


def caches(device):
    """Lengths that no cache has, pages that are not there, slots and positions beyond the end."""
    import tkq
    from tkq.reference.mla import packed

    most, least = (1 << 31) - 1, -(1 << 31)
    q, k, v = randn(0, 6, 2, 4, 64), randn(1, 9, 5, 2, 64), randn(2, 9, 5, 2, 64)
    lengths = torch.tensor([15, most, least, 16, 14, 7], dtype=torch.int32)
    table = torch.tensor([[0, 1, 2], [3, 4, 5], [6, 7, 8], [1, 2, 3], [4, most, 9], [5, -1, least]], dtype=torch.int32)
    for fixed in (False, True):
        given = on(device, q, k, v, lengths, table)
        o, lse = tkq.flash_attn_with_kvcache(*given[:3], cache_seqlens=given[3], block_table=given[4], return_lse=True,
                                             batch_invariant=fixed)
        yield f"pages {fixed}", summed(o, lse)
        drafts = on(device, torch.full((6, 2), -1))[0]
        yield f"drafts {fixed}", summed(tkq.flash_attn_with_kvcache(
            *given[:3], cache_seqlens=given[3], block_table=given[4], tree_mask=drafts, batch_invariant=fixed))
        rows = tkq.flash_attn_with_kvcache(given[0], given[1][:6], given[2][:6], cache_seqlens=given[3] - 10,
                                           window_size=(3, 0), batch_invariant=fixed)
        yield f"rows {fixed}", summed(rows)
        yield f"windows {fixed}", summed(tkq.flash_attn_with_kvcache(
            *given[:3], cache_seqlens=given[3], block_table=given[4], window_size=(3, None), batch_invariant=fixed))
        wide = on(device, randn(0, 6, 2, 4, 576), randn(1, 9, 5, 576))
        o, lse = tkq.mla_decode(*wide, given[4], given[3], softmax_scale=0.1, batch_invariant=fixed, return_lse=True)
        yield f"latent pages {fixed}", summed(o, lse)
        lists = torch.stack((table, table * 5, table - 1), -1).view(6, 1, 9).repeat(1, 2, 30).to(device)
        for most_of in (None, given[3], given[3][:, None].expand(6, 2)):
            o, lse = tkq.mla_decode(*wide, softmax_scale=0.1, batch_invariant=fixed, return_lse=True, indices=lists,
                                    topk_length=most_of)
            small = packed(wide[1])
            yield f"float8 rows {fixed} {None if most_of is None else most_of.dim()}", summed(tkq.mla_decode(
                wide[0], small, softmax_scale=0.1, batch_invariant=fixed, indices=lists, topk_length=most_of))
            yield f"latent rows {fixed} {None if most_of is None else most_of.dim()}", summed(o, lse)
    for starts in ([0, 2, 1, most, 5, least, 12], [-1, 3, 3, 3, 3, 20, 12], [0, 2, 4, 6, 8, 10, 12]):
        many, *given = on(device, q.flatten(0, 1), k, v, lengths, table, torch.tensor(starts, dtype=torch.int32))
        o = tkq.flash_attn_with_kvcache(many, *given[:2], cache_seqlens=given[2], block_table=given[3],
                                        cu_seqlens_q=given[4], out=torch.zeros_like(many))
        yield f"ragged from {starts[0]} {starts[2]}", summed(o)
    many, k_, v_ = randn(0, 6, 256, 8, 64), randn(1, 9, 8, 2, 64), randn(2, 9, 8, 2, 64)  # chunked prefill's
    q_, *given = on(device, many, k_, v_, lengths, table)
    yield "chunks", summed(*tkq.flash_attn_with_kvcache(q_, *given[:2], cache_seqlens=given[2], block_table=given[3],
                                                        return_lse=True))
    yield "chunks of rows", summed(tkq.flash_attn_with_kvcache(q_, *(x[:6] for x in given[:2]),
                                                               cache_seqlens=given[2] - 10))
    for starts in ([0, 200, 100, most, 500, least, 1536], [-1, 300, 300, 300, 300, 2000, 1536]):
        q_, *given = on(device, many.flatten(0, 1), k_, v_, lengths, table, torch.tensor(starts, dtype=torch.int32))
        o = tkq.flash_attn_with_kvcache(q_, *given[:2], cache_seqlens=given[2], block_table=given[3],
                                        cu_seqlens_q=given[4], out=torch.zeros_like(q_))
        yield f"ragged chunks from {starts[0]}", summed(o)
    for cascade, rows in ((True, table), (False, table), (True, table.flip(0))):
        q_, *given = on(device, q, k, v, lengths, rows)
        o = tkq.cascade_attention(q_, *given[:2], cache_seqlens=given[2], block_table=given[3], prefix_len=11,
                                  cascade=cascade)
        yield f"shared pages {cascade} {int(rows[0, 0])}", summed(o)
    low = [x.to(torch.float8_e4m3fn) for x in (k, v)]
    for scales in (torch.ones(2), torch.ones(9, 5, 2)):
        q_, *given = on(device, q, *low, lengths, table, scales)
        o = tkq.flash_attn_with_kvcache(q_, *given[:2], cache_seqlens=given[2], block_table=given[3],
                                        k_descale=given[4], v_descale=given[4])
        yield f"float8 pages {scales.dim()}", summed(o)
    slots, positions = torch.tensor([44, -1, 45, most, least, 0]), torch.tensor([7, 8, -1, most, least, 0])
    cos, sin = tkq.rope_cos_sin(8, 64, device="cpu")
    for kind in (torch.int32, torch.int64):
        new, keys, values, at, c, s, p = on(device, randn(3, 6, 2, 64), k, v, slots.to(kind), cos, sin,
                                            positions.to(kind))
        keys, values = keys.clone(), values.clone()
        turned = tkq.kv_append(new, new, keys, values, at, cos=c, sin=s, positions=p, q=new)
        yield f"slots {kind}", summed(turned, keys, values)
    new, keys, values, at, scales = on(device, randn(3, 6, 2, 64), *low, slots, torch.ones(2, 9, 5, 2))
    keys, values = keys.clone(), values.clone()
    tkq.kv_append(new, new, keys, values, at, k_scale=scales[0], v_scale=scales[1])
    yield "slots of float8", summed(keys.float(), values.float(), scales)


ROWS = torch.tensor([2, -1, 1 << 30, -(1 << 31)], dtype=torch.int32)  # of a pool of 3


def states(device):
    """Linear attention and the delta rule of packed sequences, forward and backward, and with a pool."""
    import tkq

    for cuts in CUTS:
        q, k, v, do = (randn(i, 1, 300, n, 64) / d for i, (n, d) in enumerate(((2, 8), (2, 8), (2, 1), (2, 1))))
        g, beta = -randn(4, 1, 300, 2).float().abs(), randn(5, 1, 300, 2).float().sigmoid()
        q, k, v, do, g, beta, initial, cu, rows = on(
            device, q, k, v, do, g, beta, randn(6, 4, 2, 64, 64).float(), torch.tensor(cuts), ROWS)
        for op, tensors in ((tkq.linear_attn, (q, k, v, g)), (tkq.gated_delta_rule, (q, k, v, g, beta))):
            given = [x.detach().requires_grad_() for x in (*tensors, initial)]
            o, last = op(*given[:-1], initial_state=given[-1], output_final_state=True, cu_seqlens=cu)
            yield f"{op.__name__} {cuts}", summed(o, last, *grad((o, last), given, (do, torch.ones_like(last))))
            pool = initial[:3].clone()
            yield f"{op.__name__} {cuts} with a pool", summed(op(
                *tensors, initial_state=pool, cu_seqlens=cu, state_indices=rows), pool)
        columns, places = (g[..., None] * torch.linspace(0, 2, 64, device=device)).contiguous(), dict(
            cu_seqlens=cu.int(), state_indices=rows)
        for op, tensors in ((tkq.linear_attn, (q, k, v, columns)), (tkq.gated_delta_rule, (q, k, v, columns, beta))):
            pool = initial[:3].clone()
            yield f"{op.__name__} {cuts}, columns with a pool", summed(op(*tensors, initial_state=pool, **places), pool)
        pool = initial[:3].clone()
        yield f"mamba2_ssd {cuts} with a pool", summed(tkq.mamba2_ssd(
            v, beta, -beta[0, 0], k, q, beta[0, 1], do, beta[0, 2], pool, True, **places), pool)


FAMILIES = {f.__name__: f for f in (cross_entropy, long_rows, linear, rope, grouped, attention, gradients,
                                    gradients_of_long, states, steps, caches)}

if __name__ == "__main__":
    sys.exit(main(FAMILIES))
