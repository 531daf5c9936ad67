"""What the attention tests on a GPU share: inputs, the same computation in PyTorch at low precision, and the judgement.

Options are those of tkq.reference.flash_attn: causal, softmax_scale, left, right (-1: no limit), softcap, sinks."""
import math

import torch

from tkq import reference
from tkq.attention import ops
from tkq.attention.arguments import Options
from tkq.attention.common.operands import Operands
from tkq.testing import assert_2x


def make(batch, rows, keys, heads, kv_heads, dim, dtype=torch.bfloat16, seed=0, dim_v=None):
    g = torch.Generator("cuda").manual_seed(seed + rows * 7 + keys)
    new = lambda s, h, d: torch.randn(batch, s, h, d, device="cuda", generator=g).to(dtype)
    return new(rows, heads, dim), new(keys, kv_heads, dim), new(keys, kv_heads, dim_v or dim)


def in_low_precision(q, k, v, causal=False, softmax_scale=None, left=-1, right=-1, softcap=0.0, sinks=None):
    """(o, lse): the same computation in PyTorch, every intermediate in q's dtype."""
    group = q.shape[2] // k.shape[2]
    k, v = k.repeat_interleave(group, 2), v.repeat_interleave(group, 2)
    q, k, v = (x.transpose(1, 2) for x in (q, k, v))
    s = q @ k.transpose(-1, -2) * (q.shape[-1] ** -0.5 if softmax_scale is None else softmax_scale)
    if softcap:
        s = softcap * torch.tanh(s / softcap)
    seen = reference.visible(q.shape[2], k.shape[2], 0 if causal else right, left, q.device)
    if seen is not None:
        s = s.masked_fill(~seen, -math.inf)
    if sinks is not None:
        s = torch.cat((s, sinks.to(s.dtype)[None, :, None, None].expand(*s.shape[:-1], 1)), -1)
    p = s.softmax(-1).nan_to_num(0.0)
    return (p[..., :k.shape[2]] @ v).transpose(1, 2), s.logsumexp(-1)


def judge(o, lse, q, k, v, what="", **options):
    """o and lse against float64, beside PyTorch at the same precision: q's, of k and v in float64 too."""
    doubles = [x.double() for x in (q, k, v)]
    true_o, true_lse = reference.flash_attn(*doubles, **options)
    low_o, low_lse = in_low_precision(q, k.to(q.dtype), v.to(q.dtype), **options)
    assert_2x(o, true_o, low_o, 1, f"{what} o")
    if lse is None:
        return
    assert torch.equal(torch.isinf(lse), torch.isinf(true_lse)) and not torch.isnan(lse).any(), f"{what} lse"
    finite = torch.isfinite(true_lse)
    if not finite.any():
        return
    error = (lse - true_lse)[finite]
    worst, bias = error.abs().max().item(), abs(error.mean().item())
    top = true_lse[finite]  # of a row's scores, at most; and by no more than log(keys) less
    largest = max(1.0, top.abs().max().item(), (top - math.log(max(k.shape[1], 1))).abs().max().item())
    # lse is fp32: the sum of exponentials is good to about 1e-6, scores are to what tensor cores cut off where they add
    # up products, which is an error to one side; the rest is lse's own rounding.
    # A softcap's tanh is only good to 2 ** -11: there PyTorch's own error is the measure, and it may err to one side.
    floor = 4e-6 * largest + 4e-6
    theirs = (low_lse.float() - true_lse)[finite].abs().max().item() if options.get("softcap") else 0.0
    assert worst <= 2 * theirs + floor, f"{what} lse: error {worst:.2e}, PyTorch's {theirs:.2e}"
    one_sided = 2 ** -11 * largest if options.get("softcap") else 0.0
    allowed = floor * (0.2 + 1 / error.numel() ** 0.5) + one_sided
    assert bias <= allowed, f"{what} lse: mean signed error {bias:.2e}, allowed {allowed:.2e}"


def run(q, k, v, o, lse=None, config=None, sinks=None, **options):
    """Launch the kernel into o and lse."""
    ops.run(Operands(q, k, v, o, lse, sinks), Options(**options), config)


def compare(q, k, v, what="", o=None, config=None, **options):
    """Run on poisoned outputs, judge o and lse. config: not the plan's own for the length."""
    shape = (*q.shape[:3], v.shape[3])
    o = torch.full(shape, math.nan, dtype=q.dtype, device="cuda") if o is None else o
    lse = torch.full((q.shape[0], q.shape[2], q.shape[1]), math.nan, device="cuda")
    run(q, k, v, o, lse, config, **options)
    judge(o, lse, q, k, v, f"{what} {options}", **options)
    return o, lse
