"""The gradients of the gated delta rule: corrected values and the chunks' inverses, which the forward keeps, and the
gradient of the values, a launch of the engine; from there on the launches of plain linear attention.

Of a head, with decays a[t] = exp(g[t]), c the scale, what the state lacks of a value, and the corrected value:

    r[t] = v[t] - a[t] S[t-1]' k[t],   u[t] = beta[t] r[t],   S[t] = a[t] S[t-1] + k[t] u[t]',   o[t] = c S[t]' q[t]

Let D[t] be the loss's derivative by S[t], and E[t] that by a[t] S[t-1]. From the last token to the first

    D[t] = c q[t] do[t]' + a[t+1] E[t+1],   du[t] = D[t]' k[t],   dv[t] = beta[t] du[t],   E[t] = D[t] - k[t] dv[t]'

so that D is a delta rule in the other direction. In a chunk, with D behind it, A = (I + N beta)^-1 of the forward
(see `engine.delta`), and P[i, j] = e^(G[j] - G[i]) k[i] q[j] for j >= i:

    dV = A' beta (c P dO + e^(G[63] - G) K D)      D before = e^G[63] D + c (e^G Q)' dO - (e^G K)' dV
    dU = c P dO + e^(G[63] - G) K D - N' dV

What is left are sums over pairs of tokens, which are linear attentions, as of u nothing else is differentiated:

    dq[t]    = c S[t] do[t]
    w[t]     = a[t] S[t-1] dv[t]                       the keys before t, t itself left out
    dk[t]    = D[t] u[t] - w[t]                        D u: of queries from t on, and of keys behind t
    dbeta[t] = r[t] du[t]
    dg[t]    = sum of E[t] a[t] S[t-1]

Each pair of a key before t and a query, or a key, from t on has a part in dg[t]: it is the sum, over t and the tokens
behind it, of what queries and keys as they come later take, less what they give as they come earlier:

    q dq - k x + k y - k w          x[t]: D u of queries from t on     y[t]: of keys behind t

All are made of the same u and dv of 16 bits, with states, and values that they take up, in two parts: the sums are
differences of equal numbers. A chunk's pairs are rounded once, for both sides of a difference.
What takes the same state is one launch: dq and w of S, x - y of D, which takes up two keys and values of each token
(see `engine.second`), and from which w is taken off where it is made. Of two tokens of a chunk both launches have the
same scores, do u and dv u: with gates' gradients the first launch gives keys what the chunk's pairs have for them, too,
x - y - w of the chunk in the place of w, and the second, without scores, adds what comes from the chunks behind. Of
heads that share one of q and k these launches add up two neighbours (see `engine.neighbours`), and what is left of more
is a launch of sums."""
from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from tkq.linear_attention.finish.launch import over_shared
from tkq.linear_attention.gradients import (
    Behind,
    behind_last,
    of_gates,
    of_gates_in_segments,
    over_values,
    parts_of,
    turned_part,
)
from tkq.linear_attention.launch import Given
from tkq.linear_attention.split.launch import by_blocks, launch, sums_neighbours
from tkq.linear_attention.suffix.launch import state_products


class DeltaSaved(NamedTuple):
    """What the gradients need of a forward. cu: where packed sequences begin and end. updates, inverse, transfers:
    corrected values as `engine.delta` keeps them, the chunks' inverses, and what segments make of states, if there are
    any: `Made.dv` and the others of a launch with updates; without inverse that of blocks; or None: all are made
    again. starts: where there are segments, the states that they begin with; reach: where these go by blocks, as `Made`
    has it."""

    q: Tensor
    k: Tensor
    v: Tensor
    g: Tensor | None
    beta: Tensor
    initial: Tensor | None
    cu: Tensor | None = None
    updates: Tensor | None = None
    inverse: Tensor | None = None
    transfers: Tensor | None = None
    starts: Tensor | None = None
    reach: Tensor | None = None


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
    """What the launches of a backward share. behind: what those take that begin with the final state's gradient. dv:
    the gradient of values. starts: where there are segments, the states' gradients behind them, over the scale."""

    saved: DeltaSaved
    scale: float
    do: Tensor
    behind: Behind
    dv: Tensor | None = None
    starts: Tensor | None = None


ALL = DeltaNeeds()


