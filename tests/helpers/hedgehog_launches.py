"""The launches of Hedgehog's gradients in plain PyTorch, chunk by chunk as the kernels have them: exactly, in float64,
or rounded where the kernels round."""
from typing import NamedTuple

import torch
from torch import Tensor

from tkq.linear_attention.hedgehog.launch import Queries
from tkq.reference import hedgehog as reference
from tkq.reference.precision import _upcast

CHUNK = 64


def _narrow(x, dtype):
    return x if dtype == torch.float64 else x.to(dtype).float()


def window_gradients(given, dq, dk, dv):
    """As `launch.window_gradients`."""
    q, k, v, do, *numbers = given
    numbers = [_upcast(given.delta if x is None else x) for x in numbers]
    of_linear, of_window, *found = reference.in_window(q, k, v, do, *numbers, narrow=lambda x: _narrow(x, q.dtype))
    for to, more in zip((dq, dk, dv), found):
        to += more.to(to.dtype)
    return torch.stack((of_linear, of_window))


def features(given):
    """As `launch.features`, those of keys' last chunk, too, which no query has before its window."""
    pairs = (given.q, given.q_map), (given.k, given.k_map)
    return tuple(reference.features(*map(_upcast, pair)).to(given.q.dtype) for pair in pairs)


def query_gradients(given):
    """As `launch.query_gradients`."""
    q, k, v, do, o, q_map, of_q, of_k, inverse, _, largest, linear, window = given
    delta = (_upcast(do) * _upcast(o)).sum(-1)
    of = _Behind(q, do, v, q_map, of_q, of_k, inverse, delta, largest, linear)
    before, less, dq_map = _queries_before(of)
    near = reference._Window(*(_upcast(x) for x in (q, k, v, do)))
    numbers = (_upcast(x) for x in (inverse, delta, less, linear, window))
    of_linear, of_window, dq, _, _ = reference.in_window(q, k, v, do, *numbers, narrow=lambda x: _narrow(x, q.dtype))
    share = _upcast(window) * of_window / near.tokenwise(near.most.sum(-1, keepdim=True))[..., 0]
    return Queries((before + dq).to(q.dtype), delta, share, torch.stack((of_linear, of_window)), dq_map)


def key_gradients(given):
    """As `launch.key_gradients`."""
    k, q, v, do, k_map, of_k, of_q, inverse, _, delta, share, largest, linear, window = given
    dk, dv, dk_map = _keys_behind(_Behind(k, v, do, k_map, of_k, of_q, inverse, delta, largest, linear))
    near = reference._Window(*(_upcast(x) for x in (q, k, v, do)))
    of_most = share * near.tokenwise(near.most.sum(-1, keepdim=True))[..., 0]
    weight = _upcast(inverse) * _upcast(window)
    _, more_k, more_v = near.backward(weight, _upcast(delta), of_most, lambda x: _narrow(x, k.dtype))
    return (dk + more_k).to(k.dtype), (dv + more_v).to(v.dtype), dk_map


class _Behind(NamedTuple):
    """What is before the window, or behind it, is made of. x: queries, a: do; of keys: keys, a: v. of_x, of_y:
    features."""

    x: Tensor
    a: Tensor
    b: Tensor
    x_map: Tensor
    of_x: Tensor
    of_y: Tensor
    inverse: Tensor
    delta: Tensor
    largest: Tensor
    linear: Tensor


def _queries_before(given):
    """(dq, wide, less, dq_map) of what lies before the window. x: queries, a: do."""
    weight, power = _weights(given)
    dq, less = torch.empty_like(_upcast(given.x)), torch.zeros_like(_upcast(given.delta))
    others = _upcast(given.of_y)
    state = sums = 0.0
    maps = []
    for at, before in _walk(dq.shape[1], False):
        if before is not None:
            state, sums = _take_up(given, state, sums, others, before, None)
        df, f, dy_of = _found(given, at, state)
        df = df - given.delta[:, at, :, None] * sums
        less[:, at] = (f * df).sum(-1)
        dy = [_narrow(part * (weight / power)[:, at, :, None], given.x.dtype) for part in dy_of(df)]
        maps.append(_put(given, at, sum(dy), power, dq))
    return dq, less, sum(maps)


def _keys_behind(given):
    """(dk, dv, wide, dk_map) of what lies behind the window. x: keys, a: v."""
    weight, power = _weights(given)
    dk, dv = torch.empty_like(_upcast(given.x)), torch.zeros_like(_upcast(given.a))
    others = _upcast(given.of_y) * (weight / power)[..., None]
    state = sums = 0.0
    maps = []
    for at, before in _walk(dk.shape[1], True):
        if before is not None:
            state, sums = _take_up(given, state, sums, others, before, given.delta)
        df, f, dy_of = _found(given, at, state)
        if not isinstance(state, float):
            found = torch.einsum("bshf,bhfv->bshv", f, _narrow(state, given.x.dtype)) * power[..., None]
            dv[:, at] = found
        maps.append(_put(given, at, sum(_narrow(dy, given.x.dtype) for dy in dy_of(df - sums)), power, dk))
    return dk, dv, sum(maps)


def _walk(S, reverse):
    """(a chunk, that which its state takes up before, or None)"""
    chunks = [slice(at, at + CHUNK) for at in range(0, S, CHUNK)]
    chunks = chunks[::-1] if reverse else chunks
    return [(at, chunks[i - 2] if i > 1 else None) for i, at in enumerate(chunks)]


def _weights(given):
    """Weights of keys before the window, and the power of 2 that they are divided by in float16."""
    weight = _upcast(given.linear) * _upcast(given.inverse)
    if given.x.dtype != torch.float16:
        return weight, weight.new_ones(weight.shape[0], 1, weight.shape[2])
    largest = _upcast(given.largest) * _upcast(given.linear).abs()
    _, exponent = torch.frexp(largest)
    return weight, torch.ldexp(torch.ones_like(largest), exponent - 1)[:, None]


def _take_up(given, state, sums, others, at, delta):
    f, b = others[:, at], _upcast(given.b)[:, at]
    state = state + torch.einsum("bshf,bshv->bhfv", _narrow(f, given.x.dtype), b)
    weighted = f if delta is None else f * delta[:, at, :, None]
    return state, sums + weighted.sum(1)[:, None]


def _found(given, at, state):
    """(S a, the features of x, from their gradients to y's, of y and of -y), of a chunk. Features at their least have
    no part in the softmaxes that these are."""
    f, a = (_upcast(x)[:, at] for x in (given.of_x, given.a))
    df = 0 * f if isinstance(state, float) else torch.einsum("bshv,bhfv->bshf", a, _narrow(state, given.x.dtype))

    def dy_of(df):
        least = torch.tensor(reference.LEAST, dtype=torch.float64).to(given.of_x.dtype).item()
        p = f.where(f > least, 0.0)
        y, minus_y = (p * (d - (p * d).sum(-1, keepdim=True)) for p, d in zip(p.chunk(2, -1), df.chunk(2, -1)))
        return y, -minus_y

    return df, f, dy_of


def _put(given, at, dy, power, dx):
    """dx = dy W' of a chunk; its part of dW."""
    dx[:, at] = (torch.einsum("bshf,hdf->bshd", dy, _upcast(given.x_map)) * power[..., None]).to(dx.dtype)
    return torch.einsum("bshd,bshf->bhdf", _upcast(given.x)[:, at], dy) * power.mT[..., None]


ALL = dict(window_gradients=window_gradients, features=features, query_gradients=query_gradients,
           key_gradients=key_gradients)
