"""What each operation means, in float64 on the CPU, with autograd's gradients.

An oracle takes the call's arguments by name and gives a list of ``Wanted``. Tensors of ``given["leaves"]`` stand for
the arguments of their names: float64 leaves, whose gradients are the call's.
"""
import math
from itertools import pairwise
from typing import NamedTuple

import torch
import torch.nn.functional as F

from tkq.runtime.arguments import granularities

WIDE = torch.float64


class Wanted(NamedTuple):
    """One result: its value in float64, and how it is compared.

    Attributes:
        tolerance: in roundings of dtype at the size of the element and of the whole's root mean square; or ("abs", x),
            ("beside", roundings, x), ("products", x) and ("float8", granularity), see ``judge``.
        rows: which rows are compared; None: all.
    """

    name: str
    value: torch.Tensor
    tolerance: object
    dtype: torch.dtype
    rows: object = None


def wide(x):
    return x.detach().cpu().to(WIDE) if isinstance(x, torch.Tensor) else x


def operand(given, name):
    """The argument in float64, or the leaf that stands for it."""
    leaf = given.get("leaves", {}).get(name)
    return wide(given[name]) if leaf is None else leaf


def number(x, default=None):
    return default if x is None else float(x)


# ---- softmax and losses -------------------------------------------------------------------------------------------


def softmax(given, function=torch.softmax):
    x = given["x"]
    z = operand(given, "x") * number(given["scale"])
    return [Wanted("y", function(z, int(given["dim"])), 2, x.dtype)]


def log_softmax(given):
    return softmax(given, torch.log_softmax)


def row_losses(z, target, weight, given):
    """(loss of each row, its part of a mean's divisor); NaN where a label is no class and not the ignored one."""
    classes, smoothing = z.shape[-1], number(given["label_smoothing"])
    softcap, z_loss = number(given["softcap"]), number(given["z_loss"])
    if softcap:
        z = softcap * torch.tanh(z / softcap)
    lse = z.logsumexp(-1)
    known = (target >= 0) & (target < classes)
    at = torch.where(known, target, 0)
    of_class = torch.ones(classes, dtype=WIDE) if weight is None else weight
    logp = z - lse[:, None]
    loss = -of_class[at] * logp.gather(-1, at[:, None])[:, 0] * (1 - smoothing)
    if smoothing:
        loss = loss - smoothing / classes * (logp * of_class).sum(-1)
    if z_loss:
        loss = loss + z_loss * lse**2
    ignored = target == int(given["ignore_index"])
    loss = torch.where(ignored, 0.0, torch.where(known, loss, math.nan))
    part = torch.where(known, of_class[at], 1.0 if weight is None else math.nan)
    return loss, torch.where(ignored, 0.0, part)


def cross_entropy(given, z=None, weight="weight"):
    z = operand(given, "logits") if z is None else z
    target = wide(given["target"]).long()
    loss, part = row_losses(z.reshape(-1, z.shape[-1]), target.reshape(-1), wide(given[weight]), given)
    if given["reduction"] == "none":
        loss = loss.view(target.shape)
    else:
        loss = loss.sum() if given["reduction"] == "sum" else loss.sum() / part.sum()
    return [Wanted("loss", loss, 2**6, torch.float32)]


def _parts(given, target):
    """What each row adds to a mean's divisor; of one that is no class anything but 0."""
    ignored, weight = target == int(given["ignore_index"]), wide(given["weight"])
    known = (target >= 0) & (target < given["logits"].shape[-1])
    of_class = 1.0 if weight is None else torch.where(known, weight[torch.where(known, target, 0)], math.nan)
    return torch.where(ignored, 0.0, of_class)


def cross_entropy_and_gradient(given):
    """The gradient of an ignored row is 0 whatever its logits are, and that of a mean of nothing is 0. Of a row with an
    infinite logit not every number is NaN, and which ones are not is not compared."""
    x = wide(given["logits"]).requires_grad_()
    (loss, *rest), = cross_entropy({**given, "leaves": {"logits": x}})[:1]
    value = rest[0]
    gradient, = torch.autograd.grad(value, x)
    target, ignore_index = wide(given["target"]).long(), int(given["ignore_index"])
    bad = ((target < 0) | (target >= x.shape[-1])) & (target != ignore_index)
    gradient = torch.where(bad[..., None], math.nan, gradient)
    nothing = given["reduction"] == "mean" and not _parts(given, target).sum()
    gradient = torch.where((target == ignore_index)[..., None] | nothing, 0.0, gradient)
    return [Wanted(loss, value.detach(), 2**6, torch.float32),
            Wanted("gradient", gradient, 4, given["logits"].dtype, ~torch.isinf(x).any(-1))]


