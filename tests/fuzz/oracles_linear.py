"""What linear attention means, in float64 on the CPU: token by token."""
import math

import torch

from .judge import ROUNDING
from .oracles import WIDE, Wanted, number, operand


def linear_attn(given):
    q, k, v = (operand(given, n) for n in "qkv")
    g, beta, state = (None if given.get(n) is None else operand(given, n) for n in ("g", "beta", "initial_state"))
    (batch, tokens, heads, columns), (heads_v, columns_v) = q.shape, v.shape[2:]
    q, k = (x.repeat_interleave(heads_v // heads, 2) for x in (q, k))
    state = torch.zeros(batch, heads_v, columns, columns_v, dtype=WIDE) if state is None else state
    scale, out = number(given["scale"], columns**-0.5), []
    for t in range(tokens):
        if g is not None:
            decay = (g if g.dim() == 1 else g[:, t]).exp()[..., None]
            state = (decay if g.dim() == 4 else decay[..., None]) * state
        u = v[:, t]
        if beta is not None:
            u = beta[:, t, :, None] * (u - torch.einsum("bhk,bhkv->bhv", k[:, t], state))
        state = state + torch.einsum("bhk,bhv->bhkv", k[:, t], u)
        out.append(scale * torch.einsum("bhk,bhkv->bhv", q[:, t], state))
    o = torch.stack(out, 1) if out else v
    rows = _finite(given, o.shape[:3])
    found = [Wanted("o", o, 8, given["q"].dtype, rows)]
    # values, of several times the state's size, are rounded to 16 bits with what decays; the delta rule's more often
    roundings = 4 if beta is None else 8
    last = Wanted("state", state, roundings * ROUNDING[given["q"].dtype] / ROUNDING[torch.float32], torch.float32,
                  None if rows is None else rows.all(1))
    return [*found, last] if given["output_final_state"] else found


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
            else:
                fine &= ~bad.flatten(1).any(1)[:, None, None]
    return None if fine.all() else fine
