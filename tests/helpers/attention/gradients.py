"""Attention's gradients on a GPU: against float64, beside PyTorch's autograd at the same precision."""
import math

import torch

from tkq.attention.arguments import Options
from tkq.attention.backward import ops
from tkq.attention.backward.ops import attention_backward
from tkq.reference import attention_backward as reference_attention
from tkq.testing import assert_2x

SIZES = ((64, 128), (1, 1), (63, 63), (64, 64), (65, 65), (1, 777), (113, 203), (799, 3), (3, 799), (300, 100),
         (65, 1999), (2000, 65), (129, 1), (127, 129), (641, 641), (1023, 1023), (1024, 1024), (1023, 1024))
NAMES = "dq", "dk", "dv", "dsinks"
FEW_SIZES = ((1, 1), (113, 203), (300, 100), (65, 1000), (1000, 65), (641, 641))


def make(batch, rows, keys, heads, kv_heads, dim, dtype, seed=0, dim_v=None):
    """q, k, v, do"""
    g = torch.Generator("cuda").manual_seed(seed + rows * 7 + keys)
    new = lambda s, h, d: torch.randn(batch, s, h, d, device="cuda", generator=g).to(dtype)
    dim_v = dim_v or dim
    return new(rows, heads, dim), new(keys, kv_heads, dim), new(keys, kv_heads, dim_v), new(rows, heads, dim_v)


def low_precision_gradients(q, k, v, do, dlse, causal, scale, window_size, softcap=0.0, sinks=None):
    """PyTorch's autograd of attention, every intermediate in q's dtype: of q, k, v and, where there are any, sinks."""
    leaves = [x.detach().clone().requires_grad_() for x in (q, k, v, *([] if sinks is None else [sinks]))]
    group = q.shape[2] // k.shape[2]
    wq, wk, wv = (x.transpose(1, 2) for x in (leaves[0], *(x.repeat_interleave(group, 2) for x in leaves[1:3])))
    s = wq @ wk.transpose(-1, -2) * (q.shape[-1] ** -0.5 if scale is None else scale)
    s = softcap * torch.tanh(s / softcap) if softcap else s
    mask = reference_attention.seen(q.shape[1], k.shape[1], causal, window_size, q.device)
    some = mask.any(-1) if sinks is None else torch.ones_like(mask[:, 0])
    s = s.masked_fill(~mask & some[:, None], -math.inf)
    if sinks is not None:
        s = torch.cat([s, leaves[3].to(s.dtype)[:, None, None].expand(*s.shape[:-1], 1)], -1)
    loss = (((s.softmax(-1)[..., :k.shape[1]] * some[:, None]) @ wv).transpose(1, 2).float() * do.float()).sum()
    if dlse is not None:
        loss = loss + torch.where(some, s.float().logsumexp(-1) * dlse, 0.0).sum()
    return torch.autograd.grad(loss, leaves)


def rounded_once(do, q, k, v, o, p, scale, slope=1.0):
    """dq, dk, dv as they are where only o, P for dV, dS, and the results are rounded to bf16: all else in float64, as
    what is given. p: (B, H, Sq, Sk). slope: likewise, of a logit by the scaled score."""
    low, group = (lambda x: x.bfloat16().double()), q.shape[2] // k.shape[2]
    wq, wdo = (x.transpose(1, 2) for x in (q, do))
    wk, wv = (x.repeat_interleave(group, 2).transpose(1, 2) for x in (k, v))
    fold = lambda x: x.unflatten(1, (k.shape[2], group)).sum(2)
    delta = (low(o) * do).sum(-1).transpose(1, 2)[..., None]
    ds = low(p * slope * (wdo @ wv.transpose(-1, -2) - delta))
    found = scale * ds @ wk, fold(scale * ds.transpose(-1, -2) @ wq), fold(low(p).transpose(-1, -2) @ wdo)
    return [x.transpose(1, 2).bfloat16() for x in found]


def poisoned(x):
    return torch.full(x.shape, math.nan, dtype=x.dtype, device="cuda")