def linear_cross_entropy(given):
    """The logits are rounded to x's type, so the loss is off by a rounding at their size. Of a row with an infinite one
    it is infinite or NaN: not compared."""
    z = operand(given, "x") @ operand(given, "weight").t()
    (name, loss, *_), = cross_entropy(given, z, "class_weight")
    size = z.detach().abs().max().item() if z.numel() else 1.0
    error = 2 * size * torch.finfo(given["x"].dtype).eps * (1 + 2 * abs(number(given["z_loss"])) * (size + 6))
    if given["reduction"] == "sum":
        error *= max(1, given["target"].numel())
    apart = z.detach().isinf().any(-1)
    rows = ~apart if loss.dim() else None if not apart.any() else torch.zeros((), dtype=torch.bool)
    return [Wanted(name, loss, ("abs", error), torch.float32, rows)]


# ---- norms and quantising -----------------------------------------------------------------------------------------


def normalised(given, centred):
    """(the norm, the sum with the residual)"""
    h = operand(given, "x")
    if given["residual"] is not None:
        h = h + operand(given, "residual")
    weight, bias = (None if given[n] is None else operand(given, n) for n in ("weight", "bias"))
    c = h - h.mean(-1, keepdim=True) if centred else h
    y = c / torch.sqrt((c * c).mean(-1, keepdim=True) + number(given["eps"]))
    if weight is not None:
        y = y * (weight + number(given["weight_offset"]))
    return (y if bias is None else y + bias), h


def stored_sum(given, h):
    """What prenorm gives too, as a list."""
    if not given["prenorm"]:
        return []
    like = given["x"] if given["residual"] is None else given["residual"]
    return [Wanted("h", h, 1, given["residual_dtype"] or like.dtype)]


def norm(given, centred):
    y, h = normalised(given, centred)
    return [Wanted("y", y, 3, given["out_dtype"] or given["x"].dtype), *stored_sum(given, h)]


def scales(given):
    """The granularity's name, of an old one or of torch's member too."""
    return granularities.parse("", given["granularity"], warn=False)


def norm_quant(given, centred):
    y, h = normalised(given, centred)
    return [Wanted("y", y.detach(), ("float8", scales(given)), torch.float8_e4m3fn),
            *stored_sum(given, h.detach())]


def quantize_fp8(given):
    x, how = wide(given["x"]), ("float8", scales(given))
    whole = [Wanted("x", x, how, given["dtype"])]
    return whole + [Wanted("x.t()", x.t(), how, given["dtype"])] if given["transpose"] else whole


# ---- products -----------------------------------------------------------------------------------------------------


def gelu_tanh(x):
    return F.gelu(x, approximate="tanh")


ACTIVATIONS = {"relu": torch.relu, "silu": F.silu, "gelu": F.gelu, "gelu_tanh": gelu_tanh}
GATES = {"swiglu": F.silu, "geglu": F.gelu, "geglu_tanh": gelu_tanh}


def halves(x, interleaved):
    return (x[..., 0::2], x[..., 1::2]) if interleaved else x.chunk(2, -1)


def activated(y, name):
    if not name:
        return y
    if name in ACTIVATIONS:
        return ACTIVATIONS[name](y)
    gate, up = halves(y, name.endswith("_interleaved"))
    return GATES[name.removesuffix("_interleaved")](gate) * up


def gemm(given):
    y = number(given["alpha"]) * (operand(given, "a") @ operand(given, "b"))
    if given["c"] is not None:
        y = y + number(given["beta"]) * operand(given, "c")
    if given["bias"] is not None:
        y = y + operand(given, "bias")
    dtype = given["out"].dtype if given["out"] is not None else given["out_dtype"] or given["a"].dtype
    return [Wanted("y", activated(y, given["activation"]), 4 if given["activation"] else 2, dtype)]


def spread(scale, shape):
    """A scale for each element, of one for all, for each row or column, or for 128 of them."""
    scale = wide(scale)
    if scale.numel() == 1:
        return scale.reshape(1, 1).expand(shape)
    for i, n in enumerate(shape):
        if scale.shape[i] not in (1, n):
            scale = scale.repeat_interleave(128, i).narrow(i, 0, n)
    return scale.expand(shape)


PRODUCTS = ("products", 2**-9)  # of float8: what the tensor cores cut off


def fp8_gemm(given):
    a, b = (wide(given[x]) * spread(given[f"scale_{x}"], given[x].shape) for x in "ab")
    y = a @ b
    if given["bias"] is not None:
        y = y + wide(given["bias"])
    y = activated(y, given["activation"])
    if given["out_dtype"] == torch.float8_e4m3fn:
        y = (y / number(given["out_scale"])).clamp(-448, 448)
    return [Wanted("y", y, PRODUCTS, given["out_dtype"])]


