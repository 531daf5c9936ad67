"""What linear attention means, in float64 on the CPU: token by token."""
import math
from itertools import pairwise

import torch

from .judge import ROUNDING
from .oracles import WIDE, Wanted, number, operand, wide


def linear_attn(given):
    q, k, v = (operand(given, n) for n in "qkv")
    g, beta, state = (None if given.get(n) is None else operand(given, n) for n in ("g", "beta", "initial_state"))
    (batch, tokens, heads, columns), (heads_v, columns_v) = q.shape, v.shape[2:]
    q, k = (x.repeat_interleave(heads_v // heads, 2) for x in (q, k))
    pieces, v_first = _pieces(given, batch, tokens), given["state_v_first"]
    if state is None:
        state = torch.zeros(len(pieces), heads_v, columns, columns_v, dtype=WIDE)
    elif v_first:
        state = state.mT
    scale, o, last = number(given["scale"], columns**-0.5), torch.zeros_like(v), []
    grown = torch.zeros(batch, heads_v, dtype=WIDE)
    for of, (row, begin, end) in zip(state, pieces):
        part = [x if x is None or x.dim() == 1 else x[row, begin:end] for x in (q, k, v, g, beta)]
        found, one, largest = _sequence(*part, of, scale)
        grown[row] = torch.maximum(grown[row], largest)
        o = torch.cat((o[:row], torch.cat((o[row, :begin], found, o[row, end:]))[None], o[row + 1:]))
        last.append(one.mT if v_first else one)
    rows = _finite(given, torch.maximum(o.detach().abs(), grown[:, None, :, None]))
    found = [Wanted("o", o, 8, given["q"].dtype, rows)]
    of_states = None if rows is None else rows.all(1) if given["cu_seqlens"] is None else rows.all().expand(
        len(pieces), heads_v)
    last = torch.stack(last) if last else state
    # values, of several times the state's size, are rounded to 16 bits with what decays; the delta rule's more often
    roundings = (4 if beta is None else 8) * ROUNDING[given["q"].dtype] / ROUNDING[torch.float32]
    last = Wanted("state", last, roundings, torch.float32, of_states)
    return [*found, last] if given["output_final_state"] else found


def _pieces(given, batch, tokens):
    """(row of the batch, first token, end) of each sequence."""
    if given["cu_seqlens"] is None:
        return [(row, 0, tokens) for row in range(batch)]
    return [(0, *pair) for pair in pairwise(given["cu_seqlens"].tolist())]


def _sequence(q, k, v, g, beta, state, scale):
    """(o, the state behind the last token, the largest number of any head's states) of (tokens, heads, columns).
    Queries of 0 hide a state that has no end in float32, where 0 times infinity is NaN."""
    out, largest = [], torch.zeros(v.shape[1], dtype=WIDE)
    for t in range(len(v)):
        if g is not None:
            decay = (g if g.dim() == 1 else g[t]).exp()[..., None]
            state = (decay if g.dim() == 3 else decay[..., None]) * state
        u = v[t]
        if beta is not None:
            u = beta[t, :, None] * (u - torch.einsum("hk,hkv->hv", k[t], state))
        state = state + torch.einsum("hk,hv->hkv", k[t], u)
        largest = torch.maximum(largest, state.detach().abs().flatten(1).amax(1).nan_to_num(math.inf, math.inf))
        out.append(scale * torch.einsum("hk,hkv->hv", q[t], state))
    return torch.stack(out) if out else v, state, largest


def gated_delta_rule(given):
    """The same recurrence, with beta, of what the options make of q, k, g and beta."""
    made = {}
    if given["use_qk_l2norm_in_kernel"]:
        for name in ("q", "k"):
            x = operand(given, name)
            unit = x * (x.square().sum(-1, keepdim=True) + 1e-6).rsqrt()
            made[name] = unit + (unit.to(given[name].dtype).to(WIDE) - unit).detach()  # rounded, as it is given on
    if given["use_gate_in_kernel"]:
        bias = 0.0 if given["dt_bias"] is None else operand(given, "dt_bias")
        x, bound, factor = operand(given, "g") + bias, number(given["gate_lower_bound"]), operand(given, "A_log").exp()
        factor = factor[:, None] if x.dim() == 4 else factor
        made["g"] = -factor * torch.nn.functional.softplus(x) if bound is None else bound * (factor * x).sigmoid()
    if given["allow_neg_eigval"]:
        made["beta"] = 2 * operand(given, "beta")
    return linear_attn(dict(given, leaves={**given.get("leaves", {}), **made}))


def mamba2_ssd(given):
    """Mamba-2's recurrence, token by token."""
    x, dt, A, B, C = (operand(given, n) for n in ("x", "dt", "A", "B", "C"))
    D, z, bias, state = (None if given[n] is None else operand(given, n) for n in ("D", "z", "dt_bias",
                                                                                   "initial_states"))
    (batch, tokens, heads, P), (groups, N) = x.shape, B.shape[2:]
    B, C = (t.repeat_interleave(heads // groups, 2) for t in (B, C))
    dt = dt if bias is None else dt + bias
    dt = torch.nn.functional.softplus(dt) if given["dt_softplus"] else dt
    dt = dt.clamp(*map(float, given["dt_limit"]))
    pieces = _pieces(given, batch, tokens)
    state = torch.zeros(len(pieces), heads, P, N, dtype=WIDE) if state is None else state
    of_skip, y, last = None if D is None else D[:, None] if D.dim() == 1 else D, torch.zeros_like(x), []
    for of, (row, begin, end) in zip(state, pieces):
        out = []
        for t in range(begin, end):
            taken = torch.einsum("hp,hn->hpn", dt[row, t, :, None] * x[row, t], B[row, t])
            of = (dt[row, t] * A).exp()[..., None, None] * of + taken
            found = torch.einsum("hpn,hn->hp", of, C[row, t])
            found = found if D is None else found + of_skip * x[row, t]
            out.append(found if z is None else found * torch.nn.functional.silu(z[row, t]))
        found = torch.stack(out) if out else x[row, begin:end]
        y = torch.cat((y[:row], torch.cat((y[row, :begin], found, y[row, end:]))[None], y[row + 1:]))
        last.append(of)
    state = torch.stack(last) if last else state
    rows = _finite(given, y, SSD)
    # d x is rounded to 16 bits with what decays
    last = Wanted("states", state, 4 * ROUNDING[given["x"].dtype] / ROUNDING[torch.float32], torch.float32,
                  None if rows is None else rows.all(1) if given["cu_seqlens"] is None else rows.all().expand(
                      len(pieces), heads))
    return [Wanted("y", y, 8, given["x"].dtype, rows), *([last] if given["return_final_states"] else [])]


def hedgehog(given):
    """By all pairs of tokens."""
    q, k, v, q_map, k_map, linear, window = (operand(given, n) for n in HEDGEHOG)
    i = torch.arange(q.shape[1])
    apart = i[:, None] // 64 - i // 64
    near, far = (i[:, None] >= i) & (apart <= 1), apart > 1
    f, h = (torch.cat((y.softmax(-1), (-y).softmax(-1)), -1).clamp(min=1e-6)
            for y in (torch.einsum("bshd,hdf->bshf", x, w) for x, w in ((q, q_map), (k, k_map))))
    scores = (torch.einsum("bihd,bjhd->bhij", q, k) * q.shape[3]**-0.5).masked_fill(~near, -math.inf)
    a = window[:, None, None] * (scores - scores.amax(-1, keepdim=True)).exp() if i.numel() else scores
    a = a + linear[:, None, None] * torch.einsum("bihf,bjhf->bhij", f, h) * far
    o = torch.einsum("bhij,bjhd->bihd", a / (a.sum(-1, keepdim=True) + 1e-6), v)
    return [Wanted("o", o, 8, given["q"].dtype, _finite(given, o, HEDGEHOG))]


def of_factor(name, given, do, o):
    """How large the gradient of one of Hedgehog's factors may be, of a head: a sum of differences, each row's of dP and
    delta, which is made of o as it is rounded."""
    rows = (wide(do).abs() * o.value.detach().abs()).sum(-1)
    return rows.sum((0, 1)).max().item() / wide(given[name]).abs().min().clamp(min=1e-3).item() if rows.numel() else 0.0


SCANNED = "a", "b", "initial_state"
CONVOLVED = "x", "weight", "bias", "initial_state"
HEDGEHOG = "q", "k", "v", "q_map", "k_map", "linear_factor", "window_factor"
SSD = "x", "dt", "A", "B", "C", "D", "z", "dt_bias", "initial_states"


def _finite(given, o, names=("q", "k", "v", "g", "beta", "initial_state", "A_log", "dt_bias")):
    """Where results are compared, (B, S, HV): not in sequences with what is not finite, which reaches other tokens of
    its chunk on a GPU, and is not added up in one order everywhere; nor of heads whose results grow without end, in
    float32 to infinity. None: in all. A gate of -inf is an end."""
    large = (o.detach().abs() > 2.0**60).any(3).any(1)
    fine = (~large[:, None]).expand(o.shape[:3]).clone()
    for name in names:
        if given.get(name) is not None:
            x = operand(given, name).detach()
            bad = ~x.isfinite() & ~((x == -math.inf) & (name == "g"))
            if x.dim() == 1 or name in ("D", "q_map", "k_map", "dt_bias"):
                fine &= ~bad.view(len(x), -1).any(1)  # of heads
            elif given.get("cu_seqlens") is not None:  # all in one row: nothing is compared
                fine &= not bad.any()
            else:
                fine &= ~bad.flatten(1).any(1)[:, None, None]
    return None if fine.all() else fine


def fft_conv(given):
    """Tap by tap."""
    u, k = operand(given, "u"), operand(given, "k")
    d, pre, post = (None if given[n] is None else operand(given, n) for n in ("d", "pre_gate", "post_gate"))
    v, L = u if pre is None else u * pre, u.shape[2]
    y = torch.zeros_like(v) if d is None else d[:, None] * v
    for j in range(k.shape[1] if L else 0):
        if given["causal"]:
            y = y + k[:, j, None] * torch.nn.functional.pad(v, (min(j, L), 0))[..., :L] * (j < L)
        else:
            y = y + k[:, j, None] * v.roll(j, 2)
    y = y if post is None else y * post
    fine = all(operand(given, n).detach().isfinite().all() for n in ("u", "k", "d", "pre_gate", "post_gate")
               if given[n] is not None)
    return [Wanted("y", y, 8, given["u"].dtype, None if fine else torch.zeros(u.shape[:2], dtype=torch.bool))]


def causal_conv1d(given):
    """Tap by tap, from what is before each sequence on."""
    x, weight = operand(given, "x"), operand(given, "weight")
    bias, state = (None if given[n] is None else operand(given, n) for n in ("bias", "initial_state"))
    (batch, tokens, C), W = x.shape, weight.shape[1]
    pieces = _pieces(given, batch, tokens) if given["seq_idx"] is None else _runs(given["seq_idx"])
    state = torch.zeros(len(pieces), C, W - 1, dtype=WIDE) if state is None else state
    y, last = torch.zeros_like(x), []
    for before, (row, begin, end) in zip(state, pieces):
        padded = torch.cat((before, x[row, begin:end].mT), 1)
        z = torch.stack([(weight * padded[:, t:t + W]).sum(1) for t in range(end - begin)]) if end > begin else (
            x[row, begin:end])
        z = z if bias is None else z + bias
        found = torch.nn.functional.silu(z) if given["activation"] == "silu" else z
        size, count = int(given["head_dim"]), int(given["norm_heads"])
        heads = [h / (h.square().sum(-1, keepdim=True) + 1e-6).sqrt() for h in found.split(size, -1)]
        found = torch.cat([*heads[:count], found[:, count * size:]], -1)
        y = torch.cat((y[:row], torch.cat((y[row, :begin], found, y[row, end:]))[None], y[row + 1:]))
        last.append(padded[:, end - begin:])
    last = torch.stack(last) if last else state
    fine = all(operand(given, n).detach().isfinite().all() for n in CONVOLVED if given[n] is not None)
    rows = None if fine else torch.zeros(x.shape[:2], dtype=torch.bool)
    of = given["x"] if given["initial_state"] is None else given["initial_state"]
    final = Wanted("state", last, 1, of.dtype, None if fine else torch.zeros(last.shape[:2], dtype=torch.bool))
    return [Wanted("y", y, 8, given["x"].dtype, rows), *([final] if given["output_final_state"] else [])]


def _runs(numbers):
    """(row, first token, end) of each run of one number."""
    found = []
    for row, of in enumerate(numbers.tolist()):
        first = [t for t in range(len(of)) if not t or of[t] != of[t - 1]]
        found += [(row, a, e) for a, e in zip(first, [*first[1:], len(of)])]
    return found


def scan(given):
    """Token by token."""
    a, b = operand(given, "a"), operand(given, "b")
    state = torch.zeros(len(a), a.shape[2], dtype=WIDE) if given["initial_state"] is None else operand(
        given, "initial_state")
    found, size, tokens = {}, state.detach().abs(), range(a.shape[1])
    for t in reversed(tokens) if given["reverse"] else tokens:
        found[t] = state = a[:, t] * state + b[:, t]
        size = torch.maximum(size, state.detach().abs())
    h = torch.stack([found[t] for t in tokens], 1) if found else a
    fine = all(operand(given, n).detach().isfinite().all() for n in SCANNED if given[n] is not None) and bool(
        (size < 1e30).all())
    rows, ends = (None, None) if fine else (torch.zeros(h.shape[:2], dtype=torch.bool), torch.zeros(
        len(state), dtype=torch.bool))
    final = Wanted("state", state, 8, torch.float32, ends)
    return [Wanted("h", h, 8, given["a"].dtype, rows), *([final] if given["output_final_state"] else [])]


def based(given):
    """The sum of weights times values over tokens, and that of the weights alone."""
    q, k, v = (operand(given, n) for n in "qkv")
    q, k = (x.repeat_interleave(v.shape[2] // x.shape[2], 2) for x in (q, k))
    s = number(given["scale"], 0.25) * torch.einsum("bihd,bjhd->bhij", q, k)
    w = (1 + s + s * s / 2).tril()
    o = torch.einsum("bhij,bjhv->bihv", w, v)
    sums = w.sum(-1).transpose(1, 2)[..., None]
    fine = _finite(given, torch.maximum(o.detach().abs(), sums.detach()))  # weights grow as s^2, past float32's range
    if given["use_norm"]:
        o = o / sums
    return [Wanted("o", o, 8, given["q"].dtype, fine)]
