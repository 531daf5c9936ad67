"""What steps of linear attention mean, in float64 on the CPU."""
import math

import torch

from .oracles import Wanted, number, operand


def linear_attn_step(given):
    """o alone: a pool has its own tests."""
    q, k, v, state = (operand(given, n) for n in ("q", "k", "v", "state"))
    g, beta = (None if given.get(n) is None else operand(given, n) for n in ("g", "beta"))
    if given.get("use_qk_l2norm_in_kernel") is True:
        q, k = (x / (x.square().sum(-1, keepdim=True) + 1e-6).sqrt() for x in (q, k))
    o = _stepped(given, (q, k, v, g, beta), state.mT if given["state_v_first"] else state, given["state_indices"])
    o = number(given["scale"], q.shape[3]**-0.5) * o
    return [Wanted("o", o, 8, given["q"].dtype, _finite(given, o.shape[:3]))]


def _finite(given, shape):
    """Where results are compared, (N, T, HV): not in sequences with what is not finite, and nowhere where a state is
    not. None: in all. A gate of -inf is an end."""
    fine = torch.ones(shape, dtype=torch.bool)
    for name in ("q", "k", "v", "g", "beta", "state"):
        if given.get(name) is not None:
            x = operand(given, name).detach()
            bad = ~x.isfinite() & ~((x == -math.inf) & (name == "g"))
            if x.dim() == 1:
                fine &= ~bad
            else:
                fine &= ~(bad.any() if name == "state" else bad.flatten(1).any(1)[:, None, None])
    return None if fine.all() else fine


def _stepped(given, operands, pool, rows):
    """S' q of each token."""
    (q, k, v, g, beta), accepted = operands, given["num_accepted_tokens"]
    (count, tokens, heads, _), heads_v = q.shape, v.shape[2]
    q, k = (x.repeat_interleave(heads_v // heads, 2) for x in (q, k))
    rows = torch.arange(count) if rows is None else rows.detach().cpu().long()
    if accepted is not None:
        last = accepted.detach().cpu().long() - 1
        rows = torch.tensor([r[i].item() if 0 <= i < tokens else -1 for r, i in zip(rows, last.tolist())])
    o = torch.zeros_like(v)
    for n, row in enumerate(rows.tolist()):
        S = pool[row] if 0 <= row < len(pool) else None
        for t in range(tokens) if S is not None else ():
            if g is not None:
                a = (g if g.dim() == 1 else g[n, t]).exp()
                S = (a[:, None, None] if a.dim() == 1 else a[:, :, None]) * S
            u = v[n, t]
            if beta is not None:
                u = beta[n, t, :, None] * (u - torch.einsum("hk,hkv->hv", k[n, t], S))
            S = S + torch.einsum("hk,hv->hkv", k[n, t], u)
            o[n, t] = torch.einsum("hk,hkv->hv", q[n, t], S)
    return o


def causal_conv1d_step(given):
    """y alone."""
    x, pool, weight = (operand(given, n) for n in ("x", "conv_states", "weight"))
    bias = 0 if given["bias"] is None else operand(given, "bias")
    tokens, W = x if x.dim() == 3 else x[:, None], weight.shape[1]
    rows = given["cache_indices"]
    rows = range(len(x)) if rows is None else rows.detach().cpu().long().tolist()
    y = torch.zeros_like(tokens)
    for n, row in enumerate(rows):
        if 0 <= row < len(pool):
            padded = torch.cat((pool[row, :, pool.shape[2] - W + 1:], tokens[n].mT), 1)
            for t in range(tokens.shape[1]):
                y[n, t] = (weight * padded[:, t:t + W]).sum(1) + bias
    y = torch.nn.functional.silu(y) if given["activation"] == "silu" else y
    given_ = [operand(given, n) for n in ("x", "conv_states", "weight", "bias") if given[n] is not None]
    fine = all(t.detach().isfinite().all() for t in given_)
    y = y.view(x.shape)
    return [Wanted("y", y, 8, given["x"].dtype, None if fine else torch.zeros(y.shape[:-1], dtype=torch.bool))]


def ssd_step(given):
    """y alone."""
    names = "state", "x", "dt", "A", "B", "C", "D", "z", "dt_bias"
    state, x, dt, A, B, C, D, z, bias = (None if given[n] is None else operand(given, n) for n in names)
    if x.dim() == 3:
        x, dt, B, C, z = (t if t is None else t[:, None] for t in (x, dt, B, C, z))
    dt = (dt[..., 0] if dt.dim() == 4 else dt) + (0 if bias is None else bias[:, 0] if bias.dim() == 2 else bias)
    if given["dt_softplus"] is True:
        dt = torch.logaddexp(dt, torch.zeros((), dtype=dt.dtype))
    rows, A = given["state_batch_indices"], A[:, 0, 0] if A.dim() == 3 else A
    y = _stepped(given, (C, B, dt[..., None] * x, dt * A, None), state.mT, rows)
    there = y.flatten(1).any(1) if len(y) else torch.zeros(0, dtype=torch.bool)  # a sequence without a row has 0 alone
    if D is not None:
        y = y + there[:, None, None, None] * ((D[:, None] if D.dim() == 1 else D) * x)
    if z is not None:
        y = y * torch.nn.functional.silu(z)
    fine = all(t is None or t.isfinite().all() for t in (state, x, dt, A, B, C, D, z))
    y = y if given["x"].dim() == 4 else y[:, 0]
    return [Wanted("y", y, 8, given["x"].dtype, None if fine else torch.zeros(y.shape[:-1], dtype=torch.bool))]
