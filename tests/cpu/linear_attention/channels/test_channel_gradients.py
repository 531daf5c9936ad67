"""Gates for each column, where no GPU is needed: the launches and the gradients that are made of them in float64,
against the recurrence and its autograd; errors with operands of 16 bits; the ops on the CPU."""
import math

import pytest
import torch
from torch.nn.functional import normalize

import tkq
from tests.helpers.channel_launches import Chunk, launched
from tests.helpers.emulation import fake_gpu
from tkq.linear_attention.channels import gradients
from tkq.linear_attention.channels.catalog import shipped
from tkq.linear_attention.channels.launch import ChannelGiven
from tkq.linear_attention.delta import channel_gradients as delta_gradients
from tkq.linear_attention.delta.gradients import DeltaNeeds, DeltaSaved
from tkq.linear_attention.finish import catalog as finish
from tkq.linear_attention.gradients import Needs, Saved
from tkq.reference.linear_attention import gated_delta_rule_backward, linear_attn_backward
from tkq.reference.linear_attention import linear_attn as recurrence

BF16 = torch.bfloat16


def make(S=130, K=32, V=48, decay=0.3, delta=False, states=True):
    """q, k, v, g[, beta], initial state; two heads of v share one of q and k."""
    torch.manual_seed(0)
    q, k = (normalize(torch.randn(2, S, 2, K, dtype=torch.float64), dim=-1) for _ in range(2))
    v = torch.randn(2, S, 4, V, dtype=torch.float64)
    g = -decay * torch.rand(2, S, 4, K, dtype=torch.float64)
    beta = (torch.rand(2, S, 4, dtype=torch.float64),) if delta else ()
    return q, k, v, g, *beta, torch.randn(2, 4, K, V, dtype=torch.float64) if states else None


def exactly(*given, scale):
    return recurrence(*given[:4], scale, given[-1], beta=given[4] if len(given) == 6 else None)


def by_autograd(given, scale, do, dstate):
    leaves = [None if x is None else x.clone().requires_grad_() for x in given]
    pairs = [(y, dy) for y, dy in zip(exactly(*leaves, scale=scale), (do, dstate)) if dy is not None]
    found = iter(torch.autograd.grad([y for y, _ in pairs], [x for x in leaves if x is not None],
                                     [dy for _, dy in pairs]))
    return [None if x is None else next(found) for x in leaves]


def backward(given, *rest):
    of, saved = (gradients, Saved) if len(given) == 5 else (delta_gradients, DeltaSaved)
    return of.backward(saved(*given), *rest)


def check(given, scale=0.3, needs=None, of_state=True):
    do, dstate = torch.randn_like(given[2]), torch.randn(2, 4, given[0].shape[3], given[2].shape[3]).double()
    dstate = dstate if of_state else None
    want = by_autograd(given, scale, do, dstate)
    needs = needs or (Needs if len(given) == 5 else DeltaNeeds)()
    for mine, exact, needed in zip(backward(given, scale, do, dstate, needs), want, needs):
        assert (mine is None) == (exact is None or not needed)
        if mine is not None:
            torch.testing.assert_close(mine, exact, rtol=1e-9, atol=1e-9 * exact.abs().max().item())
    return want, (do, dstate)


@pytest.fixture(autouse=True)
def in_pytorch(monkeypatch):
    for module in (gradients, delta_gradients):
        monkeypatch.setattr(module, "launch", launched)


