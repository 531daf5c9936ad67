"""Hedgehog's attention (LoLCATS) in plain PyTorch: what it means, with its gradients. The path of CPU tensors, the
oracle of the tests.

Computed in float32 (float64 stays float64), rounded once at the end. Clear rather than fast.
"""
from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import pad

from tkq.reference.precision import _upcast
from tkq.runtime.call import autocast

WINDOW = 64  # tokens: a query sees its own block of as many keys, up to itself, and the block before it
LEAST = 1e-6  # of a feature
EPS = 1e-6  # of the denominator
LEAST_SHARE = 2.0**-16  # of the denominator, that what is before the window must have for its sum to be known from it


@autocast.apart
def hedgehog(q: Tensor, k: Tensor, v: Tensor, q_map: Tensor, k_map: Tensor, linear_factor: Tensor,
             window_factor: Tensor) -> Tensor:
    """o (B, S, H, D), wide, by all pairs of tokens: of each head

        a[i, j] = window_factor exp(q[i] k[j] / sqrt(D) - most[i])      in the window; most: the largest score in it
        a[i, j] = linear_factor f(q[i]) f(k[j])                         for keys before the window
        o[i] = sum of a[i, j] v[j] / (sum of a[i, j] + 1e-6)

    q, k, v: (B, S, H, D). Maps: (H, D, F). Factors: (H,)."""
    return outputs(q, k, v, q_map, k_map, linear_factor, window_factor)[0]


@autocast.apart
def outputs(q: Tensor, k: Tensor, v: Tensor, q_map: Tensor, k_map: Tensor, linear_factor: Tensor,
            window_factor: Tensor) -> tuple[Tensor, Tensor]:
    """(o as `hedgehog`, of each token 1 over its denominator (B, S, H)), wide."""
    q, k, v, q_map, k_map, linear, window = (_upcast(x) for x in (q, k, v, q_map, k_map, linear_factor, window_factor))
    i = torch.arange(q.shape[1], device=q.device)
    far = i[:, None] // WINDOW - i // WINDOW > 1
    scores = _scores(q, k) * q.shape[3]**-0.5
    a = window[:, None, None] * (scores - scores.amax(-1, keepdim=True)).exp() if i.numel() else scores
    a = a + linear[:, None, None] * far * torch.einsum("bihf,bjhf->bhij", features(q, q_map), features(k, k_map))
    inverse = 1 / (a.sum(-1, keepdim=True) + EPS)
    return torch.einsum("bhij,bjhd->bihd", a * inverse, v), inverse[..., 0].transpose(1, 2)


def largest_scores(q: Tensor, k: Tensor) -> Tensor:
    """The largest q[i] k[j] in each token's window, (B, S, H), wide."""
    scores = _scores(_upcast(q), _upcast(k))
    return (scores.amax(-1) if scores.numel() else scores.sum(-1)).transpose(1, 2)


