"""The gradients of the gated delta rule: the corrected values and their gradient, a launch of the engine each; from
there on the launches of plain linear attention.

Of a head, with decays a[t] = exp(g[t]), c the scale, what the state lacks of a value, and the corrected value:

    r[t] = v[t] - a[t] S[t-1]' k[t],   u[t] = beta[t] r[t],   S[t] = a[t] S[t-1] + k[t] u[t]',   o[t] = c S[t]' q[t]

Let D[t] be the loss's derivative by S[t], and E[t] that by a[t] S[t-1]. From the last token to the first

    D[t] = c q[t] do[t]' + a[t+1] E[t+1],   du[t] = D[t]' k[t],   dv[t] = beta[t] du[t],   E[t] = D[t] - k[t] dv[t]'

so that D is a delta rule in the other direction. In a chunk, with D behind it, A = (I + L)^-1 of the forward, and
P[i, j] = e^(G[j] - G[i]) k[i] q[j] for j >= i:

    dU = A' (c P dO + e^(G[63] - G) K D)      D before = e^G[63] D + c (e^G Q)' dO - (beta e^G K)' dU

What is left are sums over pairs of tokens, which are linear attentions, as of u nothing else is differentiated:

    dq[t]    = c S[t] do[t]
    z[t]     = a[t] S[t-1] du[t]                       the keys before t, t itself left out
    dk[t]    = D[t] u[t] - beta[t] z[t]                D u: of queries from t on, and of keys behind t
    dbeta[t] = r[t] du[t] = v[t] du[t] - k[t] z[t]
    dg[t]    = sum of E[t] a[t] S[t-1]

Each pair of a key before t and a query, or a key, from t on has a part in dg[t]: it is the sum, over t and the tokens
behind it, of what queries and keys as they come later take, less what they give as they come earlier. Both are made of
the same u and dv of 16 bits, with operands in two parts: the sums are differences of equal numbers."""
from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from tkq.linear_attention.gradients import of_gates, of_shared, over_values, turned_part
from tkq.linear_attention.launch import Given, launch
from tkq.linear_attention.segments import Segments, segments


class DeltaSaved(NamedTuple):
    """What the gradients need of a forward. cu: where packed sequences begin and end."""

    q: Tensor
    k: Tensor
    v: Tensor
    g: Tensor | None
    beta: Tensor
    initial: Tensor | None
    cu: Tensor | None = None


class DeltaNeeds(NamedTuple):
    """Which gradients are wanted."""

    q: bool = True
    k: bool = True
    v: bool = True
    g: bool = True
    beta: bool = True
    initial: bool = True


class DeltaGradients(NamedTuple):
    """Of the tensors' shapes and types; None where it is not wanted."""

    q: Tensor | None = None
    k: Tensor | None = None
    v: Tensor | None = None
    g: Tensor | None = None
    beta: Tensor | None = None
    initial: Tensor | None = None


class Pass(NamedTuple):
    """What the launches of a backward share. u: the corrected values, du: their gradient. behind: the final state's
    gradient, as a launch that multiplies by scale takes it. of: packed sequences' tokens, or None."""

    saved: DeltaSaved
    scale: float
    do: Tensor
    behind: Tensor | None
    u: Tensor
    of: Segments | None
    du: Tensor | None = None
    dv: Tensor | None = None


ALL = DeltaNeeds()