def backward(saved: DeltaSaved, scale: float, do: Tensor, dfinal: Tensor | None = None,
             needs: DeltaNeeds = ALL) -> DeltaGradients:
    """A launch of the engine for dv and dbeta, one for dq and w, one for x - y - w; dg is made of the latter two. Of
    tokens of no sequence the engine's outputs are zeros, whatever stands in q, k, v and beta there: nothing but these
    is multiplied here."""
    saved = saved if saved.updates is not None else _again(saved, scale)
    q, k, _, g, beta, initial, cu, updates, inverse, transfers, *_ = saved
    need_g, need_initial = needs.g and g is not None, needs.initial and initial is not None
    if scale == 0.0:  # o is 0: what goes back comes from the final state alone, and does not depend on the scale
        do, scale = torch.zeros_like(do), 1.0
    behind = behind_last(q, scale, dfinal)
    solved = dq = dk = dg = before = None
    if any((needs.k, needs.v, need_g, needs.beta, need_initial)):
        solved = launch(Given(k, behind.q, do, g, beta, behind.state, torch.float32 if need_initial else None,
                              updates, reverse=True, cu=cu, inverse=inverse, transfers=transfers,
                              blocks=inverse is None, reach=saved.reach, halves=_in_halves(saved)), behind.scale)
    p = Pass(saved, scale, do, behind, *(None, None) if solved is None else (solved.o, solved.starts))
    need_k = needs.k or need_g
    if needs.q or need_k:
        before = _before(p, need_k, need_g, need_g and (dfinal is not None or saved.starts is not None))
        dq = over_shared(before.o, q) if needs.q else None
    if need_k:
        behind_it = _behind(p, need_g, before.dv)
        dk = over_shared(behind_it.o, k) if needs.k else None
    if need_g:
        if saved.starts is None:
            at_end = None if dfinal is None else (before.state.mT * dfinal).sum((-1, -2))
            dg = of_gates(g, before.dots, behind_it.dots, at_end, cu)
        else:  # the state behind each segment times its gradient
            ends = state_products(before.state, p.starts.mT, behind.scale)
            dg = of_gates_in_segments(before.dots, behind_it.dots, ends.unflatten(0, (len(q), -1)))
    return DeltaGradients(dq, dk, p.dv if needs.v else None, dg,
                          solved.dots.to(beta.dtype) if needs.beta else None,
                          (behind.scale * solved.state).to(initial.dtype) if need_initial else None)


def _in_halves(saved):
    """Were states made of halves of segments?"""
    return saved.reach is not None and len(saved.transfers) > len(saved.starts)


def _again(saved, scale):
    """With what the forward may have kept, by the same launch."""
    q, k, v, g, beta, initial, cu, *_ = saved
    made = launch(by_blocks(Given(q, k, v, g, beta, initial, updates=True, cu=cu)), scale)
    return saved._replace(updates=made.dv, inverse=made.inverse, transfers=made.transfers,
                          starts=made.starts, reach=made.reach)


def _before(p, with_w, with_dots, with_final):
    """What keys before a token give: dq and, with_w, w; with the final state, or those behind segments, made again of u
    as it is here. With_dots
    less w, with what the chunk's queries and keys from a token on give, in the place of w, and sums of q dq, less k
    times both."""
    q, k, _, g, beta, initial, cu, kept, *_ = p.saved

    def given(part):
        return Given(p.do[..., part], kept[..., part], k, g, kept=beta, initial=turned_part(initial, part),
                     final=torch.float32 if with_final else None, x=q if with_dots else None, cu=cu,
                     q2=p.dv[..., part] if with_w else None, starts=turned_part(p.saved.starts, part),
                     apart=True)

    first, *_ = parts_of(kept.shape[3])
    summed = with_w and sums_neighbours(given(first))  # of all parts alike: their outputs are added up
    return over_values(kept.shape[3], lambda part: launch(given(part)._replace(summed=summed), p.scale),
                       apart=True)


def _behind(p, with_dots, w):
    """x - y - w, where x and y are what queries from a token on and keys behind it give; with sums of x - y times k,
    of other chunks: w is that of the launch before, with dots what is added. w: of every head, or of two neighbours;
    then of these."""
    behind, (_, k, _, g, beta, _, cu, kept, *_) = p.behind, p.saved
    summed = w.shape[2] < kept.shape[2]
    return over_values(kept.shape[3], lambda part: launch(Given(
        kept[..., part], p.do[..., part], behind.q, g, kept=beta, initial=turned_part(behind.state, part),
        x=k if with_dots else None, reverse=True, cu=cu, k2=p.dv[..., part], v2=k, summed=summed,
        starts=turned_part(p.starts, part), apart=True,
        less=None if part.start else w), behind.scale), apart=True)