def _scores(q, k):
    """(B, H, S, S), -inf outside the window."""
    i = torch.arange(q.shape[1], device=q.device)
    near = (i[:, None] >= i) & (i[:, None] // WINDOW - i // WINDOW <= 1)
    return torch.einsum("bihd,bjhd->bhij", q, k).masked_fill(~near, -torch.inf)


def features(x: Tensor, weight: Tensor) -> Tensor:
    """f(x) of each head, (B, S, H, 2 F): softmax of y = x W and of -y, 1e-6 at least."""
    y = torch.einsum("bshd,hdf->bshf", x, weight)
    return torch.cat((y.softmax(-1), (-y).softmax(-1)), -1).clamp(min=LEAST)


class _Features(NamedTuple):
    """Of y = x W: softmax of y and of -y, before they are brought to 1e-6 at least, and what they are made of."""

    x: Tensor
    weight: Tensor
    parts: tuple[Tensor, Tensor]

    def values(self) -> Tensor:
        return torch.cat(self.parts, -1).clamp_(min=LEAST)

    def backward(self, df: Tensor) -> tuple[Tensor, Tensor]:
        """(dx, dweight)."""
        dy = None
        for f, part in zip(self.parts, df.chunk(2, -1)):
            part = torch._softmax_backward_data(part.where(f >= LEAST, 0.0), f, -1, f.dtype)  # in one pass
            dy = part if dy is None else dy.sub_(part)
        return torch.einsum("bshf,hdf->bshd", dy, self.weight), torch.einsum("bshd,bshf->hdf", self.x, dy)


def _features(x, weight):
    y = torch.einsum("bshd,hdf->bshf", x, weight)
    return _Features(x, weight, (y.softmax(-1), (-y).softmax(-1)))


def before_window(q: Tensor, k: Tensor, v: Tensor, reverse: bool = False) -> Tensor:
    """o[i] = sum of (q[i] k[j]) v[j] over tokens j of the blocks of 64 before i's; reverse: of those behind."""
    S = q.shape[1]
    blocks = [_whole(_upcast(x)).unflatten(1, (-1, WINDOW)) for x in (q, k, v)]
    states = torch.einsum("bnjhk,bnjhv->bnhkv", *blocks[1:])
    states = states.flip(1) if reverse else states
    # sums that a block has no part in: its own, taken off again, may be all the digits that there are
    sums = torch.cat((torch.zeros_like(states[:, :1]), states.cumsum(1)[:, :-1]), 1)
    sums = sums.flip(1) if reverse else sums
    return torch.einsum("bnihk,bnhkv->bnihv", blocks[0], sums).flatten(1, 2)[:, :S]


class Gradients(NamedTuple):
    """Of `hedgehog`'s tensors, wide."""

    q: Tensor
    k: Tensor
    v: Tensor
    q_map: Tensor
    k_map: Tensor
    linear_factor: Tensor
    window_factor: Tensor


@autocast.apart
def hedgehog_backward(do: Tensor, o: Tensor, inverse: Tensor, q: Tensor, k: Tensor, v: Tensor, q_map: Tensor,
                      k_map: Tensor, linear_factor: Tensor, window_factor: Tensor, parts: "Parts | None" = None
                      ) -> Gradients:
    """By blocks of 64 tokens: memory grows as the number of tokens does, but for what `before` takes. o, inverse: of
    `outputs`."""
    before, window_part, narrow = parts or Parts(before_window, in_window)
    q_map, k_map, linear, window = (_upcast(x) for x in (q_map, k_map, linear_factor, window_factor))
    map_q, map_k = _features(_upcast(q), q_map), _features(_upcast(k), k_map)
    of_q, of_k = map_q.values(), map_k.values()
    taken_type = q.dtype if narrow else of_q.dtype
    sums, of_k = _sums_before(of_k), of_k.to(taken_type)
    taken = _lagging(before, do, v, of_k)  # sum over keys far of (do[i] v[j]) f(k[j])
    delta = (_upcast(do) * _upcast(o)).sum(-1)
    taken = taken.sub_(sums.mul_(delta[..., None]))
    less = (of_q * taken).sum(-1)
    dlinear, dwindow, dq, dk, dv = window_part(q, k, v, do, inverse, delta, less, linear, window)
    weight = linear * inverse
    more, dq_map = map_q.backward(taken.mul_(weight[..., None]))
    dq += more
    power = _power_above(weight)  # by which fp16 has room for weights that are all small
    weighted = of_q.mul_((weight / power)[..., None])
    sums = _sums_before(delta[..., None] * weighted, reverse=True)
    weighted, power = weighted.to(taken_type), power[..., None]
    of_far = _lagging(before, v, do, weighted, reverse=True).sub_(sums).mul_(power)
    more, dk_map = map_k.backward(of_far)
    dk += more
    dv += _lagging(before, of_k, weighted, do, reverse=True).mul_(power)
    return Gradients(dq, dk, dv, dq_map, dk_map, dlinear.sum((0, 1)), dwindow.sum((0, 1)))


class Parts(NamedTuple):
    """What may take the place of the functions here. before: of `before_window`, window: of `in_window`. narrow:
    `before` is given tensors of q's type."""

    before: Callable
    window: Callable
    narrow: bool = False


def _power_above(x):
    """A power of 2 above all numbers of each sequence and head: (B, S, H) -> (B, 1, H)."""
    if not x.numel():
        return x.new_ones(x.shape[0], 1, x.shape[2])
    _, exponent = torch.frexp(x.abs().amax(1, keepdim=True))
    return torch.ldexp(torch.ones_like(x[:, :1]), exponent)


def _whole(x):
    """With zeros behind the last token, to the end of its block."""
    missing = -x.shape[1] % WINDOW
    return pad(x, (0, 0, 0, 0, 0, missing)) if missing else x


def _lagging(before, q, k, v, reverse=False):
    """`before` with one block between: what is left behind the window. 0 for tokens that have nothing there."""
    late, early = slice(WINDOW, None), slice(0, max(0, q.shape[1] - WINDOW))
    mine, others = (early, late) if reverse else (late, early)
    o = before(q[:, mine], k[:, others], v[:, others], reverse)
    missing = q.shape[1] - o.shape[1]
    return pad(o, (0, 0, 0, 0, 0, missing) if reverse else (0, 0, 0, 0, missing, 0))


def _sums_before(x, reverse=False):
    """Of each token the sum of x over the blocks that are in its state; by doubling, in an order that their number
    alone decides."""
    S, step = x.shape[1], 1
    sums = _whole(x).unflatten(1, (-1, WINDOW)).sum(2)
    sums = sums.flip(1) if reverse else sums
    while step < sums.shape[1]:
        sums, step = sums + _later(sums, step), 2 * step
    sums = _later(sums, 2)
    sums = sums.flip(1) if reverse else sums
    return sums.repeat_interleave(WINDOW, 1)[:, :S]


def _later(x, blocks):
    """Moved by some blocks; 0 ahead of them."""
    return pad(x, (0, 0, 0, 0, blocks, 0))[:, :x.shape[1]]


def in_window(q: Tensor, k: Tensor, v: Tensor, do: Tensor, inverse: Tensor, delta: Tensor, less: Tensor,
              linear: Tensor, window: Tensor, narrow: Callable = lambda x: x) -> tuple:
    """(dlinear, dwindow, dq, dk, dv): of each token (B, S, H) the gradients of the factors; and the window's part of
    the others. inverse, delta, less: (B, S, H), of each token 1 over its denominator, o do, and far_do - delta * far:
    what linear is multiplied by in the denominator, and of do in what is divided by it. delta may be of outputs that
    were rounded: the factors' gradients make it anew, but for what is before the window where that has next to no part
    in the denominator, so that its sum is not known from it. narrow: of weights and of gradients of scores, where they
    are operands."""
    near = _Window(*(_upcast(x) for x in (q, k, v, do)))
    far = 1 / inverse - EPS - window * near.total  # times linear
    exact = inverse * (window * near.of_do + linear * less + delta * far)
    dwindow = inverse * (near.of_do - exact * near.total)
    known = (far * inverse).abs() > LEAST_SHARE
    dlinear = inverse * (less + (delta - exact) * torch.where(known, far / linear, 0))
    return dlinear, dwindow, *near.backward(inverse * window, delta, window * dwindow, narrow)


class _Window:
    """The window's part, in blocks: (B, n, H, 64 queries, 128 keys, of the block before and of the own)."""

    def __init__(self, q, k, v, do):
        self.tokens, self.scale = q.shape[1], q.shape[3]**-0.5
        self.q, self.do = (self.blocks(x) for x in (q, do))
        self.k, self.v = (self.pairs(self.blocks(x)) for x in (k, v))
        i = torch.arange(WINDOW, device=q.device)
        seen = torch.cat((torch.ones_like(i[:, None] >= i), i[:, None] >= i), 1).expand(self.q.shape[1], 1, -1, -1)
        seen = torch.cat((seen[:1] & (torch.arange(2 * WINDOW, device=q.device) >= WINDOW), seen[1:]))
        scores = (self.scale * self.q @ self.k.mT).masked_fill(~seen, -torch.inf)
        most = scores.amax(-1, keepdim=True)
        self.most = scores == most
        self.e = (scores - most).exp()
        self.dp = self.do @ self.v.mT
        self.total, self.of_do = (self.tokenwise(x.sum(-1)) for x in (self.e, self.e * self.dp))

    def blocks(self, x):
        return _whole(x).unflatten(1, (-1, WINDOW)).transpose(2, 3)

    def pairs(self, x):
        return torch.cat((pad(x, (0, 0, 0, 0, 0, 0, 1, 0))[:, :-1], x), 3)

    def tokenwise(self, x):
        """(B, n, H, 64, ..) -> (B, S, H, ..)"""
        return x.transpose(2, 3).flatten(1, 2)[:, :self.tokens]

    def apart(self, x):
        """The gradient of `pairs`: (B, n, H, 128, D) -> (B, S, H, D)."""
        own, before = x[..., WINDOW:, :], x[..., :WINDOW, :]
        return self.tokenwise(own + pad(before[:, 1:], (0, 0, 0, 0, 0, 0, 0, 1)))

    def backward(self, weight, delta, of_most, narrow):
        """(dq, dk, dv). weight: of exponentials, in o. delta: do o. of_most: what the largest score gets less, shared
        by those that are as large; all (B, S, H)."""
        weight, delta, of_most = (self.blocks(x[..., None]) for x in (weight, delta, of_most))
        p = weight * self.e
        share = of_most / self.most.sum(-1, keepdim=True)
        ds = narrow(self.scale * (p * (self.dp - delta) - share * self.most))
        p = narrow(p)
        return self.tokenwise(ds @ self.k), self.apart(ds.mT @ self.q), self.apart(p.mT @ self.do)
