"""The gradients of the delta rule with a gate for each column of k: as `tkq.linear_attention.delta.gradients` derives
them, but that decays are of columns. The corrected values u and their gradient du are a launch each; the rest are
launches with gates of the columns that come out:

    dq[t] = c S[t] do[t]            w[t] = diag(a[t]) S[t-1] dv[t]                  the keys before t, t left out
    x[t]: of queries from t on      y[t]: of keys behind t, with their dv           dk[t] = x[t] - y[t] - w[t]

A gate of a column gets the sum, over its token and those behind it, of

    q dq - k x + k y - k w          in that column: what later queries and keys take, less what earlier ones give

Of each pair of tokens behind it two of these have the same, made of the same rounded numbers (`channels.gradients`). dq
and w take the same states; x and y those whose difference D is: two launches have all four (`channels.value_pairs`)."""
from __future__ import annotations

import torch
from torch import Tensor

from tkq.linear_attention.channels.gradients import of_columns, of_gates
from tkq.linear_attention.channels.launch import ChannelGiven, launch
from tkq.linear_attention.delta.gradients import ALL, DeltaGradients, DeltaNeeds, DeltaSaved
from tkq.linear_attention.finish.launch import over_shared, row_dots
from tkq.linear_attention.gradients import behind_last
from tkq.linear_attention.spec import NARROW


def backward(saved: DeltaSaved, scale: float, do: Tensor, dfinal: Tensor | None = None,
             needs: DeltaNeeds = ALL) -> DeltaGradients:
    """Two launches for u and du, which dbeta and dv are made of, and of two more those that are needed: one that gives
    dq and -w, one that gives x - y - w; with them the gates' gradients, as in `channels.gradients`."""
    q, k, v, g, beta, initial, cu, *_ = saved
    need_initial = needs.initial and initial is not None
    if scale == 0.0:  # o is 0: what goes back comes from the final state alone, and does not depend on the scale
        do, scale = torch.zeros_like(do), 1.0
    behind, pairs, one = behind_last(q, scale, dfinal), needs.k or needs.g, v.shape[3] <= NARROW
    made = launch(ChannelGiven(k, k, v, g, beta, initial, updates=True, cu=cu), 1.0)
    u, solved, of_q, of_k, dk, dg = made.o, *(None,) * 5
    if any((pairs, needs.v, needs.beta, need_initial)):
        solved = launch(ChannelGiven(k, behind.q, do, g, beta, behind.state, torch.float32 if need_initial else None,
                                     reverse=True, cu=cu), behind.scale)
    alone = one and q.shape[2] == g.shape[2]
    if needs.q or pairs:
        final = torch.float32 if needs.g and dfinal is not None else None
        of_q = of_columns(do, u, k, g, scale, initial, final, second=solved.dv if pairs else None,
                          x=q if pairs else None, narrow=alone, cu=cu)
    if pairs:
        at_end = None if of_q.state is None else (of_q.state.mT * dfinal).sum(-1)
        ways = dict(rest=of_q.dv, less=of_q.dots, end=at_end) if one else {}
        of_k = of_columns(u, do, behind.q, g, behind.scale, dfinal, second=solved.dv, v2=k, narrow=alone, reverse=True,
                          cu=cu, **ways)
        if needs.k:
            dk = over_shared(of_k.o if one else of_k.o + of_q.dv, k)
        if needs.g:
            dg = of_k.dots if one else of_gates((of_q.dots, of_k.dots), at_end, cu)
    return DeltaGradients(
        over_shared(of_q.o, q) if needs.q else None, dk, solved.dv if needs.v else None, dg,
        row_dots(made.dv, solved.o, beta.dtype) if needs.beta else None,
        (behind.scale * solved.state).to(initial.dtype) if need_initial else None)
