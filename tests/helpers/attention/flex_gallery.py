"""Score and mask functions as users write them, for tests on CPU and GPU: each as (score_mod, mask_mod), either None.

The oracle evaluates the same functions with PyTorch by ``torch.vmap``, apart from tkq's graphs."""
import math

import torch
from torch.overrides import TorchFunctionMode

from tkq.testing import assert_2x

LSE_ERROR = 2e-5


def causal(b, h, q, kv):
    return q >= kv


def sliding_window(window):
    return lambda b, h, q, kv: (q >= kv) & (q - kv <= window)


def prefix_lm(prefix):
    """prefix: (B,) int32."""
    return lambda b, h, q, kv: (kv < prefix[b]) | (q >= kv)


def document(ids):
    """ids: (S,), the document of each token."""
    return lambda b, h, q, kv: (ids[q] == ids[kv]) & (q >= kv)


def prefix_document(ids, starts, length):
    """In each document a prefix that all see. starts: of each document."""
    def mask(b, h, q, kv):
        return (ids[q] == ids[kv]) & ((kv - starts[ids[kv]] < length) | (q >= kv))
    return mask


def dilated(window, step):
    return lambda b, h, q, kv: ((q - kv).abs() <= window) & ((q - kv) % step == 0)


def natten(width, height, kernel):
    """Neighbours of a place in an image of width x height."""
    def mask(b, h, q, kv):
        q_x, q_y, kv_x, kv_y = q // width, q % width, kv // width, kv % width
        x = q_x.clamp(kernel // 2, (height - 1) - kernel // 2)
        y = q_y.clamp(kernel // 2, (width - 1) - kernel // 2)
        return ((x - kv_x).abs() <= kernel // 2) & ((y - kv_y).abs() <= kernel // 2)
    return mask


def standalone_sparse(flags):
    """flags: (B, S) bool, keys that all see."""
    return lambda b, h, q, kv: flags[b, kv] | (q == kv)


def of_every_type(S, device):
    """Captured numbers of every type, on both sides: int64 whose high words, or low words alone, differ, floats with
    NaN and both zeros, bools. Blocks of the last keys are full, which bounds do not show."""
    at = torch.arange(S, device=device)
    near, far = (1 << 40) + at // 40, (at // 150 - 2) * (3 << 32) - at // 50
    times, flags = (at - 300).clamp(-200, 0) / 7, at // 96 % 3 != 1
    times[0], times[at > 200], times[at // 64 == 2] = math.inf, -0.0, math.nan
    times[at // 64 == 5] = 0.0

    def mask(b, h, q, kv):
        old = (near[q] >= near[kv]) & (far[q] - far[kv] <= 3 << 32)
        found = torch.where(flags[q] ^ flags[kv], times[q] >= times[kv], old) | (far[kv] + h == far[q] + 1)
        return found | (kv > S - S // 8) & (q ^ kv >= 0)
    return mask


def alibi(slopes):
    return lambda score, b, h, q, kv: score + slopes[h] * (kv - q)


def softcap(cap):
    return lambda score, b, h, q, kv: cap * torch.tanh(score / cap)


def t5_bias(table, buckets, most):
    """table: (buckets, H)."""
    def score_mod(score, b, h, q, kv):
        distance, half = (kv - q).abs(), buckets // 2
        far = half + (torch.log(distance.float() / half) / math.log(most / half) * (buckets - half)).to(torch.int64)
        far = torch.minimum(far, torch.full_like(far, buckets - 1))
        return score + table[torch.where(distance < half, distance, far), h]
    return score_mod


def relative_bias(bias):
    """bias: (H, Sq, Sk)."""
    return lambda score, b, h, q, kv: score + bias[h, q, kv]


def causal_score(score, b, h, q, kv):
    return torch.where(q >= kv, score, -float("inf"))


def operations(table, flags, small):
    """Every kind of operation that a kernel has. table: (7, S) fp32, flags: (S,) bool, small: (S,) int8."""
    def whole(score, b, h, q, kv):
        found = (q - kv) // 3 + (q - kv) % 5 + torch.div(q - kv, 7, rounding_mode="trunc") + ((q & 5) | (kv ^ 3))
        found = found + (q << 2) - (kv >> 1) + ~q + torch.maximum(q, kv) - (q - kv).abs().clamp(3, 40)
        wide = q.long() * 3000000000 // 7000000 - kv + (kv.long() * -7) % 11
        return score + 0.001 * (found + wide + (small[q] == small[kv]) + flags[kv].int() - (q != kv).float())

    def smooth(score, b, h, q, kv):
        x = score * 0.3
        found = torch.exp(-x.abs()) + torch.sigmoid(x) * x.clamp(-1, 1) - torch.erf(x) + torch.tanh(3 * x) / (1 + x * x)
        found = found + x ** 2 - x.abs() ** 0.5 + (x.abs() + 1) ** 1.3 + 2.0 ** (-h.float()) + torch.rsqrt(x * x + 1)
        found = found + torch.log(x * x + 0.5) + torch.log2(x * x + 2) + torch.exp2(x).minimum(x + 3) + torch.sin(x)
        return found + torch.cos(x) * (q - 20) / 700

    def other(score, b, h, q, kv):
        found = torch.where(torch.logical_and(q > 3, ~(kv < 5)) | (b == 1), score, -score)
        found = found + table[h - 3, -1] + table[q % 7][kv] + table[3:][h % 4, kv] + table.T[kv, h]
        # no quotient is a whole number: PyTorch multiplies by 1 / 7, and ceil(q * (1 / 7)) of q = 21 is 4
        found = torch.where(flags[q], found, found.relu())
        return found + ((kv + 0.5) / 3).floor() * 0.01 - ((q + 0.5) / 7).ceil().trunc() * 0.01
    return {"whole": whole, "smooth": smooth, "other": other}


def gallery(B, H, S, device, generator=None):
    """name -> (score_mod, mask_mod), for B sequences of S tokens, H heads; S at least 128."""
    new = lambda *shape, **kind: torch.randint(0, 1 << 16, shape, generator=generator, device=device).to(**kind)
    ids = (torch.arange(S, device=device) * 5 // S).to(torch.int64)
    starts = torch.searchsorted(ids, torch.arange(5, device=device)).int()
    slopes = 2.0 ** -torch.arange(1, H + 1, device=device, dtype=torch.float32)
    table = (new(32, H, dtype=torch.float32) / 65536 - 0.5)
    side = math.isqrt(S)
    return {
        "causal": (None, causal),
        "sliding_window": (None, sliding_window(100)),
        "prefix_lm": (None, prefix_lm(torch.arange(B, device=device, dtype=torch.int32) * 70 + 33)),
        "document": (None, document(ids)),
        "prefix_document": (None, prefix_document(ids, starts, 17)),
        "dilated": (None, dilated(90, 3)),
        "natten": (None, natten(side, side, 7)),
        "standalone_sparse": (None, standalone_sparse(new(B, S, dtype=torch.int32) % 9 == 0)),
        "alibi": (alibi(slopes), None),
        "alibi_causal": (alibi(slopes), causal),
        "softcap": (softcap(20.0), causal),
        "t5_bias": (t5_bias(table, 32, 128), None),
        "relative_bias": (relative_bias((new(H, S, S, dtype=torch.float32) / 65536).to(torch.bfloat16)), document(ids)),
        "causal_score": (causal_score, None),
    }


def grid(B, H, Sq, Sk, device):
    return tuple(torch.arange(n, device=device, dtype=torch.int32) for n in (B, H, Sq, Sk))


class IntsAsTensors(TorchFunctionMode):
    """table[0, q] as table[tensor(0), q], which torch's own mode below makes of it itself after 2.9."""

    def __torch_function__(self, func, types, args=(), kwargs=None):
        if func == torch.Tensor.__getitem__:
            index = args[1] if isinstance(args[1], tuple) else (args[1],)
            if all(isinstance(i, torch.Tensor) or type(i) is int for i in index):
                args = args[0], tuple(torch.tensor(i, device=args[0].device) if type(i) is int else i for i in index)
        return func(*args, **(kwargs or {}))


def over_all(function, places, score=None):
    """The values of a user's function at all places, (B, H, Sq, Sk), by torch.vmap."""
    from torch._dynamo._trace_wrapped_higher_order_op import TransformGetItemToIndex

    first = () if score is None else (0,)
    for dims in ((None, None, None, 0), (None, None, 0, None), (None, 0, None, None), (0, None, None, None)):
        function = torch.vmap(function, in_dims=(*first, *dims))
    with TransformGetItemToIndex(), IntsAsTensors():
        return function(*(() if score is None else (score,)), *places)


def visible(mask_mod, B, H, Sq, Sk, device):
    """(B, H, Sq, Sk) bool."""
    if mask_mod is None:
        return torch.ones(B, H, Sq, Sk, dtype=torch.bool, device=device)
    return over_all(mask_mod, grid(B, H, Sq, Sk, device)).expand(B, H, Sq, Sk)


def dense(q, k, v, score_mod, seen, scale=None, dtype=torch.float64):
    """(o, lse) with all scores in memory, computed in dtype. seen: (B, H, Sq, Sk) bool."""
    (B, H, Sq, D), Sk = q.shape, k.shape[2]
    q, k, v = q.to(dtype), *(x.to(dtype).repeat_interleave(H // k.shape[1], 1) for x in (k, v))
    s = q @ k.mT * (D ** -0.5 if scale is None else scale)
    if score_mod is not None:
        s = over_all(score_mod, grid(B, H, Sq, Sk, q.device), s).to(dtype)
    s = s.masked_fill(~seen, -math.inf)
    return s.softmax(-1).nan_to_num(0.0) @ v, s.logsumexp(-1)


def judge(result, given, score_mod, seen, what="", scale=None):
    """result: (o, lse or None), given: (q, k, v). o by the 2x rule beside PyTorch at q's dtype, lse to ``LSE_ERROR`` of
    its size, both against float64."""
    (o, lse), (q, k, v) = result, given
    true_o, true_lse = dense(q, k, v, score_mod, seen, scale)
    low_o, _ = dense(q, k, v, score_mod, seen, scale, q.dtype)
    assert_2x(o, true_o, low_o, 1, f"{what} o")
    if lse is not None:
        assert torch.equal(torch.isinf(lse), torch.isinf(true_lse)) and not lse.isnan().any(), f"{what}: lse"
        finite = torch.isfinite(true_lse)
        error = (lse.double() - true_lse)[finite].abs()
        allowed = LSE_ERROR * (true_lse[finite].abs() + 10)
        assert not error.numel() or (error <= allowed).all(), f"{what}: lse is off by {error.max():.2e}"
