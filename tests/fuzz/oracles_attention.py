"""What attention means, in float64 on the CPU: dense, and of packed sequences."""
import math

import torch

from .oracles import WIDE, Wanted, number, operand, wide


def attend(q, k, v, given, sinks, seen=None):
    """(O, LSE (.., H, Sq)) of q (.., Sq, H, D), k (.., Sk, Hk, D), v (.., Sk, Hk, Dv). seen (Sq, Sk): by a mask."""
    shared = q.shape[-2] // k.shape[-2]
    k, v = (x.repeat_interleave(shared, -2) for x in (k, v))
    scores = torch.einsum("...qhd,...khd->...hqk", q, k) * number(given["softmax_scale"], q.shape[-1] ** -0.5)
    softcap = number(given["softcap"], 0.0)
    if softcap:
        scores = softcap * torch.tanh(scores / softcap)
    seen = visible(q.shape[-3], k.shape[-3], given) if seen is None else seen
    scores = scores.masked_fill(~seen, -math.inf)
    every = scores
    if sinks is not None:
        every = torch.cat([scores, sinks[:, None, None].expand(*scores.shape[:-1], 1)], -1)
    lse = every.logsumexp(-1) if every.shape[-1] else torch.full(scores.shape[:-1], -math.inf, dtype=WIDE)
    empty = torch.isneginf(lse)[..., None]
    p = torch.where(empty, 0.0, torch.where(empty, 0.0, every).softmax(-1)[..., :scores.shape[-1]])
    if sinks is not None:  # an infinite one leaves nothing to the keys
        p = torch.where((sinks == math.inf)[:, None, None], 0.0, p)
    return torch.einsum("...hqk,...khd->...qhd", p, v), lse


def visible(queries, keys, given):
    """(queries, keys): which keys a query sees; the last query stands beside the last key."""
    left, right = (-1 if x is None else x for x in given["window_size"])
    right = 0 if given["causal"] else right
    i, j = torch.arange(queries)[:, None] + keys - queries, torch.arange(keys)[None]
    seen = torch.ones(queries, keys, dtype=torch.bool)
    if left >= 0:
        seen &= j >= i - left
    if right >= 0:
        seen &= j <= i + right
    return seen


def results(given, o, lse):
    found = [Wanted("o", o, 6, given["q"].dtype)]
    return [*found, Wanted("lse", lse, 2**8, torch.float32)] if given["return_lse"] else found


def flash_attn(given):
    sinks = None if given["sinks"] is None else operand(given, "sinks")
    return results(given, *attend(*(operand(given, n) for n in "qkv"), given, sinks))


