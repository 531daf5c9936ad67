"""The gradients of the delta rule with a gate for each column of k: as `tkq.linear_attention.delta.gradients` derives
them, but that decays are of columns. The corrected values u and their gradient du are a launch each; the rest are
launches with gates of the columns that come out:

    dq[t] = c S[t] do[t]            z[t] = diag(a[t]) S[t-1] du[t]                  the keys before t, t left out
    x[t]: of queries from t on      y[t]: of keys behind t, with their dv           dk[t] = x[t] - y[t] - beta[t] z[t]

With w[t] = diag(a[t]) S[t-1] dv[t], which is beta z but for what rounds dv, a gate of a column gets the sum, over its
token and those behind it, of

    q dq - k x + k y - k w          in that column: what later queries and keys take, less what earlier ones give

Of each pair of tokens behind it two of these have the same, made of the same rounded numbers (`channels.gradients`)."""
from __future__ import annotations

import torch
from torch import Tensor

from tkq.linear_attention.channels.gradients import of_columns, of_gates
from tkq.linear_attention.channels.launch import ChannelGiven, launch
from tkq.linear_attention.delta.gradients import ALL, DeltaGradients, DeltaNeeds, DeltaSaved
from tkq.linear_attention.gradients import of_shared


def backward(saved: DeltaSaved, scale: float, do: Tensor, dfinal: Tensor | None = None,
             needs: DeltaNeeds = ALL) -> DeltaGradients:
    """Two launches for u and du, and of five more those that are needed."""
    q, k, v, g, beta, initial, _ = saved
    need_initial = needs.initial and initial is not None
    if scale == 0.0:  # o is 0: what goes back comes from the final state alone, and does not depend on the scale
        do, scale = torch.zeros_like(do), 1.0
    behind = None if dfinal is None else dfinal / scale
    u = launch(ChannelGiven(k, k, v, g, beta, initial, updates=True), 1.0).o
    solved = of_q = z = w = of_queries = of_keys = dg = None
    if any((needs.k, needs.v, needs.g, needs.beta, need_initial)):
        solved = launch(ChannelGiven(k, q, do, g, beta, behind, torch.float32 if need_initial else None, reverse=True),
                        scale)
    if needs.q or needs.g:
        final = torch.float32 if needs.g and behind is not None else None
        of_q = of_columns(do, u, k, g, scale, initial, final, x=q if needs.g else None)
    if needs.beta:
        z = of_columns(solved.o, u, k, g, 1.0, initial, strict=True).o
    if needs.k or needs.g:
        x = k if needs.g else None
        w = of_columns(solved.dv, u, k, g, 1.0, initial, x=x, strict=True)
        of_queries = of_columns(u, do, q, g, scale, behind, x=x, reverse=True)
        of_keys = of_columns(u, solved.dv, k, g, 1.0, x=x, reverse=True, strict=True)
    if needs.g:
        at_end = None if dfinal is None else (of_q.state.mT * dfinal).sum(-1)
        dg = of_gates((of_q.dots, of_queries.dots, of_keys.dots, w.dots), at_end)
    return DeltaGradients(
        of_shared(of_q.o, q).to(q.dtype) if needs.q else None,
        of_shared(of_queries.o.sub_(of_keys.o).sub_(w.o), k).to(k.dtype) if needs.k else None,
        solved.dv if needs.v else None, dg, _dbeta(saved, solved.o, z) if needs.beta else None,
        (scale * solved.state).to(initial.dtype) if need_initial else None)


def _dbeta(saved, du, z):
    """r du, r what the state lacked of v."""
    keys = saved.k.to(z.dtype)[:, :, :, None]
    of_keys = (z.unflatten(2, (keys.shape[2], -1)) * keys).sum(-1).flatten(2)
    return ((saved.v.to(z.dtype) * du).sum(-1) - of_keys).to(saved.beta.dtype)