@pytest.mark.parametrize("S", [1, 63, 64, 65, 200])
@pytest.mark.parametrize("delta", [False, True])
def test_the_form_in_levels(S, delta):
    q, k, v, g, *beta, initial = given = make(S, delta=delta)
    made = launched(ChannelGiven(q, k, v, g, beta[0] if delta else None, initial, torch.float32), 0.3)
    for mine, exact in zip(made, exactly(*given, scale=0.3)):
        torch.testing.assert_close(mine, exact, rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize("strict", [False, True])
@pytest.mark.parametrize("reverse", [False, True])
def test_all_pairs_at_once(reverse, strict):
    """Is what the levels give, and near is what 16 bits hold."""
    q, k, v, g = (x.transpose(1, 2) for x in make(64, 64, 32)[:4])
    given = ChannelGiven(v, v, k, g, reverse=reverse, of_values=True)
    k, q = (x.repeat_interleave(2, 1) for x in (k, q))
    chunk = Chunk(given, 0.3, g.exp(), None)
    state = torch.randn(2, 4, 32, 64, dtype=torch.float64)
    for mine, want in zip(chunk.at_once(v, v.flip(2), k, state, q, strict),
                          chunk.in_levels(v, v.flip(2), k, state, q, strict)):
        torch.testing.assert_close(mine, want, rtol=1e-9, atol=1e-9)
    g = g.clone()
    g[0, 0, 3, 5], g[0, 1, 40:60, 7], g[1, 2, 9, 0] = -math.inf, -3.0, 1e-3
    near = Chunk(given._replace(v=k.to(BF16)), 0.3, g.exp(), None).near()[..., 0, 0]
    assert near.tolist() == [[False, False, True, True], [True, True, False, True]]
    assert not chunk.near().any()


@pytest.mark.parametrize("S", [1, 64, 65, 200])
@pytest.mark.parametrize("delta", [False, True])
def test_gradients(S, delta):
    check(make(S, delta=delta))


@pytest.mark.parametrize("decay", [0.0, 20.0])
@pytest.mark.parametrize("delta", [False, True])
def test_decays_and_resets(decay, delta):
    given = make(150, decay=decay, delta=delta)
    given[3][:, 5::37], given[3][:, 9::41, :, ::2] = -60.0, -60.0
    check(given)


@pytest.mark.parametrize("scale", [-2.0, 0.0])
@pytest.mark.parametrize("delta", [False, True])
def test_scales(scale, delta):
    check(make(70, delta=delta), scale)


@pytest.mark.parametrize("delta", [False, True])
def test_without_states_and_of_many_values(delta):
    check(make(70, V=144, delta=delta, states=False), of_state=False)


@pytest.mark.parametrize("i", range(6))
@pytest.mark.parametrize("delta", [False, True])
def test_one_gradient(i, delta):
    check(make(70, delta=delta), needs=DeltaNeeds(*(i == j for j in range(6))) if delta else
          Needs(*(min(i, 4) == j for j in range(5))))


@pytest.mark.parametrize("delta", [False, True])
def test_the_reference_of_the_gradients(delta):
    given = make(7, delta=delta)
    want, (do, dstate) = check(given)
    of = gated_delta_rule_backward if delta else linear_attn_backward
    for mine, exact in zip(of(do, dstate, *given, 0.3), want):
        torch.testing.assert_close(mine, exact, rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize("decay", [0.1, 20.0])
@pytest.mark.parametrize("delta", [False, True])
def test_16_bits_are_enough(decay, delta):
    """The launches rounded as the kernels round them: errors are those of a few roundings to 8 bits; those of g do not
    grow with the tokens behind."""
    wide = make(520, 32, 32, decay, delta)
    given = [x.to(BF16) if i < 3 else x.float() for i, x in enumerate(wide)]
    do, dstate = torch.randn_like(given[2]), torch.randn_like(given[-1])
    found = backward(given, 0.3, do, dstate)
    of = gated_delta_rule_backward if delta else linear_attn_backward
    want = of(do.double(), dstate.double(), *(x.double() for x in given), 0.3)
    for i, (mine, exact) in enumerate(zip(found, want)):
        assert (mine.double() - exact).norm() < 2**-6 * exact.norm(), i
    head = slice(64)
    assert (found[3][:, head].double() - want[3][:, head]).norm() < 2**-6 * want[3][:, head].norm()


# ---- the ops --------------------------------------------------------------------------------------------------------


def call(given, **more):
    op = tkq.linear_attn if len(given) == 5 else tkq.gated_delta_rule
    return op(*given[:-1], None, given[-1], True, **more)


@pytest.mark.parametrize("delta", [False, True])
def test_the_ops_on_the_cpu(delta):
    wide = make(9, delta=delta)
    given = [(x.to(BF16) if i < 3 else x.float()).requires_grad_() for i, x in enumerate(wide)]
    leaves = [x.detach().double().requires_grad_() for x in given]
    found, exact = call(given), exactly(*leaves, scale=None)
    dy = [torch.randn_like(y) for y in found]
    of_found, of_exact = (torch.autograd.grad(y, x, [d.to(z.dtype) for d, z in zip(dy, y)])
                          for y, x in ((found, given), (exact, leaves)))
    for mine, want, x in zip((*found, *of_found), (*exact, *of_exact), (given[0], leaves[0].float(), *given)):
        assert mine.dtype == x.dtype
        torch.testing.assert_close(mine.double(), want.double(), rtol=2**-7, atol=1e-4)


@pytest.mark.parametrize("delta", [False, True])
def test_a_gate_that_forgets(delta):
    *given, _ = [x.to(BF16) if i < 3 else x.float() for i, x in enumerate(make(9, delta=delta))]
    given[3][:, 3] = -math.inf
    o, _ = call((*given, None))
    assert torch.equal(o[:, 3:], call((*(x[:, 3:] for x in given), None))[0])


@pytest.mark.parametrize("delta", [False, True])
def test_states_of_which_v_comes_first(delta):
    *given, initial = [x.to(BF16) if i < 3 else x.float() for i, x in enumerate(make(9, delta=delta))]
    o, state = call((*given, initial.mT), state_v_first=True)
    again, last = call((*given, initial))
    assert torch.equal(o, again) and torch.equal(state, last.mT)


@pytest.mark.parametrize("delta", [False, True])
@pytest.mark.parametrize("beta", [torch.float32, BF16])
def test_kernels_are_those_that_are_shipped(monkeypatch, delta, beta):
    monkeypatch.undo()
    recipes = {kernel.recipe for kernel in (*shipped(), *finish.shipped())}
    given = [(x.to(BF16) if i < 3 else x.to(beta) if delta and i == 4 else x.float()).requires_grad_()
             for i, x in enumerate(make(70, 128, 128, delta=delta, states=False)[:-1])]
    op = tkq.gated_delta_rule if delta else tkq.linear_attn
    with fake_gpu.launches() as seen:
        o = op(*given)
        torch.autograd.grad(o, given, torch.zeros_like(o))
        if beta == torch.float32:
            op(*(x.detach() for x in given), output_final_state=True)
            op(*(x.detach() for x in given), None, torch.zeros(2, 4, 128, 128), True)
    assert len(seen) == (8 if delta else 6) + 2 * (beta == torch.float32)
    assert {recipe for recipe, _ in seen} <= recipes
