"""The gradients of linear attention with a gate for each column of k: three launches, and sums of what they give."""
from __future__ import annotations

import torch
from torch import Tensor
from torch.nn.functional import pad

from tkq.linear_attention.channels.launch import ChannelGiven, launch, of_chunks
from tkq.linear_attention.gradients import ALL, Gradients, Needs, Saved, of_shared, over_values, turned_part
from tkq.linear_attention.suffix.launch import suffix_sums


def backward(saved: Saved, scale: float, do: Tensor, dfinal: Tensor | None = None, needs: Needs = ALL) -> Gradients:
    """dv is a linear attention in the reversed order, as with other gates. dq and dk have gates of the columns that
    come out:

        dq[i, c] = scale * sum over j <= i of (do[i] v[j]) D[j+1..i] k[j, c]     D the products of column c's decays
        dk[j, c] = scale * sum over i >= j of (do[i] v[j]) D[j+1..i] q[i, c]

    What a gate of a column gets is the sum, over its token and those behind it, of q dq - k dk of that column: of a
    pair (i, j) behind it both have the same, and rounding must not make them differ, or errors of all tokens behind add
    up. With D[j+1..i] = E F, E what is of row i and F what is of row j, either is made of the same three numbers: do[i]
    v[j], rounded; q E, rounded; k F, rounded (`dot`). The final state, which is made again beside dq, times its
    gradient is added to all."""
    q, k, v, g, initial, _ = saved
    needs = Needs(*needs[:4], needs.initial and initial is not None)
    if scale == 0.0:  # o is 0: what goes back comes from the final state alone, and does not depend on the scale
        do, scale = torch.zeros_like(do), 1.0
    # a launch multiplies by scale what its state gives, and the final state is not of the outputs
    behind = None if dfinal is None else dfinal / scale
    of_q = of_k = dv = dinitial = dg = None
    if needs.q or needs.g:
        final = torch.float32 if needs.g and behind is not None else None
        of_q = of_columns(do, v, k, g, scale, initial, final, x=q if needs.g else None)
    if needs.k or needs.g:
        of_k = of_columns(v, do, q, g, scale, behind, x=k if needs.g else None, reverse=True)
    if needs.v or needs.initial:
        made = launch(ChannelGiven(k, q, do, g, initial=behind, final=torch.float32 if needs.initial else None,
                                   reverse=True), scale)
        dv = made.o
        if needs.initial:
            dinitial = (scale * made.state).to(initial.dtype)
    if needs.g:
        at_end = None if dfinal is None else (of_q.state.mT * dfinal).sum(-1)
        dg = of_gates((of_q.dots, of_k.dots), at_end)
    return Gradients(of_shared(of_q.o, q).to(q.dtype) if needs.q else None,
                     of_shared(of_k.o, k).to(k.dtype) if needs.k else None, dv if needs.v else None, dg, dinitial)


def of_columns(queries, keys, values, g, scale, initial=None, final=None, **ways):
    """A launch with gates of the columns of values; of parts of V, which are its heads' columns."""
    return over_values(keys.shape[3], lambda part: launch(ChannelGiven(
        queries[..., part], keys[..., part], values, g, initial=turned_part(initial, part), final=final, of_values=True,
        **ways), scale))


def of_gates(terms, at_end):
    """The sums over each token and those behind it of terms[0] - terms[1] (+ terms[2] - terms[3]), (B, S, HV, K) each;
    at_end: (B, HV, K), what the final state's gradient adds to all. In an order that S alone decides."""
    shape = terms[0].shape
    sums, totals = of_chunks([x.flatten(2) for x in terms])
    behind = pad(suffix_sums(totals)[:, 1:], (0, 0, 0, 1))
    if at_end is not None:
        behind = behind + at_end.flatten(1)[:, None]
    return sums.add_(behind[:, :, None]).flatten(1, 2)[:, :shape[1]].contiguous().view(shape)