def grouped_gemm(given):
    """Ends beyond the rows, or before the end of the group in front, are moved there."""
    a, b, scaled = operand(given, "a"), operand(given, "b"), given["scale_a"] is not None
    along_k = b.dim() == 2
    limit = a.shape[1] if along_k else a.shape[0]
    ends = [min(max(e, 0), limit) for e in wide(given["offsets"]).long().tolist()]
    groups = [(i, max(i, j)) for i, j in zip([0, *ends[:-1]], ends)]
    dtype = given["out_dtype"] or (torch.bfloat16 if scaled else given["a"].dtype)
    tolerance = PRODUCTS if scaled else 2
    if scaled:
        a = a * spread(given["scale_a"], a.shape)
        b = b * spread(given["scale_b"], b.shape) if along_k else torch.stack(
            [x * spread(s, x.shape) for x, s in zip(b, wide(given["scale_b"]))])
    if along_k:
        y = torch.stack([a[:, i:j] @ b[i:j] for i, j in groups]) if groups else a.new_zeros(0, a.shape[0], b.shape[1])
        return [Wanted("y", y, tolerance, dtype)]
    y, rows = a.new_full((a.shape[0], b.shape[2]), math.nan), torch.zeros(a.shape[0], dtype=torch.bool)
    for g, (i, j) in enumerate(groups):
        if j > i:
            y, rows[i:j] = torch.index_put(y, (torch.arange(i, j),), a[i:j] @ b[g]), True
    return [Wanted("y", y, tolerance, dtype, rows)]


# ---- pointwise ----------------------------------------------------------------------------------------------------


def gated(given, activation):
    gate, up = operand(given, "gate"), None if given["up"] is None else operand(given, "up")
    if up is None:
        gate, up = halves(gate, given["layout"] == "interleaved")
    return [Wanted("y", activation(gate) * up, 2, given["gate"].dtype)]


def swiglu(given):
    return gated(given, F.silu)


def geglu(given):
    return gated(given, gelu_tanh if given["approximate"] == "tanh" else F.gelu)


def positions(given, batch, length):
    """((B or 1, S) or (T,) positions, which rows belong to no sequence or None)"""
    offsets = given["seqlen_offsets"]
    offsets = wide(offsets).long() if isinstance(offsets, torch.Tensor) else torch.full((1,), int(offsets))
    if given["cu_seqlens"] is not None:
        ends, at = wide(given["cu_seqlens"]).long().tolist(), torch.zeros(length, dtype=torch.long)
        outside = torch.ones(length, dtype=torch.bool)
        for i, (start, end) in enumerate(pairwise(ends)):
            at[start:end] = torch.arange(end - start) + offsets[i if offsets.numel() > 1 else 0]
            outside[start:end] = False
        return at, outside
    if given["position_ids"] is not None:
        return wide(given["position_ids"]).long(), None
    if offsets.numel() > 1:
        return torch.arange(length)[None] + offsets[:, None], None
    return torch.arange(length) + offsets[0], None


def rotated(x, given):
    """x (B, S, H, D) or packed (T, H, D), turned; NaN where a position is not in the table."""
    cos, sin = wide(given["cos"]), wide(given["sin"])
    half, outside = cos.shape[-1], None
    if cos.dim() == 2:
        batch, length = (x.shape[0], x.shape[1]) if x.dim() == 4 else (1, x.shape[0])
        at, outside = positions(given, batch, length)
        lacks = ((at < 0) | (at >= cos.shape[0]))[..., None]
        at = at.clamp(0, max(cos.shape[0] - 1, 0))
        cos, sin = (torch.where(lacks, math.nan, t[at]) for t in (cos, sin))
    cos, sin = cos.unsqueeze(-2), sin.unsqueeze(-2)
    turned, rest = x[..., :2 * half], x[..., 2 * half:]
    a, b = halves(turned, given["interleaved"])
    pair = a * cos - b * sin, a * sin + b * cos
    turned = torch.stack(pair, -1).flatten(-2) if given["interleaved"] else torch.cat(pair, -1)
    y = torch.cat([turned, rest], -1)
    return y if outside is None else torch.where(outside[:, None, None], x, y)


def rope(given):
    return [Wanted("y", rotated(operand(given, "x"), given), 2, given["x"].dtype)]


def rope_qk(given):
    return [Wanted(n, rotated(operand(given, n), given), 2, given[n].dtype) for n in ("q", "k")]


def rope_cos_sin(given):
    dim, given_frequencies = int(given["dim"]), given["inv_freq"]
    frequencies = (number(given["base"]) ** (torch.arange(0, dim, 2, dtype=WIDE) / -dim)
                   if given_frequencies is None else wide(given_frequencies))
    angles = torch.outer(torch.arange(int(given["seqlen"]), dtype=WIDE), frequencies)
    return [Wanted("cos", angles.cos(), 1, given["dtype"]), Wanted("sin", angles.sin(), 1, given["dtype"])]
