"""tkq.linear_attn on the CPU: results, gradients, what is refused; and how gradients are made of launches."""
import math

import pytest
import torch

import tkq
from tests.helpers.emulation import fake_gpu
from tkq.linear_attention import gradients
from tkq.linear_attention.catalog import shipped
from tkq.linear_attention.finish import catalog as finish
from tkq.linear_attention.gradients import Needs, Saved, backward
from tkq.linear_attention.launch import Made
from tkq.linear_attention.suffix.launch import suffix_sums
from tkq.reference.linear_attention import linear_attn as recurrence
from tkq.reference.linear_attention import linear_attn_backward

BF16 = torch.bfloat16


def make(gate, K=32, V=48, dtype=torch.float64, S=7):
    """q, k, v, g, initial; two heads of v share one of q and k."""
    torch.manual_seed(0)
    q, k = (torch.randn(2, S, 2, K, dtype=torch.float64).to(dtype) for _ in range(2))
    v = torch.randn(2, S, 4, V, dtype=torch.float64).to(dtype)
    wide = torch.float64 if dtype == torch.float64 else torch.float32
    g = {"none": None, "head": -torch.rand(4, dtype=wide), "token": -torch.rand(2, S, 4, dtype=wide)}[gate]
    return q, k, v, g, torch.randn(2, 4, K, V, dtype=wide)


def by_autograd(q, k, v, g, initial, scale, do, dstate):
    leaves = [None if x is None else x.double().requires_grad_() for x in (q, k, v, g, initial)]
    results = recurrence(*leaves[:4], scale, leaves[4])
    found = iter(torch.autograd.grad(results, [x for x in leaves if x is not None], (do.double(), dstate.double())))
    return [None if x is None else next(found) for x in leaves]