def forward(q, k, v, causal, scale, window_size, softcap=0.0, sinks=None):
    """In float64: o, lse and the probabilities (B, H, Sq, Sk)."""
    group = q.shape[2] // k.shape[2]
    wq, wk, wv = (x.double().transpose(1, 2) for x in (q, *(x.repeat_interleave(group, 2) for x in (k, v))))
    mask = reference_attention.seen(q.shape[1], k.shape[1], causal, window_size, q.device)
    s = reference_attention.capped(wq @ wk.transpose(-1, -2) * scale, softcap)[0].masked_fill(~mask, -math.inf)
    lse = s.logsumexp(-1)
    lse = lse if sinks is None else torch.logaddexp(lse, sinks.double()[:, None].expand_as(lse))
    p = torch.exp(s - lse.masked_fill(lse == -math.inf, 0.0)[..., None])
    return (p @ wv).transpose(1, 2), lse, p


def rounding(q, k, v, do, o, p, scale):
    """What fp32 may leave of sums that cancel, as where a row sees one key: for each element of dq, dk and dv."""
    group = q.shape[2] // k.shape[2]
    wq, wo, wdo = (x.double().abs().transpose(1, 2) for x in (q, o, do))
    wk, wv = (x.double().abs().repeat_interleave(group, 2).transpose(1, 2) for x in (k, v))
    ds = 1e-6 * scale * p * (wdo @ wv.transpose(-1, -2) + (wdo * wo).sum(-1, keepdim=True))
    fold = lambda x: x.unflatten(1, (k.shape[2], group)).sum(2).transpose(1, 2)
    return (ds @ wk).transpose(1, 2), fold(ds.transpose(-1, -2) @ wq), fold(1e-6 * p.transpose(-1, -2) @ wdo)


def rounding_of_sinks(do, o, lse, dlse, sinks):
    """Likewise, of the gradient of the sinks."""
    of_rows = (o.double() * do.double()).abs().sum(-1).transpose(1, 2) + (0.0 if dlse is None else dlse.abs())
    return 1e-6 * (torch.exp(sinks.double()[:, None] - lse) * of_rows).sum((0, 2))


def gradients(do, q, k, v, o, lse, causal=False, **options):
    """(dq, dk, dv)"""
    return attention_backward((do, q, k, v, o, lse, None), None, Options(causal), **options)[:3]


def compare(q, k, v, do, causal, scale=None, what="", dlse=None, window_size=(-1, -1), softcap=0.0, sinks=None,
            **options):
    """Run on poisoned outputs and workspace, judge all gradients: beside the formula in float64, from o and lse as the
    kernel gets them."""
    wide_scale = q.shape[-1] ** -0.5 if scale is None else scale
    o, lse, p = forward(q, k, v, causal, wide_scale, window_size, softcap, sinks)
    o, lse = o.to(q.dtype), lse.float()
    true = reference_attention.flash_attn_backward(*(x.double() for x in (do, q, k, v, o, lse)), dlse, causal, scale,
                                                   window_size, softcap, None if sinks is None else sinks.double())
    low = low_precision_gradients(q, k, v, do, dlse, causal, scale, window_size, softcap, sinks)
    found = [poisoned(x) for x in (q, k, v)]
    workspace = torch.full((8 << 20,), math.nan, device="cuda")  # what torch.empty is likely to give next
    del workspace
    given = Options(causal, scale, *window_size, softcap)
    of_rows = ops.run((do, q, k, v, o, lse, dlse), found, given, **options)
    judged, floors = list(found), list(rounding(q, k, v, do, o, p, wide_scale))
    if sinks is not None:
        judged.append(reference_attention.sinks_gradient(sinks, lse, of_rows()))
        floors.append(rounding_of_sinks(do, o, lse, dlse, sinks))
    for name, a, b, c, floor in zip(NAMES, judged, true, low, floors):
        near = torch.where((a.double() - b).abs() <= floor, b.to(a.dtype), a)  # NaN stays
        assert_2x(near, b, c, 1, f"{what} {name}")
    return found
