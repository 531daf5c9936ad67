"""The gradients of linear attention with a gate for each column of k: three launches, and sums of what they give."""
from __future__ import annotations

import torch
from torch import Tensor

from tkq.linear_attention.channels.launch import ChannelGiven, column_sums, launch
from tkq.linear_attention.finish.launch import over_shared
from tkq.linear_attention.gradients import ALL, Gradients, Needs, Saved, behind_last, over_values, turned_part
from tkq.linear_attention.spec import NARROW


def backward(saved: Saved, scale: float, do: Tensor, dfinal: Tensor | None = None, needs: Needs = ALL) -> Gradients:
    """dv is a linear attention in the reversed order, as with other gates. dq and dk have gates of the columns that
    come out:

        dq[i, c] = scale * sum over j <= i of (do[i] v[j]) D[j+1..i] k[j, c]     D the products of column c's decays
        dk[j, c] = scale * sum over i >= j of (do[i] v[j]) D[j+1..i] q[i, c]

    What a gate of a column gets is the sum, over its token and those behind it, of q dq - k dk of that column: of a
    pair (i, j) behind it both have the same, and rounding must not make them differ, or errors of all tokens behind add
    up. With D[j+1..i] = E F, E what is of row i and F what is of row j, either is made of the same three numbers: do[i]
    v[j], rounded; q E, rounded; k F, rounded (`dot`). The final state, which is made again beside dq, times its
    gradient is added to all. dk's launch, which goes from the last token to the first, adds up what dq's has found and
    its own; where V takes two launches, `sums` does."""
    q, k, v, g, initial, cu = saved
    needs = Needs(*needs[:4], needs.initial and initial is not None)
    if scale == 0.0:  # o is 0: what goes back comes from the final state alone, and does not depend on the scale
        do, scale = torch.zeros_like(do), 1.0
    behind = behind_last(q, scale, dfinal)
    of_q = of_k = dv = dinitial = dg = None
    one = v.shape[3] <= NARROW  # launch has all columns of v
    if needs.q or needs.g:
        final = torch.float32 if needs.g and dfinal is not None else None
        of_q = of_columns(do, v, k, g, scale, initial, final, x=q if needs.g else None, cu=cu,
                          narrow=one and q.shape[2] == g.shape[2])
    at_end = None if of_q is None or of_q.state is None else (of_q.state.mT * dfinal).sum(-1)
    if needs.k or needs.g:
        sums = dict(less=of_q.dots, end=at_end) if needs.g and one else {}
        of_k = of_columns(v, do, behind.q, g, behind.scale, behind.state, x=k if needs.g else None, reverse=True,
                          cu=cu, narrow=one and k.shape[2] == g.shape[2], **sums)
    if needs.v or needs.initial:
        made = launch(ChannelGiven(k, behind.q, do, g, initial=behind.state, reverse=True, cu=cu,
                                   final=torch.float32 if needs.initial else None), behind.scale)
        dv = made.o
        if needs.initial:
            dinitial = (behind.scale * made.state).to(initial.dtype)
    if needs.g:
        dg = of_k.dots if one else of_gates((of_q.dots, of_k.dots), at_end, cu)
    return Gradients(over_shared(of_q.o, q) if needs.q else None, over_shared(of_k.o, k) if needs.k else None,
                     dv if needs.v else None, dg, dinitial)


def of_columns(queries, keys, values, g, scale, initial=None, final=None, second=None, **ways):
    """A launch with gates of the columns of values; of parts of V, which are its heads' columns."""
    return over_values(keys.shape[3], lambda part: launch(ChannelGiven(
        queries[..., part], keys[..., part], values, g, initial=turned_part(initial, part), final=final, of_values=True,
        second=None if second is None else second[..., part], **ways), scale))


def of_gates(terms, at_end, cu=None):
    """The sums over each token and those behind it of terms[0] - terms[1], (B, S, HV, K) each;
    at_end: (B or N, HV, K), what the final state's gradient adds to all. cu: where packed sequences begin and end."""
    sums = column_sums(*(x.flatten(2) for x in terms), None if at_end is None else at_end.flatten(1), cu)
    return sums.view(terms[0].shape)
