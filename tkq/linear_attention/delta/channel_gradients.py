"""The gradients of the delta rule with a gate for each column of k: as `tkq.linear_attention.delta.gradients` derives
them, but that decays are of columns. The corrected values u and their gradient du are a launch each; the rest are
launches with gates of the columns that come out:

    dq[t] = c S[t] do[t]            w[t] = diag(a[t]) S[t-1] dv[t]                  the keys before t, t left out
    x[t]: of queries from t on      y[t]: of keys behind t, with their dv           dk[t] = x[t] - y[t] - w[t]

A gate of a column gets the sum, over its token and those behind it, of

    q dq - k x + k y - k w          in that column: what later queries and keys take, less what earlier ones give

Of each pair of tokens behind it two of these have the same, made of the same rounded numbers (`channels.gradients`)."""
from __future__ import annotations

import torch
from torch import Tensor

from tkq.linear_attention.channels.gradients import of_columns, of_gates
from tkq.linear_attention.channels.launch import ChannelGiven, launch
from tkq.linear_attention.delta.gradients import ALL, DeltaGradients, DeltaNeeds, DeltaSaved
from tkq.linear_attention.finish.launch import over_shared, row_dots
from tkq.linear_attention.gradients import behind_last


def backward(saved: DeltaSaved, scale: float, do: Tensor, dfinal: Tensor | None = None,
             needs: DeltaNeeds = ALL) -> DeltaGradients:
    """Two launches for u and du, which dbeta and dv are made of, and of four more those that are needed."""
    q, k, v, g, beta, initial, cu = saved
    need_initial = needs.initial and initial is not None
    if scale == 0.0:  # o is 0: what goes back comes from the final state alone, and does not depend on the scale
        do, scale = torch.zeros_like(do), 1.0
    behind = behind_last(q, scale, dfinal)
    made = launch(ChannelGiven(k, k, v, g, beta, initial, updates=True, cu=cu), 1.0)
    u, solved, of_q, w, of_queries, of_keys, dg = made.o, *(None,) * 6
    if any((needs.k, needs.v, needs.g, needs.beta, need_initial)):
        solved = launch(ChannelGiven(k, behind.q, do, g, beta, behind.state, torch.float32 if need_initial else None,
                                     reverse=True, cu=cu), behind.scale)
    if needs.q or needs.g:
        final = torch.float32 if needs.g and dfinal is not None else None
        of_q = of_columns(do, u, k, g, scale, initial, final, x=q if needs.g else None, cu=cu)
    if needs.k or needs.g:
        x = k if needs.g else None
        w = of_columns(solved.dv, u, k, g, 1.0, initial, x=x, strict=True, cu=cu)
        of_queries = of_columns(u, do, behind.q, g, behind.scale, behind.state, x=x, reverse=True, cu=cu)
        of_keys = of_columns(u, solved.dv, k, g, 1.0, x=x, reverse=True, strict=True, cu=cu)
    if needs.g:
        at_end = None if dfinal is None else (of_q.state.mT * dfinal).sum(-1)
        dg = of_gates((of_q.dots, of_queries.dots, of_keys.dots, w.dots), at_end, cu)
    return DeltaGradients(
        over_shared((of_q.o,), q) if needs.q else None,
        over_shared((of_queries.o, of_keys.o, w.o), k) if needs.k else None,
        solved.dv if needs.v else None, dg, row_dots(made.dv, solved.o, beta.dtype) if needs.beta else None,
        (behind.scale * solved.state).to(initial.dtype) if need_initial else None)