def backward(saved: DeltaSaved, scale: float, do: Tensor, dfinal: Tensor | None = None,
             needs: DeltaNeeds = ALL) -> DeltaGradients:
    """Two launches for u and du, one for dq, three for dk (the last of which dbeta takes, too), three more for dg."""
    q, k, v, g, beta, initial, cu = saved
    need_g, need_initial = needs.g and g is not None, needs.initial and initial is not None
    if scale == 0.0:  # o is 0: what goes back comes from the final state alone, and does not depend on the scale
        do, scale = torch.zeros_like(do), 1.0
    behind = None if dfinal is None else dfinal / scale
    p = Pass(saved, scale, do, behind, launch(Given(k, k, v, g, beta, initial, updates=True, cu=cu), 1.0).o,
             segments(cu, q.shape[1]))
    solved = dq = dk = dg = z = None
    if any((needs.k, needs.v, need_g, needs.beta, need_initial)):
        solved = launch(Given(k, q, do, g, beta, behind, torch.float32 if need_initial else None, reverse=True, cu=cu),
                        scale)
        p = p._replace(du=solved.o, dv=solved.dv)
    if needs.q or need_g:
        of_q = _dq(p, need_g, need_g and dfinal is not None)
        dq = of_shared(of_q.o, q) if needs.q else None
    if needs.k or needs.beta:
        z = of_keys_before(p, p.du)
    if needs.k:
        dk = _dk(p, z.o)
    if need_g:
        at_end = None if dfinal is None else (of_q.state.mT * dfinal).sum((-1, -2))
        dg = of_gates(g, of_q.dots, _dots(p), at_end, p.of)
    return DeltaGradients(dq, dk, p.dv if needs.v else None, dg, _dbeta(p, z.o) if needs.beta else None,
                          (scale * solved.state).to(initial.dtype) if need_initial else None)


def _dq(p, with_dots, with_final):
    """dq; with sums of q dq; with the final state, made again of u as it is here."""
    q, k, _, g, _, initial, cu = p.saved
    return over_values(p.u.shape[3], lambda part: launch(Given(
        p.do[..., part], p.u[..., part], k, g, initial=turned_part(initial, part),
        final=torch.float32 if with_final else None, x=q if with_dots else None, cu=cu), p.scale))


def of_keys_before(p, d, with_dots=False):
    """a[t] S[t-1] d[t], d as v; with sums of this times k."""
    _, k, _, g, _, initial, cu = p.saved
    return over_values(d.shape[3], lambda part: launch(Given(
        d[..., part], p.u[..., part], k, g, initial=turned_part(initial, part), x=k if with_dots else None,
        strict=True, cu=cu), 1.0))


def _dk(p, z):
    q, k, _, g, beta, _, cu = p.saved

    def of(values, queries, scale, **more):
        return over_values(p.u.shape[3], lambda part: launch(Given(
            p.u[..., part], values[..., part], queries, g, reverse=True,
            initial=turned_part(more.get("behind"), part), strict=more.get("strict", False), cu=cu), scale)).o

    made = _wide(of(p.do, q, p.scale, behind=p.behind))
    made.sub_(of(p.dv, k, 1.0, strict=True)).addcmul_(_wide(beta)[..., None], z, value=-1)
    return of_shared(_inside(p, made), k).to(k.dtype)


def _dbeta(p, z):
    _, k, v, _, beta, *_ = p.saved
    of_keys = (_wide(k)[:, :, :, None] * z.unflatten(2, (k.shape[2], -1))).sum(-1).flatten(2, 3)
    return _inside(p, (_wide(v) * p.du).sum(-1) - of_keys).to(beta.dtype)


def _inside(p, x):
    """Of tokens of no sequence zeros, whatever stands in q, k, v and beta there."""
    return x if p.of is None else p.of.only_inside(x)


def _dots(p):
    """What values get of queries behind them, less what they get of keys; what keys take of values before them."""
    q, k, _, g, _, _, cu = p.saved
    of_queries = launch(Given(k, q, p.do, g, initial=p.behind, x=p.u, reverse=True, cu=cu), p.scale).dots
    of_keys = launch(Given(k, k, p.dv, g, x=p.u, reverse=True, strict=True, cu=cu), 1.0).dots
    return of_queries - of_keys + of_keys_before(p, p.dv, True).dots


def _wide(x):
    """16 bits as float32."""
    return x.to(torch.promote_types(x.dtype, torch.float32))
