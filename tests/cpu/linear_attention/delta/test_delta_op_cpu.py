"""tkq.gated_delta_rule on the CPU: results, what is refused, and its kernels."""
import math

import pytest
import torch

import tkq
from tests.helpers.emulation import fake_gpu
from tkq.linear_attention.catalog import shipped
from tkq.linear_attention.finish import catalog as finish
from tkq.reference.linear_attention import linear_attn as recurrence

BF16 = torch.bfloat16


def make(K=32, V=48, S=7, dtype=BF16, beta=torch.float32):
    """q, k, v, g, beta, initial state; two heads of v share one of q and k, keys have the length 1."""
    torch.manual_seed(0)
    q, k = (torch.nn.functional.normalize(torch.randn(2, S, 2, K), dim=-1).to(dtype) for _ in range(2))
    v = torch.randn(2, S, 4, V).to(dtype)
    return q, k, v, -torch.rand(2, S, 4), torch.rand(2, S, 4).to(beta), torch.randn(2, 4, K, V)


@pytest.mark.parametrize("dtype", [torch.float32, BF16])
@pytest.mark.parametrize("scale", [None, 0.3])
def test_results(dtype, scale):
    q, k, v, g, beta, initial = make(beta=dtype)
    o, state = tkq.gated_delta_rule(q, k, v, g, beta, scale, initial, True)
    assert (o.dtype, state.dtype, state.shape) == (BF16, torch.float32, initial.shape)
    exact, last = recurrence(q.double(), k.double(), v.double(), g, scale, initial, beta=beta)
    torch.testing.assert_close(o.double(), exact, rtol=2**-7, atol=1e-5)
    torch.testing.assert_close(state.double(), last, rtol=1e-5, atol=1e-5)
    alone = tkq.gated_delta_rule(q, k, v, g, beta, scale, initial)
    assert isinstance(alone, torch.Tensor) and torch.equal(alone, o)


def test_without_gates_nothing_decays():
    q, k, v, g, beta, _ = make()
    assert torch.equal(tkq.gated_delta_rule(q, k, v, None, beta), tkq.gated_delta_rule(q, k, v, 0.0 * g, beta))


def test_a_value_is_replaced():
    """With beta 1 and the same key of length 1 the state has the last value alone."""
    k = torch.zeros(1, 3, 1, 32, dtype=BF16)
    k[..., 5] = 1.0
    v = torch.randn(1, 3, 1, 32).to(BF16)
    o = tkq.gated_delta_rule(k, k, v, None, torch.ones(1, 3, 1), 1.0)
    assert torch.equal(o, v)


def test_a_gate_that_forgets():
    q, k, v, g, beta, _ = make()
    g[:, 3] = -math.inf
    o = tkq.gated_delta_rule(q, k, v, g, beta)
    assert torch.equal(o[:, 3:], tkq.gated_delta_rule(*(x[:, 3:] for x in (q, k, v, g, beta))))


def test_no_tokens():
    *given, initial = make(S=0)
    o, state = tkq.gated_delta_rule(*given, None, initial, True)
    assert o.shape == (2, 0, 4, 48) and torch.equal(state, initial)


def zeros(*shape, dtype=torch.float32):
    return torch.zeros(shape, dtype=dtype)


