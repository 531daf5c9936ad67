"""Mamba-2's reference against its recurrence written out, and its gradients against autograd, in float64."""
import math

import pytest
import torch
from torch.nn.functional import silu, softplus

from tkq.reference.ssd import mamba2_ssd, mamba2_ssd_backward

NAMES = "x", "dt", "A", "B", "C", "D", "z", "dt_bias", "initial_states"


def make(D_dims=1, without=()):
    """By name; two heads share one of B and C."""
    torch.manual_seed(0)
    S, H, G, P, N = 9, 4, 2, 5, 6

    def randn(*shape):
        return torch.randn(*shape, dtype=torch.float64)

    given = dict(x=randn(2, S, H, P), dt=randn(2, S, H), A=-randn(H).exp(), B=randn(2, S, G, N), C=randn(2, S, G, N),
                 D=randn(*(H, P)[:D_dims]), z=randn(2, S, H, P), dt_bias=randn(H), initial_states=randn(2, H, P, N))
    return {name: None if name in without else given[name] for name in NAMES}


def recurrence(given, limit):
    """h[t] = exp(dt[t] A) h[t-1] + dt[t] x[t] B[t]', y[t] = h[t] C[t], head by head."""
    x, dt, A, B, C, D, z, dt_bias, initial_states = given.values()
    dt = softplus(dt + dt_bias).clamp(*limit)
    y = torch.zeros_like(x)
    states = torch.zeros_like(initial_states)
    for b in range(len(x)):
        for h in range(len(A)):
            group, state = h * B.shape[2] // len(A), initial_states[b, h]
            for t in range(x.shape[1]):
                state = (dt[b, t, h] * A[h]).exp() * state + dt[b, t, h] * torch.outer(x[b, t, h], B[b, t, group])
                y[b, t, h] = state @ C[b, t, group] + D[h] * x[b, t, h]
            states[b, h] = state
    return y * silu(z), states


@pytest.mark.parametrize("D_dims", [1, 2])
@pytest.mark.parametrize("limit", [(0.0, math.inf), (0.3, 1.0)])
def test_it_is_the_recurrence(D_dims, limit):
    given = make(D_dims=D_dims)
    found = mamba2_ssd(**given, dt_softplus=True, dt_limit=limit)
    for mine, exact in zip(found, recurrence(given, limit)):
        torch.testing.assert_close(mine, exact)


@pytest.mark.parametrize("without", [(), ("D", "z"), ("dt_bias", "initial_states")])
@pytest.mark.parametrize("D_dims, soft, limit", [(1, True, (0.0, math.inf)), (2, True, (0.3, 1.0)),
                                                 (1, False, (-math.inf, 0.5))])
def test_gradients(without, D_dims, soft, limit):
    given = make(D_dims=D_dims, without=without)
    leaves = {name: x.requires_grad_() for name, x in given.items() if x is not None}
    y, states = mamba2_ssd(**given, dt_softplus=soft, dt_limit=limit)
    dy, dstates = torch.randn_like(y), torch.randn_like(states)
    want = dict(zip(leaves, torch.autograd.grad((y, states), list(leaves.values()), (dy, dstates))))
    with torch.no_grad():
        found = mamba2_ssd_backward(dy, dstates, *given.values(), soft, limit)
    for name, mine in zip(NAMES, found):
        assert (mine is None) == (given[name] is None)
        if mine is not None:
            torch.testing.assert_close(mine, want[name], msg=name)
