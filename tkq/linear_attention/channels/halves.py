"""Linear attention with a gate for each column of k, and more columns than a launch takes: by halves of them.

Rows of a state decay apart, and none of them reads another: what queries see is the sum of what the halves give, each
an attention of its own. So are gradients: those of q, k and g are each of one half's columns, that of v is a sum."""
from __future__ import annotations

import torch
from torch import Tensor

from tkq.linear_attention.channels.gradients import backward as of_half
from tkq.linear_attention.channels.launch import ChannelGiven, launch
from tkq.linear_attention.gradients import ALL, Gradients, Needs, Saved


def halves(columns: int) -> tuple[slice, slice]:
    """Of a number of columns, each a multiple of 16."""
    half = -(-columns // 32) * 16
    return slice(half), slice(half, columns)


def rows(state: Tensor | None, part: slice) -> Tensor | None:
    """Those of (B, HV, K, V) that belong to columns of k."""
    return None if state is None else state[:, :, part]


def forward(given: ChannelGiven, scale: float) -> tuple[Tensor, Tensor | None]:
    """(o, the final state or None) by two launches."""
    q, k, _, g, _, initial, *_ = given
    first, second = (launch(given._replace(
        q=q[..., part], k=k[..., part], g=g[..., part], initial=rows(initial, part)), scale)
        for part in halves(q.shape[3]))
    o = first.o + second.o
    if first.state is None:
        return o, None
    if given.v_first:
        return o, torch.cat((first.state.mT, second.state.mT), 3).mT
    return o, torch.cat((first.state, second.state), 2)


def backward(saved: Saved, scale: float, do: Tensor, dfinal: Tensor | None = None, needs: Needs = ALL) -> Gradients:
    """As `gradients.backward`."""
    q, k, v, g, initial, cu = saved
    found = [of_half(Saved(q[..., part], k[..., part], v, g[..., part], rows(initial, part), cu), scale, do,
                     rows(dfinal, part), needs) for part in halves(q.shape[3])]

    def whole(name, dimension):
        first, second = (getattr(one, name) for one in found)
        return None if first is None else torch.cat((first, second), dimension)

    dv = None if found[0].v is None else found[0].v + found[1].v
    return Gradients(whole("q", 3), whole("k", 3), dv, whole("g", 3), whole("initial", 2))