@pytest.mark.parametrize("changed, error, words", [
    (dict(beta=zeros(2, 7, 2)), ValueError, r"beta: shape is \(2, 7, 2\), expected \(2, 7, 4\)"),
    (dict(beta=zeros(2, 7, 4, dtype=torch.float16)), TypeError, "beta"),
    (dict(beta=None), TypeError, "beta"),
    (dict(g=zeros(4)), ValueError, r"g: has 1 dimensions?|g: shape is \(4,\), expected \(2, 7, 4\)"),
    (dict(g=zeros(2, 7, 4, 48)), ValueError, r"g: shape is \(2, 7, 4, 48\), expected \(2, 7, 4, 32\)"),
    (dict(g=zeros(2, 7, 32, 4).mT), ValueError, "g: strides are .* the last dimension must be contiguous"),
    (dict(g=zeros(2, 7, 4, dtype=BF16)), TypeError, "g"),
    (dict(k=zeros(2, 7, 4, 32, dtype=BF16)), ValueError, r"k: shape is \(2, 7, 4, 32\), expected \(2, 7, 2, 32\)"),
    (dict(v=zeros(2, 7, 4, 40, dtype=BF16)), NotImplementedError, "v: V is 40"),
    (dict(q=zeros(2, 7, 2, 144, dtype=BF16), k=zeros(2, 7, 2, 144, dtype=BF16), g=zeros(2, 7, 4, 144),
          initial_state=None), NotImplementedError,
     "q: K is 144, supported with a g of four dimensions are multiples of 16 from 32 to 128"),
    (dict(q=zeros(2, 7, 2, 272, dtype=BF16), k=zeros(2, 7, 2, 272, dtype=BF16)), NotImplementedError, "q: K is 272"),
    (dict(initial_state=zeros(2, 2, 32, 48)), ValueError, r"initial_state: shape is \(2, 2, 32, 48\)"),
    (dict(q=zeros(2, 7, 2, 33, dtype=BF16)[..., 1:]), ValueError, "q: strides are .* a multiple of 8 elements"),
])
def test_what_is_refused(changed, error, words):
    given = dict(zip(("q", "k", "v", "g", "beta", "initial_state"), make()))
    with pytest.raises(error, match=f"gated_delta_rule: ({words})"):
        tkq.gated_delta_rule(**given | changed)


@pytest.mark.parametrize("used", ["o", "state", "both"])
def test_gradients(used):
    given = [x.requires_grad_() for x in make()]
    wide = [x.detach().double().requires_grad_() for x in given]
    results, gradients = [], []
    q, k, v, g, beta, initial = wide
    for found in (tkq.gated_delta_rule(*given[:5], None, given[5], True),
                  recurrence(q, k, v, g, None, initial, beta=beta)):
        results.append(found[:1] if used == "o" else found[1:] if used == "state" else found)
    dy = [torch.randn_like(y) for y in results[0]]
    for found, leaves in zip(results, (given, wide)):
        gradients.append(torch.autograd.grad(found, leaves, [x.to(y.dtype) for x, y in zip(dy, found)],
                                             allow_unused=True))
    for x, mine, exact in zip(given, *gradients):
        exact = torch.zeros_like(x) if exact is None else exact
        assert mine.dtype == x.dtype
        torch.testing.assert_close(mine.double(), exact.double(), rtol=2**-7, atol=1e-4)


def test_kernels_of_calls_are_those_that_are_shipped():
    recipes = {kernel.recipe for kernel in shipped() if kernel.name.startswith("gated_delta_rule")}
    with fake_gpu.launches() as seen:
        for beta in (torch.float32, BF16):
            q, k, v, g, b, initial = make(128, 128, beta=beta)
            tkq.gated_delta_rule(q, k, v, g, b)
            tkq.gated_delta_rule(q, k, v, None, b)
            if beta == torch.float32:
                tkq.gated_delta_rule(q, k, v, g, b, output_final_state=True)
                tkq.gated_delta_rule(q, k, v, g, b, None, initial, True)
    assert len(seen) == 6 and {recipe for recipe, _ in seen} <= recipes


@pytest.mark.parametrize("gated", [True, False])
@pytest.mark.parametrize("beta", [torch.float32, BF16])
def test_kernels_of_gradients_are_those_that_are_shipped(gated, beta):
    recipes = {kernel.recipe for kernel in (*shipped(), *finish.shipped())}
    q, k, v, g, b, _ = make(128, 128, beta=beta)
    leaves = [x.requires_grad_() for x in (q, k, v, g, b)]
    with fake_gpu.launches() as seen:
        o = tkq.gated_delta_rule(q, k, v, g if gated else None, b)
        torch.autograd.grad(o, leaves if gated else [q, k, v, b], torch.zeros_like(o))
    assert len(seen) == (5 if gated else 4) and {recipe for recipe, _ in seen} <= recipes  # none sums over heads
