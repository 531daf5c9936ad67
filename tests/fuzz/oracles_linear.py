"""What linear attention means, in float64 on the CPU: token by token."""
import math
from itertools import pairwise

import torch

from .judge import ROUNDING
from .oracles import WIDE, Wanted, number, operand


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
    for of, (row, begin, end) in zip(state, pieces):
        part = [x if x is None or x.dim() == 1 else x[row, begin:end] for x in (q, k, v, g, beta)]
        found, one = _sequence(*part, of, scale)
        o = torch.cat((o[:row], torch.cat((o[row, :begin], found, o[row, end:]))[None], o[row + 1:]))
        last.append(one.mT if v_first else one)
    rows = _finite(given, o.shape[:3])
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
    """(o, the state behind the last token) of (tokens, heads, columns)."""
    out = []
    for t in range(len(v)):
        if g is not None:
            decay = (g if g.dim() == 1 else g[t]).exp()[..., None]
            state = (decay if g.dim() == 3 else decay[..., None]) * state
        u = v[t]
        if beta is not None:
            u = beta[t, :, None] * (u - torch.einsum("hk,hkv->hv", k[t], state))
        state = state + torch.einsum("hk,hv->hkv", k[t], u)
        out.append(scale * torch.einsum("hk,hkv->hv", q[t], state))
    return torch.stack(out) if out else v, state


def gated_delta_rule(given):
    """The same recurrence, with beta."""
    return linear_attn(given)


def _finite(given, shape):
    """Where results are compared, (B, S, HV): not in sequences with what is not finite, which reaches other tokens of
    its chunk on a GPU, and is not added up in one order everywhere. None: in all. A gate of -inf is an end."""
    fine = torch.ones(shape, dtype=torch.bool)
    for name in ("q", "k", "v", "g", "beta", "initial_state"):
        if given.get(name) is not None:
            x = operand(given, name).detach()
            bad = ~x.isfinite() & ~((x == -math.inf) & (name == "g"))
            if x.dim() == 1:
                fine &= ~bad
            elif given["cu_seqlens"] is not None:  # all in one row: nothing is compared
                fine &= not bad.any()
            else:
                fine &= ~bad.flatten(1).any(1)[:, None, None]
    return None if fine.all() else fine
