"""Steps of linear attention and state spaces on a pool of states, in plain PyTorch: what they mean. The path of CPU
tensors, the oracle of the tests.

Computed in float32 (float64 where an operand is), rounded once at the end. Clear rather than fast.
"""
from typing import Optional

import torch
import torch.nn.functional as F
from torch import Tensor

from tkq.reference.precision import _upcast
from tkq.runtime.call import autocast


@autocast.apart
def linear_attn_step(q: Tensor, k: Tensor, v: Tensor, g: Optional[Tensor], state: Tensor, scale: Optional[float] = None,
                     state_indices: Optional[Tensor] = None, num_accepted_tokens: Optional[Tensor] = None,
                     state_v_first: bool = False, beta: Optional[Tensor] = None, qk_l2norm: bool = False) -> Tensor:
    """o, wide; the pool of states is updated in place. Arguments as `tkq.linear_attn_step` has them; with beta
    (N, T, HV) the delta rule, and with qk_l2norm q and k over their lengths."""
    pool = state.mT if state_v_first else state
    wide = torch.promote_types(_upcast(q).dtype, _upcast(state).dtype)
    q, k, v = (x.to(wide) for x in (q, k, v))
    if qk_l2norm:
        q, k = (x * (x.square().sum(-1, keepdim=True) + 1e-6).rsqrt() for x in (q, k))
    (N, T, H, K), HV = q.shape, v.shape[2]
    q, k = (x.repeat_interleave(HV // H, 2) for x in (q, k))
    scale = K**-0.5 if scale is None else scale
    decay = None if g is None else g.to(wide).exp()
    o = v.new_zeros(v.shape)  # contiguous, however v lies
    for n in range(N):
        row, slots = _rows(n, T, pool.shape[0], state_indices, num_accepted_tokens)
        if row is None:
            continue
        S = pool[row].to(wide)
        for t in range(T):
            if decay is not None:
                a = decay if decay.dim() == 1 else decay[n, t]
                S = (a[:, None, None] if a.dim() == 1 else a[:, :, None]) * S
            u = v[n, t]
            if beta is not None:
                u = beta[n, t].to(wide)[:, None] * (u - _of(S, k[n, t]))
            S = S + k[n, t, :, :, None] * u[:, None, :]
            o[n, t] = scale * _of(S, q[n, t])
            if slots[t] is not None:
                pool[slots[t]] = S.to(pool.dtype)
    return o


def _rows(n, T, rows, state_indices, num_accepted_tokens):
    """(the pool's row that sequence n begins with, those that get its state behind each token); None for none."""
    def checked(row):
        return row if 0 <= row < rows else None

    if num_accepted_tokens is None:
        row = checked(n if state_indices is None else int(state_indices[n]))
        return row, [*[None] * (T - 1), row]
    accepted = int(num_accepted_tokens[n])
    slots = [checked(int(i)) for i in state_indices[n]]
    return slots[accepted - 1] if 1 <= accepted <= T else None, slots


def _of(S, x):
    """S' x of each head: (HV, K, V), (HV, K) -> (HV, V)."""
    return (x[:, None, :] @ S)[:, 0]


@autocast.apart
def ssd_step(state: Tensor, x: Tensor, dt: Tensor, A: Tensor, B: Tensor, C: Tensor, D: Optional[Tensor] = None,
             z: Optional[Tensor] = None, dt_bias: Optional[Tensor] = None, dt_softplus: bool = False,
             state_batch_indices: Optional[Tensor] = None, num_accepted_tokens: Optional[Tensor] = None) -> Tensor:
    """y, wide; the pool of states is updated in place. Arguments as `tkq.ssd_step` has them."""
    wide = torch.promote_types(_upcast(x).dtype, _upcast(state).dtype)
    tokens = x.dim() == 4
    x, B, C, dt, z = (t if t is None or tokens else t[:, None] for t in (x, B, C, dt, z))
    x, dt, A = x.to(wide), dt.to(wide), A.to(wide)
    dt, A = dt[..., 0] if dt.dim() == 4 else dt, A[:, 0, 0] if A.dim() == 3 else A
    if dt_bias is not None:
        dt = dt + (dt_bias[:, 0] if dt_bias.dim() == 2 else dt_bias).to(wide)
    if dt_softplus:
        dt = F.softplus(dt)
    y = linear_attn_step(C, B, dt[..., None] * x, dt * A, state, 1.0, state_batch_indices, num_accepted_tokens, True)
    if D is not None:
        y = y + (D[:, None] if D.dim() == 1 else D).to(wide) * x
    if z is not None:
        y = y * F.silu(z.to(wide))
    rows = [_rows(n, x.shape[1], state.shape[0], state_batch_indices, num_accepted_tokens)[0] for n in range(len(x))]
    for n in (n for n, row in enumerate(rows) if row is None):
        y[n] = 0
    return (y if tokens else y[:, 0]).contiguous()