def launched(given, scale):
    """`launch.launch` in float64, token by token."""
    q, k, v, g, _, initial, final, x, reverse, *_ = given
    heads = max(q.shape[2], v.shape[2])
    q, k, v = (t.repeat_interleave(heads // t.shape[2], 2) for t in (q, k, v))
    of_first = None
    if reverse:
        q, k, v = (t.flip(1) for t in (q, k, v))
        if g is not None:
            g = g.expand(*q.shape[:2], heads)
            of_first, g = g[:, 0], torch.cat([torch.zeros_like(g[:, :1]), g[:, 1:].flip(1)], 1)
    o, state = recurrence(q, k, v, g, scale, initial)
    state = state if of_first is None else of_first.exp()[..., None, None] * state
    o = o.flip(1) if reverse else o
    dots = None if x is None else (o * x.repeat_interleave(heads // x.shape[2], 2)).sum(-1)
    return Made(o, None if final is None else state, dots)


@pytest.mark.parametrize("gate", ["none", "head", "token"])
@pytest.mark.parametrize("V, scale", [(48, 0.3), (144, -2.0), (48, 0.0)])
def test_gradients_are_made_of_launches(monkeypatch, gate, V, scale):
    monkeypatch.setattr(gradients, "launch", launched)
    given = make(gate, V=V)
    do, dstate = torch.randn_like(given[2]), torch.randn_like(given[4])
    want = by_autograd(*given, scale, do, dstate)
    for needs in (Needs(), Needs(k=False, g=False), Needs(q=False, v=False)):
        found = backward(Saved(*given), scale, do, dstate, needs)
        for mine, exact, needed in zip(found, want, needs):
            assert (mine is None) == (exact is None or not needed)
            if mine is not None:
                torch.testing.assert_close(mine, exact)


@pytest.mark.parametrize("tokens", [0, 1, 2, 33, 1000])
def test_suffix_sums(tokens):
    x = torch.randn(2, tokens, 3, dtype=torch.float64)
    less, end = torch.randn_like(x), torch.randn(2, 3, dtype=torch.float64)
    for given, of in (((), x), ((less,), x - less)):
        want = torch.stack([of[:, t:].sum(1) for t in range(tokens)], 1) if tokens else of
        torch.testing.assert_close(suffix_sums(x, *given), want)
        torch.testing.assert_close(suffix_sums(x, *given, end=end), want + end[:, None])


@pytest.mark.parametrize("gate", ["none", "head", "token"])
def test_the_reference_of_the_gradients(gate):
    given = make(gate)
    do, dstate = torch.randn_like(given[2]), torch.randn_like(given[4])
    for mine, exact in zip(linear_attn_backward(do, dstate, *given, 0.3), by_autograd(*given, 0.3, do, dstate)):
        assert mine is exact is None or torch.allclose(mine, exact)


def test_results_and_gradients():
    given = [x.requires_grad_() for x in make("token", dtype=BF16)]
    q, k, v, g, initial = given
    o, state = tkq.linear_attn(q, k, v, g, None, initial, True)
    assert (o.dtype, state.dtype, state.shape) == (BF16, torch.float32, initial.shape)
    do, dstate = torch.randn_like(o), torch.randn_like(state)
    found = torch.autograd.grad((o, state), given, (do, dstate))
    for mine, exact in zip(found, by_autograd(*given, None, do, dstate)):
        torch.testing.assert_close(mine.double(), exact, rtol=2**-7, atol=1e-4)
    alone = tkq.linear_attn(q, k, v, g, initial_state=initial)
    assert isinstance(alone, torch.Tensor) and torch.equal(alone, o)


def test_a_gate_that_forgets():
    q, k, v, g, _ = make("token", dtype=BF16)
    g[:, 3:] = g[:, 3:].clone()
    g[:, 3] = -math.inf
    o = tkq.linear_attn(q, k, v, g)
    again = tkq.linear_attn(*(x[:, 3:] for x in (q, k, v, g)))
    assert torch.equal(o[:, 3:], again)


def with_one(**changed):
    return dict(zip(("q", "k", "v", "g", "initial_state"), make("token", dtype=BF16))) | changed


def zeros(*shape, dtype=BF16):
    return torch.zeros(shape, dtype=dtype)


@pytest.mark.parametrize("changed, error, words", [
    (dict(k=zeros(2, 7, 4, 32)), ValueError, r"k: shape is \(2, 7, 4, 32\), expected \(2, 7, 2, 32\)"),
    (dict(k=zeros(2, 7, 2, 32, dtype=torch.float16)), TypeError, "k is torch.float16, q is torch.bfloat16"),
    (dict(v=zeros(2, 7, 3, 48)), ValueError, "v has 3 heads, q has 2; allowed are from 1 on, v's a multiple of q's"),
    (dict(v=zeros(2, 7, 4, 40)), NotImplementedError, "v: V is 40, supported are multiples of 16 from 32 to 256"),
    (dict(q=zeros(2, 7, 2, 272), k=zeros(2, 7, 2, 272)), NotImplementedError,
     "q: K is 272, supported are multiples of 16 from 32 to 256"),
    (dict(g=zeros(2, 7, 4, 48, dtype=torch.float32)), ValueError,
     r"g: shape is \(2, 7, 4, 48\), expected \(2, 7, 4, 32\)"),
    (dict(g=zeros(2, 7, 4, 33, dtype=torch.float32)[..., 1:]), ValueError, "g: strides are .* must be a multiple of 4"),
    (dict(g=zeros(3, dtype=torch.float32)), ValueError, r"g: shape is \(3,\), expected \(4\)"),
    (dict(g=zeros(2, 7, dtype=torch.float32)), ValueError, "g: has 2 dimensions"),
    (dict(initial_state=zeros(2, 2, 32, 48)), ValueError, r"initial_state: shape is \(2, 2, 32, 48\)"),
    (dict(q=zeros(2, 7, 2, 33)[..., 1:]), ValueError, "q: strides are .* must be a multiple of 8 elements"),
    (dict(q=zeros(2, 7, 32, 2).mT), ValueError, "q: strides are .* the last dimension must be contiguous"),
])
def test_what_is_refused(changed, error, words):
    with pytest.raises(error, match=f"linear_attn: {words}"):
        tkq.linear_attn(**with_one(**changed))


def test_too_many_sequences():
    q = zeros(1, 1, 1, 32).expand(65536, 1, 1, 32)
    with pytest.raises(NotImplementedError, match="q: has 65536 sequences, supported are up to 65535"):
        tkq.linear_attn(q, q, q)


def test_kernels_of_calls_are_those_that_are_shipped():
    recipes = {kernel.recipe for kernel in (*shipped(), *finish.shipped())}
    with fake_gpu.launches() as seen:
        for gate in ("none", "head", "token"):
            q, k, v, g, _ = make(gate, 64, 128, BF16)
            leaves = [x.requires_grad_() for x in (q, k, v, g) if x is not None]
            tkq.linear_attn(*leaves).backward(torch.zeros_like(v))
            assert len(seen) == (6 if gate == "none" else 7) and {recipe for recipe, _ in seen} <= recipes
            seen.clear()


def test_the_kind_of_gate_decides_the_kernel():
    """Whatever came before: none, one for each head, one for each token."""
    with fake_gpu.launches() as seen, torch.no_grad():
        for gate in ("none", "head", "token", "head", "none"):
            q, k, v, g, _ = make(gate, 64, 128, BF16)
            tkq.linear_attn(q, k, v, g)
    assert [recipe.args[0].gate for recipe, _ in seen] == ["none", "head", "token", "head", "none"]
