"""What the tests of float8 attention on a GPU share: quantised inputs, the same computation in PyTorch with P rounded
to e4m3, and the judgement."""
import math

import torch

import tkq
from tests.helpers.sanitizer.nan_fill import poisoned
from tkq.attention.fp8 import launch
from tkq.attention.fp8.check import Call, Options
from tkq.reference import attention_fp8 as reference
from tkq.reference.attention import visible
from tkq.testing import assert_2x

F8, LARGEST = torch.float8_e4m3fn, 448.0
# Tensor cores cut off what they add to a sum, so that sums come out too near to zero: by so much in the mean, in units
# of the last place of the result's type. Fast: of up to some thousand keys.
CUT_OFF = {"two_level": 0.25, "fast": 1.0}
# Scores likewise: of 32 products that are added at once each is cut off 13 bits below the largest.
SCORES = 32 * 2.0**-13


def quantised(q, k, v) -> dict:
    """The tensors of a call, from any floating ones: one descale for each sequence and K/V head."""
    given, heads = {}, k.shape[2]
    for name, x in zip("qkv", (q, k, v), strict=True):
        B, rows, H, D = x.shape
        of_heads = x.float().reshape(B, rows, heads, H // heads * D)
        top = of_heads.abs().amax((1, 3)) if rows else x.new_zeros(B, heads)
        by = torch.where(top > 0, top / LARGEST, 1.0).float()
        given[name] = (of_heads / by[:, None, :, None]).clamp(-LARGEST, LARGEST).to(F8).view(x.shape)
        given[f"{name}_descale"] = by
    return given


def make(batch, rows, keys, heads, kv_heads, dim, seed=0) -> dict:
    g = torch.Generator("cuda").manual_seed(seed + rows * 7 + keys)
    new = lambda s, h: torch.randn(batch, s, h, dim, device="cuda", generator=g)
    return quantised(new(rows, heads), new(keys, kv_heads), new(keys, kv_heads))


def rounded(given, causal=False, softmax_scale=None, left=-1, right=-1):
    """o, float32: attention in PyTorch, P times 2 ** 8 rounded to e4m3, its sum not."""
    q, k, v = (given[n].float() for n in "qkv")
    by = [given.get(f"{n}_descale") for n in "qkv"]
    by = [torch.ones(k.shape[0], k.shape[2], device=q.device) if x is None else x for x in by]
    group = q.shape[2] // k.shape[2]
    factor, of_v = ((x.repeat_interleave(group, 1))[..., None, None] for x in (by[0] * by[1], by[2]))
    k, v = (x.repeat_interleave(group, 2).transpose(1, 2) for x in (k, v))
    scale = q.shape[-1] ** -0.5 if softmax_scale is None else softmax_scale
    s = q.transpose(1, 2) @ k.mT * (factor * scale * math.log2(math.e))
    seen = visible(q.shape[1], k.shape[2], 0 if causal else right, left, q.device)
    if seen is not None:
        s = s.masked_fill(~seen, -math.inf)
    top = s.amax(-1, keepdim=True)
    p = torch.exp2(s - top.where(top > -math.inf, 0.0) + 8)
    total = p.sum(-1, keepdim=True)
    o = p.to(F8).float() @ v * of_v
    return torch.where(total > 0, o / total, o.where(total.isnan(), 0.0)).transpose(1, 2)


def judge(o, lse, given, what="", accumulate="two_level", ulps=1, scores=2.0**-10, **options):
    """o and lse against float64 of what the numbers mean, beside PyTorch with P rounded to e4m3. ulps: roundings of o
    that are allowed beside. scores: error of lse, of the largest; of hard data SCORES."""
    true_o, true_lse = reference.flash_attn_fp8(**given, **options, out_dtype=torch.float64)
    assert_2x(o, true_o, rounded(given, **options).to(o.dtype), ulps, f"{what} o",
              bias_ulps=CUT_OFF[accumulate])
    if lse is None:
        return
    assert torch.equal(torch.isinf(lse), torch.isinf(true_lse)) and not torch.isnan(lse).any(), f"{what} lse"
    finite = torch.isfinite(true_lse)
    if finite.any():
        # The norm is a sum in float32; scores are as good as the tensor cores' sums.
        largest = max(1.0, true_lse[finite].abs().max().item())
        error = (lse - true_lse)[finite].abs().max().item()
        assert error <= scores * largest, f"{what} lse: error {error:.2e}, largest {largest:.2e}"


def call(given, config=None, accumulate="two_level", out_dtype=torch.bfloat16, return_lse=True, **options):
    """(o, lse), outputs and workspace poisoned. config: instead of the plan's."""
    with poisoned():
        if config is None:
            window = options.pop("left", -1), options.pop("right", -1)
            found = tkq.flash_attn_fp8(**given, **options, window_size=window, accumulate=accumulate,
                                       out_dtype=out_dtype, return_lse=return_lse)
            return found if return_lse else (found, None)
        names = Call._fields
        return launch.attend(Call(**{n: given.get(n) for n in names}), Options(
            **options, accumulate=accumulate, out_dtype=out_dtype, return_lse=return_lse), config)


def compare(given, what="", config=None, accumulate="two_level", out_dtype=torch.bfloat16, return_lse=True, ulps=1,
            scores=2.0**-10, **options):
    """ulps, scores: of `judge`. options: those of ``tkq.reference.attention_fp8.flash_attn_fp8``."""
    o, lse = call(given, config, accumulate, out_dtype, return_lse, **options)
    judge(o, lse, given, f"{what} {accumulate} {options}", accumulate, ulps, scores, **options)
    return o, lse