def flash_attn_fp8(given):
    """On a GPU P is rounded to e4m3, by up to a sixteenth."""
    q, k, v = (operand(given, n) for n in "qkv")
    factors = [None if given[f"{n}_descale"] is None else operand(given, f"{n}_descale")[:, None, :, None]
               for n in "qkv"]
    if factors[0] is not None:
        factors[0] = factors[0].repeat_interleave(q.shape[2] // k.shape[2], 2)
    q, k, v = (x if by is None else x * by for x, by in zip((q, k, v), factors, strict=True))
    o, lse = attend(q, k, v, dict(given, softcap=0.0), None)
    off = v.abs().max().item() / 16 if v.numel() else 0.0
    found = [Wanted("o", o, ("abs", off), given["out_dtype"])]
    return [*found, Wanted("lse", lse, 2**12, torch.float32)] if given["return_lse"] else found


def flash_attn_fp8_varlen(given):
    """Of each sequence by itself; rows of none: O is 0, LSE -inf. Keys of pages are packed first."""
    if given["block_table"] is not None:
        table = wide(given["block_table"]).long()
        page, (count, most) = given["k"].shape[1], table.shape
        k, v = (given[n].view(torch.uint8)[table].flatten(0, 2).view(given[n].dtype) for n in "kv")
        given = dict(given, k=k, v=v, cu_seqlens_k=torch.arange(count + 1) * most * page)
    total, heads, size = given["q"].shape
    o, lse = torch.zeros(total, heads, size, dtype=WIDE), torch.full((heads, total), -math.inf, dtype=WIDE)
    off = 0.0
    for s, ((a, b), (c, e)) in enumerate(zip(ranges(given, "q"), ranges(given, "k"))):
        if total and b > a:
            own = {f"{n}_descale": x if (x := given[f"{n}_descale"]) is None else x[s:s + 1] for n in "qkv"}
            one = flash_attn_fp8(given | own | dict(q=given["q"][None, a:b], k=given["k"][None, c:e],
                                                    v=given["v"][None, c:e], return_lse=True))
            o[a:b], lse[:, a:b], off = one[0].value[0], one[1].value[0], max(off, one[0].tolerance[1])
    found = [Wanted("o", o, ("abs", off), given["out_dtype"])]
    return [*found, Wanted("lse", lse, 2**12, torch.float32)] if given["return_lse"] else found


def _before_quantised(x, given, smooth):
    if given["cos"] is not None:
        a, b = x.chunk(2, -1)
        cos, sin = (wide(given[n])[:x.shape[1], None] for n in ("cos", "sin"))
        x = torch.cat((a * cos - b * sin, b * cos + a * sin), -1)
    if smooth and x.shape[1]:
        x = x - x.mean(1, keepdim=True)
    if given["rotate"]:
        D = x.shape[3]
        signs = [[(-1.0) ** bin(i & j).count("1") for j in range(D)] for i in range(D)]
        x = x @ (torch.tensor(signs, dtype=WIDE) / D ** 0.5)
    return x


def quantize_qkv(given):
    """Elements, in units of their scale, within a step of e4m3; and scales."""
    wanted, scales, heads = [], [], given["k"].shape[2]
    off = 256 if given["rotate"] or given["smooth_k"] or given["cos"] is not None else 4
    for name in "qkv":
        x = wide(given[name])
        if name != "v":
            x = _before_quantised(x, given, name == "k" and given["smooth_k"])
        B, rows, all_heads, D = x.shape
        groups = x.reshape(B, rows, heads, all_heads // heads * D)
        largest = groups.abs().amax((1, 3)) if groups.numel() else x.new_zeros(B, heads)
        scale = (largest / 448).clamp_min(2.0**-126)
        low = (groups / scale[:, None, :, None]).reshape(x.shape)
        wanted.append(Wanted(name, low, ("beside", 1, 2**-9), torch.float8_e4m3fn))
        scales.append(Wanted(f"{name}_descale", scale, off, torch.float32))
    return [*wanted, *scales]


def flash_attn_varlen(given):
    """Rows of no sequence: O is 0, LSE that of the sink alone."""
    q, k, v = (operand(given, n) for n in "qkv")
    sinks = None if given["sinks"] is None else operand(given, "sinks")
    total, heads = q.shape[:2]
    o = torch.zeros(total, heads, v.shape[2], dtype=WIDE)
    lse = torch.full((heads, total), -math.inf, dtype=WIDE)
    if sinks is not None:
        lse = sinks.detach()[:, None].expand(heads, total).clone()
    for (a, b), (c, e) in zip(ranges(given, "q"), ranges(given, "k")):
        if total and b > a:  # without a row of q there is nothing to say, whatever cu_seqlens_q says
            part, part_lse = attend(q[a:b], k[c:e], v[c:e], given, sinks)
            rows = torch.arange(a, b)
            o = torch.index_put(o, (rows,), part)
            lse = torch.index_put(lse, (torch.arange(heads)[:, None], rows[None]), part_lse)
    return results(given, o, lse)


def slope(given, do):
    """How large a score's gradient may be, times what the gradients of q and k multiply it by. It is a difference, dP -
    delta, and off by a rounding of that size even where it nearly vanishes: where a row has one key and a sink, say."""
    q, k, v, do = (wide(x).flatten(0, -2) for x in (given["q"], given["k"], given["v"], do))
    longest = [x.norm(dim=-1).max().item() if x.numel() else 0.0 for x in (do, v)]
    most = max((x.abs().max().item() for x in (q, k) if x.numel()), default=0.0)
    return longest[0] * longest[1] * max(1.0, most * number(given["softmax_scale"], q.shape[-1] ** -0.5))


def ranges(given, which):
    """(start, end) of each sequence's rows in use. What is beyond the tensor counts as its end."""
    ends = wide(given[f"cu_seqlens_{which}"]).long().clamp(max=given[which].shape[0]).tolist()
    used = given[f"seqused_{which}"]
    used = [math.inf] * len(ends) if used is None else wide(used).long().tolist()
    return [(a, min(b, a + n)) for a, b, n in zip(ends, ends[1:], used)]
