"""Which kernel a call gets, where no GPU is needed: its own, whatever came before it."""
import itertools

import pytest
import torch

import tkq
from tests.helpers.emulation import fake_gpu

BF16 = torch.bfloat16


def zeros(*shape, dtype=BF16):
    return torch.zeros(shape, dtype=dtype)


X, WIDE, LONG = zeros(2, 64, 2, 64), zeros(2, 64, 2, 128), zeros(1, 16384, 2, 128)
G, G4, ROWS = zeros(2, 64, 2, dtype=torch.float32), zeros(2, 64, 2, 64, dtype=torch.float32), torch.arange(2)
STATE, POOL = zeros(2, 2, 64, 64, dtype=torch.float32), zeros(2, 2, 64, 64)
CU, ONE = torch.tensor([0, 40, 64]), (X[:1], X[:1], X[:1])


def back(call, *tensors, **options):
    """A call, and the gradients of those of its tensors that are not options."""
    leaves = [x if x is None else x.detach().requires_grad_() for x in tensors]
    found = call(*leaves, **options)
    found = found if isinstance(found, tuple) else (found,)
    torch.autograd.grad(found, [x for x in leaves if x is not None], [torch.zeros_like(x) for x in found])


def attention():
    for g in (None, G[0, 0], G, G4):
        yield lambda g=g: back(tkq.linear_attn, X, X, X, g)
        yield lambda g=g: back(tkq.linear_attn, X, X, X, g=g)
        yield lambda g=g: back(tkq.linear_attn, X, X, X, g, output_final_state=True)
    for state in (STATE, POOL):
        yield lambda state=state: tkq.linear_attn(X, X, X, G, initial_state=state)
        for rows in (ROWS, ROWS.int()):
            yield lambda state=state, rows=rows: tkq.linear_attn(X, X, X, G, initial_state=state, state_indices=rows)
    for cu in (CU, CU.int()):
        yield lambda cu=cu: back(tkq.linear_attn, *ONE, G[:1], cu_seqlens=cu)
    for more in ({}, dict(checkpoint_every=64)):
        yield lambda more=more: tkq.linear_attn(X, X, WIDE, G, **more)


def delta():
    for beta, g in itertools.product((G, G.to(BF16)), (None, G, G4)):
        yield lambda beta=beta, g=g: back(tkq.gated_delta_rule, X, X, X, g, beta)
        yield lambda beta=beta, g=g: back(tkq.gated_delta_rule, X, X, X, g=g, beta=beta)
        yield lambda beta=beta, g=g: tkq.gated_delta_rule(X, X, X, g, beta, initial_state=STATE)
    for g in (None, G4):
        yield lambda g=g: tkq.gated_delta_rule(X, X, X, g, G, use_qk_l2norm_in_kernel=True)
    for tokens, first in ((64, 1024), (8192, 8192), (16384, 16384)):
        part = LONG[:, :tokens], zeros(1, first, 2, dtype=torch.float32)[:, :tokens]
        yield lambda part=part: back(tkq.gated_delta_rule, *part[:1] * 3, part[1], part[1])
        yield lambda part=part: tkq.gated_delta_rule(*part[:1] * 3, part[1], part[1])


def space():
    for dt, softplus, bias in itertools.product((G, G.to(BF16)), (False, True), (None, G[0, 0])):
        yield lambda dt=dt, softplus=softplus, bias=bias: back(
            tkq.mamba2_ssd, X, dt, G[0, 0], X, X, None, None, bias, dt_softplus=softplus)
    for D, z in itertools.product((None, G[0, 0], X[0, 0]), (None, X)):
        yield lambda D=D, z=z: back(tkq.mamba2_ssd, X, G, G[0, 0], X, X, D, z)
    for final in (False, True):
        yield lambda final=final: back(tkq.mamba2_ssd, X, G, G[0, 0], X, X, G[0, 0], initial_states=STATE,
                                       return_final_states=final)


def steps():
    for T, state, g in itertools.product((1, 2), (STATE, POOL), (None, G[0, 0], G, G4)):
        x, g = X[:, :T], g if g is None or g.dim() == 1 else g[:, :T]
        yield lambda x=x, state=state, g=g: tkq.linear_attn_step(x, x, x, g, state)
        yield lambda x=x, state=state, g=g: tkq.linear_attn_step(x, x, x, g, state, state_v_first=True)
    for norm in (False, True):
        yield lambda norm=norm: tkq.gated_delta_rule_step(X[:, :1], X[:, :1], X[:, :1], None, G[:, :1], STATE, None,
                                                          norm)
    for D in (None, G[0, 0], X[0, 0]):
        yield lambda D=D: tkq.ssd_step(STATE, X[:, 0], G[:, 0], G[0, 0], X[:, 0], X[:, 0], D)


def taylor():
    q = zeros(2, 64, 2, 16)
    for norm, v in itertools.product((True, False), (X, WIDE)):
        yield lambda norm=norm, v=v: back(tkq.based, q, q, v, use_norm=norm)
        yield lambda norm=norm, v=v: tkq.based(LONG[..., :16], LONG[..., :16], LONG[..., :v.shape[3]], use_norm=norm)


def hedgehog():
    for F, tokens in itertools.product((32, 64), (64, 16384)):
        maps = zeros(2, 128, F)
        given = *(LONG[:, :tokens],) * 3, maps, maps, G[0, 0], G[0, 0]
        yield lambda given=given: tkq.hedgehog(*given)
        if tokens == 64:
            yield lambda given=given: back(tkq.hedgehog, *given)


FAMILIES = attention, delta, space, steps, taylor, hedgehog


def recipes(*calls):
    with fake_gpu.launches() as seen:
        for call in calls:
            call()
    return [recipe for recipe, _ in seen]


@pytest.mark.parametrize("calls", FAMILIES)
def test_what_came_before_makes_no_difference(calls):
    calls = list(calls())
    alone = [recipes(call) for call in calls]
    assert len({recipe for found in alone for recipe in found}) > 4
    assert recipes(*calls) == [recipe for found in alone for recipe in found]
    assert recipes(*calls[::-1]) == [recipe for found in alone[::-1] for recipe in found]
