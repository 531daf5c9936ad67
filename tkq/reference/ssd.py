"""Mamba-2's state space dual token by token, in plain PyTorch: what it means. The path of CPU tensors, the oracle of
the tests.

Computed in float32 (float64 stays float64), rounded once at the end. Clear rather than fast.
"""
import math
from typing import NamedTuple, Optional

from torch import Tensor
from torch.nn.functional import silu, softplus

from tkq.reference.linear_attention import edges, linear_attn, linear_attn_backward
from tkq.reference.precision import _upcast
from tkq.runtime.call import autocast


class SsdGradients(NamedTuple):
    """Of `mamba2_ssd`'s tensors, wide; None for what there is not."""

    x: Tensor
    dt: Tensor
    A: Tensor
    B: Tensor
    C: Tensor
    D: Optional[Tensor]
    z: Optional[Tensor]
    dt_bias: Optional[Tensor]
    initial_states: Optional[Tensor]


def biased(dt: Tensor, dt_bias: Optional[Tensor] = None) -> Tensor:
    """dt + dt_bias, wide."""
    dt = _upcast(dt)
    return dt if dt_bias is None else dt + dt_bias.to(dt.dtype)


def step_sizes(raw: Tensor, dt_softplus: bool = False, dt_limit: tuple = (0.0, math.inf)) -> Tensor:
    """The d that the recurrence takes: softplus(raw), within dt_limit; raw: what `biased` gives."""
    d = softplus(raw) if dt_softplus else raw
    return d.clamp(*dt_limit) if _limits(dt_softplus, dt_limit) else d


def step_sizes_backward(dd: Tensor, raw: Tensor, dt_softplus: bool = False,
                        dt_limit: tuple = (0.0, math.inf)) -> Tensor:
    """The gradient of raw. dd: that of `step_sizes`. 0 outside dt_limit, as torch.clamp's."""
    if _limits(dt_softplus, dt_limit):
        d = softplus(raw) if dt_softplus else raw
        dd = dd.where((d >= dt_limit[0]) & (d <= dt_limit[1]), 0.0)
    return dd * raw.sigmoid() if dt_softplus else dd


def _limits(dt_softplus, dt_limit):
    """Is there something for dt_limit to do?"""
    return not dt_softplus or dt_limit[0] > 0.0 or dt_limit[1] < math.inf


@autocast.apart
def mamba2_ssd(x: Tensor, dt: Tensor, A: Tensor, B: Tensor, C: Tensor, D: Optional[Tensor] = None,
               z: Optional[Tensor] = None, dt_bias: Optional[Tensor] = None, initial_states: Optional[Tensor] = None,
               dt_softplus: bool = False, dt_limit: tuple = (0.0, math.inf), cu_seqlens: Optional[Tensor] = None):
    """(y, final states), both wide: h[t] = exp(dt[t] A) h[t-1] + dt[t] x[t] B[t]', y[t] = h[t] C[t] + D x[t], times
    silu(z[t]); dt as `biased` and
    `step_sizes` give it.

    x, z: (B, S, H, P). dt: (B, S, H). A, dt_bias: (H,). B, C: (B, S, G, N); H / G heads share one of theirs. D: (H,) or
    (H, P). States: (B, H, P, N), with cu_seqlens (N + 1,) of B = 1 one for each of N sequences, as
    `linear_attention.edges` takes them. y of tokens of no sequence is 0."""
    if cu_seqlens is not None:
        at, cu_seqlens = _inside(cu_seqlens, x.shape[1])
        part = {name: t if t is None else t[:, at] for name, t in dict(x=x, dt=dt, B=B, C=C, z=z).items()}
        y, states = _of_pieces(part["x"], part["dt"], A, part["B"], part["C"], D, part["z"], dt_bias, initial_states,
                               (dt_softplus, dt_limit), cu_seqlens)
        return _among_zeros(y, at, x.shape[1]), states
    return _of_pieces(x, dt, A, B, C, D, z, dt_bias, initial_states, (dt_softplus, dt_limit), None)


def _inside(cu_seqlens, tokens):
    """(tokens that are of a sequence, which lie one behind the other, cu_seqlens as these have it)."""
    cuts = edges(cu_seqlens, tokens)
    return slice(int(cuts[0]), int(cuts[-1])), cuts - cuts[0]


