"""tkq.based on the CPU: results, gradients, what is refused, and which kernels a call launches."""
import pytest
import torch

import tkq
from tests.helpers.emulation import fake_gpu
from tkq.linear_attention.based.layout import HELD_MOMENTS, HELD_STATE
from tkq.reference.based import based as exactly

BF16 = torch.bfloat16


def make(S=7, H=2, HV=4, V=48, dtype=BF16):
    torch.manual_seed(0)
    q, k = torch.randn(2, 2, S, H, 16).to(dtype)
    return q, k, torch.randn(2, S, HV, V).to(dtype)


@pytest.mark.parametrize("norm", [True, False])
@pytest.mark.parametrize("scale", [None, 0.7, 0])
def test_results_and_gradients(norm, scale):
    given = [x.requires_grad_() for x in make()]
    wide = [x.detach().double().requires_grad_() for x in given]
    o, (want, _) = tkq.based(*given, scale, norm), exactly(*wide, scale, norm)
    assert o.dtype == BF16 and o.is_contiguous()
    torch.testing.assert_close(o.double(), want, rtol=2**-7, atol=1e-5)
    do = torch.randn_like(o)
    for mine, exact in zip(torch.autograd.grad(o, given, do), torch.autograd.grad(want, wide, do.double())):
        assert mine.dtype == BF16
        torch.testing.assert_close(mine.double(), exact, rtol=2**-7, atol=1e-3)


def test_a_mean():
    """Of equal values, and of one token."""
    q, k, v = make(S=70)
    torch.testing.assert_close(tkq.based(q, k, torch.full_like(v, 3.0)), torch.full_like(v, 3.0))
    assert torch.equal(tkq.based(q, k, v)[:, 0], v[:, 0])


def test_no_tokens():
    q, k, v = make(S=0)
    assert tkq.based(q, k, v).shape == v.shape


def zeros(*shape, dtype=BF16):
    return torch.zeros(shape, dtype=dtype)


@pytest.mark.parametrize("changed, error, words", [
    (dict(k=zeros(2, 7, 1, 16)), ValueError, r"k: shape is \(2, 7, 1, 16\), expected \(2, 7, 2, 16\)"),
    (dict(v=zeros(2, 7, 3, 48)), ValueError, "v has 3 heads, q has 2; allowed are from 1 on, v's a multiple of q's"),
    (dict(v=zeros(2, 8, 4, 48)), ValueError, "v: shape is"),
    (dict(v=zeros(2, 7, 4, 48, dtype=torch.float16)), TypeError, "v is torch.float16, q is torch.bfloat16"),
    (dict(q=zeros(2, 7, 2, 16, dtype=torch.float32)), TypeError, "q: dtype is torch.float32"),
    (dict(q=zeros(2, 7, 2, 32), k=zeros(2, 7, 2, 32)), NotImplementedError, "q: has 32 columns, supported are 16"),
    (dict(v=zeros(2, 7, 4, 40)), NotImplementedError, "v: V is 40, supported are multiples of 16 from 32 to 128"),
    (dict(v=zeros(2, 7, 4, 144)), NotImplementedError, "v: V is 144"),
    (dict(v=zeros(2, 7, 4, 49)[..., 1:]), ValueError, "v: strides are"),
    (dict(q=zeros(7, 2, 16)), ValueError, "q: "),
    (dict(scale=float("nan")), ValueError, "scale"), (dict(use_norm=1), TypeError, "use_norm")])
def test_what_is_refused(changed, error, words):
    given = dict(zip("qkv", make())) | changed
    with pytest.raises(error, match=f"based: {words}"):
        tkq.based(**given)


def test_sums_of_the_op_have_no_gradient():
    """What the op gives beside o, for its own gradients: not silently a gradient of 0."""
    o, sums = torch.ops.tkq.based(*(x.requires_grad_() for x in make()), None, True)
    assert o.requires_grad and not sums.requires_grad


def notes(given, *options):
    with fake_gpu.launches() as seen:
        leaves = [x.detach().requires_grad_() for x in given]
        o = tkq.based(*leaves, *options)
        forward = list(seen)
        torch.autograd.grad(o, leaves, torch.zeros_like(o))
        return forward, seen[len(forward):]


def test_what_a_call_launches():
    forward, back = notes(make(S=100))
    assert [recipe.args[0].part for recipe, _ in forward] == [None]
    assert [recipe.builder.partition(":")[2] for recipe, _ in back] == [
        "PrepareGradients", "BasedGradient", "BasedGradient", "Based"]
    assert [recipe.args[0].reverse for recipe, _ in back] == [False, False, True, True]
    _, (*_, o, sums, states, moments), scale, times, heads, segments, chunks = forward[0][1]
    assert (scale, times, heads, segments, chunks) == (0.25, 1.0, 4, 1, 2) and states is moments is None
    assert sums.shape == o.shape[:3] and sums.dtype == torch.float32


def test_without_a_norm_nothing_is_prepared():
    forward, back = notes(make(S=100), None, False)
    assert [recipe.builder.partition(":")[2] for recipe, _ in back] == ["BasedGradient", "BasedGradient", "Based"]
    assert all(recipe.args[0].norm is False for recipe, _ in back) and forward[0][1][1][3] is None


def test_segments():
    """5 of 9 chunks but for the last: all but that one have states."""
    q, k, v = (x[:1, :, :1] for x in make(S=2600, V=80))
    (first, states), (second, outputs) = notes((q, k, v))[0]
    assert [x.args[0].part for x in (first, second)] == ["states", "outputs"]
    assert states[4:] == (1, 4, 9) and outputs[4:] == (1, 5, 9)
    of_states, moments = states[1][4:]
    assert of_states.shape == (4, 1, 1, 2, HELD_STATE, 128) and moments.shape == (4, 1, 1, HELD_MOMENTS, 128)
    assert outputs[1][4] is of_states and outputs[1][5] is moments and states[1][2] is states[1][3] is None