def _among_zeros(x, at, tokens):
    """x (1, tokens of sequences, ..) among zeros for the others."""
    found = x.new_zeros(1, tokens, *x.shape[2:])
    found[:, at] = x
    return found


def _of_pieces(x, dt, A, B, C, D, z, dt_bias, initial_states, how, cu_seqlens):
    step = step_sizes(biased(dt, dt_bias), *how)
    y, states = _ungated(x, step.to(_upcast(x).dtype), A, B, C, D, initial_states, cu_seqlens)
    return (y if z is None else y * silu(z.to(y.dtype))).contiguous(), states


def _ungated(x, dt, A, B, C, D, initial, cu_seqlens=None):
    """(y before it is gated, final states); dt: as it is multiplied by."""
    x, B, C = (t.to(dt.dtype) for t in (x, B, C))
    initial = None if initial is None else initial.mT
    y, states = linear_attn(C, B, x * dt[..., None], dt * A.to(dt.dtype), 1.0, initial, cu_seqlens)
    return y if D is None else y + _of_channels(D.to(y.dtype)) * x, states.mT


def _of_channels(D):
    return D[:, None] if D.dim() == 1 else D


@autocast.apart
def mamba2_ssd_backward(dy: Tensor, dfinal: Optional[Tensor], x: Tensor, dt: Tensor, A: Tensor, B: Tensor, C: Tensor,
                        D: Optional[Tensor], z: Optional[Tensor], dt_bias: Optional[Tensor],
                        initial_states: Optional[Tensor], dt_softplus: bool = False,
                        dt_limit: tuple = (0.0, math.inf), cu_seqlens: Optional[Tensor] = None) -> SsdGradients:
    """dfinal: the final states' gradient, or None. Those of tokens of no sequence are 0."""
    how = dt_softplus, dt_limit
    if cu_seqlens is None:
        return _backward(dy, dfinal, x, dt, A, B, C, D, z, dt_bias, initial_states, how, None)
    at, cu_seqlens = _inside(cu_seqlens, x.shape[1])
    dy, *parts = (t if t is None else t[:, at] for t in (dy, x, dt, B, C, z))
    found = _backward(dy, dfinal, *parts[:2], A, *parts[2:4], D, parts[4], dt_bias, initial_states, how, cu_seqlens)
    return found._replace(**{name: _among_zeros(getattr(found, name), at, x.shape[1])
                             for name in ("x", "dt", "B", "C", "z") if getattr(found, name) is not None})


def _backward(dy, dfinal, x, dt, A, B, C, D, z, dt_bias, initial_states, how, cu_seqlens):
    wide, raw = _upcast(x), biased(dt, dt_bias)
    step = step_sizes(raw, *how).to(wide.dtype)
    dy, dD, dz = dy.to(step.dtype), None, None
    if z is not None:
        y, _ = _ungated(x, step, A, B, C, D, initial_states, cu_seqlens)
        dz, dy = gate_backward(dy, y, z.to(step.dtype))
    initial, dfinal = (None if h is None else h.mT for h in (initial_states, dfinal))
    dC, dB, dv, dg, dinitial = linear_attn_backward(
        dy, dfinal, C.to(dy.dtype), B.to(dy.dtype), wide * step[..., None], step * A.to(step.dtype), initial, 1.0,
        cu_seqlens)
    dx = step[..., None] * dv
    if D is not None:
        dx = dx + _of_channels(D.to(dx.dtype)) * dy
        dD = (dy * wide).sum((0, 1) if D.dim() == 2 else (0, 1, 3))
    ddt = step_sizes_backward((wide * dv).sum(-1) + A.to(dg.dtype) * dg, raw, *how)
    return SsdGradients(dx, ddt, (step * dg).sum((0, 1)), dB, dC, dD, dz,
                        None if dt_bias is None else ddt.sum((0, 1)), None if dinitial is None else dinitial.mT)


def gate_backward(dy: Tensor, y: Tensor, z: Tensor):
    """(the gradient of z, that of y) of y * silu(z)."""
    of_z = z.sigmoid()
    return dy * y * of_z * (1 + z * (1 - of_z)), dy * z * of_z
