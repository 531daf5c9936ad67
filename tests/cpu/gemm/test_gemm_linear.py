"""tkq.nn.Linear and the gradients of tkq.gemm beside torch's, through the CPU's path."""
import copy

import pytest
import torch
from torch import nn

import tkq
import tkq.nn
from tests.helpers.torch_versions import at_least
from tkq import reference
from tkq.gemm.dense import backward
from tkq.testing import assert_2x

BF16 = torch.bfloat16


def leaf(*shape, dtype=BF16):
    return torch.randn(*shape).to(dtype).requires_grad_()


def grads(y, dy, *leaves):
    return torch.autograd.grad(y, [x for x in leaves if x is not None], dy)


@pytest.mark.parametrize("shape", ((6, 16), (2, 3, 16), (16,), (0, 16), (1, 16)))
@pytest.mark.parametrize("bias", (True, False))
def test_linear_is_torchs(shape, bias):
    ours, theirs = tkq.nn.Linear(16, 24, bias=bias, dtype=BF16), nn.Linear(16, 24, bias=bias, dtype=BF16)
    assert ours.load_state_dict(theirs.state_dict()).missing_keys == [] and str(ours) == str(theirs)
    exact, x = copy.deepcopy(theirs).double(), torch.randn(shape).to(BF16)
    dy = torch.randn(*shape[:-1], 24).to(BF16)
    results = []
    for layer in (ours, theirs, exact):
        dtype = layer.weight.dtype
        z = x.to(dtype).requires_grad_()
        y = layer(z)
        results.append((y.detach(), *grads(y, dy.to(dtype), z, layer.weight, layer.bias)))
    for mine, peer, truth in zip(*results):
        assert mine.dtype == BF16 and mine.shape == truth.shape
        assert_2x(mine, truth, peer, 2, f"{shape}")


def test_a_weights_gradient_needs_no_copy():
    layer, x = tkq.nn.Linear(16, 24, bias=False, dtype=BF16), leaf(6, 16)
    dy = torch.randn(6, 24).to(BF16)
    assert grads(layer(x), dy, layer.weight)[0].stride() == layer.weight.stride()
    b = leaf(16, 24)  # of a matrix that lies the other way round
    assert grads(tkq.gemm(x, b), dy, b)[0].stride() == b.stride()


@pytest.mark.parametrize("layer", (tkq.nn.Linear, tkq.nn.Fp8Linear))
def test_linear_takes_any_stride(layer):
    ours, wide = layer(16, 16, dtype=BF16), torch.randn(16, 32).to(BF16)
    for x in (wide[:, ::2], wide[:, :16].t(), wide.view(2, 8, 32)[..., ::2], wide[:1, ::2], wide[0, ::2]):
        z = x.detach().requires_grad_()
        with torch.no_grad():
            assert torch.equal(ours(x), ours(x.contiguous()))
        ours(z).sum().backward()
        assert z.grad.shape == x.shape


def test_linear_under_autocast():
    layer, x = tkq.nn.Linear(16, 8), torch.randn(5, 16)
    with torch.autocast("cpu", BF16):
        y = layer(x)
    assert y.dtype == BF16
    y.float().sum().backward()
    assert layer.weight.grad.dtype == torch.float32 and layer.bias.grad.shape == (8,)


def test_linear_names_a_wrong_width():
    with pytest.raises(ValueError, match="in_features, 16"):
        tkq.nn.Linear(16, 8, dtype=BF16)(torch.randn(5, 8).to(BF16))


@pytest.mark.parametrize("m, n, k", ((6, 24, 16), (5, 7, 16), (1, 1, 8), (3, 8, 8), (0, 8, 8)))
@pytest.mark.parametrize("batch", ((), (3,)))
def test_gradients_of_the_linear_form(m, n, k, batch):
    """alpha, beta, bias and c; inner sizes of the backward that are no multiples of 8."""
    a, b, bias, c = leaf(*batch, m, k), leaf(*batch, k, n), leaf(n, dtype=torch.float32), leaf(*batch, m, n)
    y = tkq.gemm(a, b, bias=bias, c=c, alpha=0.5, beta=-2.0)
    dy = torch.randn_like(y)
    mine = grads(y, dy, a, b, bias, c)
    wide = [x.detach().double().requires_grad_() for x in (a, b, bias, c)]
    truth = grads(0.5 * wide[0] @ wide[1] + wide[2] - 2 * wide[3], dy.double(), *wide)
    for name, got, want, of in zip(("a", "b", "bias", "c"), mine, truth, (a, b, bias, c)):
        assert got.dtype == of.dtype and got.shape == of.shape
        assert_2x(got, want, want.to(of.dtype), 2, f"{name} {m, n, k}")


@pytest.mark.parametrize("activation", ("relu", "silu", "gelu", "gelu_tanh", "swiglu", "geglu_interleaved",
                                        "geglu_tanh"))
def test_gradients_with_an_activation(activation):
    a, b, bias = leaf(6, 16), leaf(16, 8), leaf(8)
    y = tkq.gemm(a, b, bias=bias, activation=activation)
    dy = torch.randn_like(y)
    mine = grads(y, dy, a, b, bias)
    wide = [x.detach().double().requires_grad_() for x in (a, b, bias)]
    truth = grads(reference.gemm(*wide[:2], bias=wide[2], activation=activation), dy.double(), *wide)
    for got, want in zip(mine, truth):
        assert (got.double() - want).abs().max() <= 0.03 * want.abs().max()


@pytest.mark.parametrize("which", (0, 1, 2))
def test_only_what_is_needed(which):
    tensors = [torch.randn(6, 16).to(BF16), torch.randn(16, 8).to(BF16), torch.randn(8)]
    tensors[which].requires_grad_()
    y = tkq.gemm(tensors[0], tensors[1], bias=tensors[2])
    y.sum().backward()  # an expanded gradient
    assert [x.grad is not None for x in tensors] == [i == which for i in range(3)]


@pytest.mark.parametrize("activation", (None, "silu", "swiglu"))
def test_gradients_under_compile(activation):
    a, b, bias = leaf(6, 16), leaf(16, 8), leaf(8)

    def f(a, b, bias):
        return tkq.gemm(a, b, bias=bias, activation=activation)

    y = torch.compile(f, fullgraph=True, backend="aot_eager")(a, b, bias)
    dy = torch.randn_like(y)
    for got, want in zip(grads(y, dy, a, b, bias), grads(f(a, b, bias), dy, a, b, bias)):
        if at_least("2.10"):
            assert torch.equal(got, want)
        else:  # silu's derivative is traced as steps that are rounded one by one; of 150 draws the worst is 0.018
            assert (got - want).float().norm() <= 2**-5 * want.float().norm()


def test_op_with_gradients():
    a, b, bias, c = leaf(6, 16), leaf(16, 8), leaf(8, dtype=torch.float32), leaf(6, 8)
    torch.library.opcheck(torch.ops.tkq.gemm.default, (a, b, bias, "", c, 2.0, 0.5, None))
    with pytest.raises(NotImplementedError, match="silu"):
        torch.ops.tkq.gemm(a, b, None, "silu", None, 1.0, 0.0, None)


def test_padding_and_copies_of_the_backward():
    x, y = backward.padded(torch.ones(3, 5), torch.ones(5, 7))
    assert x.shape == (3, 8) and y.shape == (8, 7) and not x[:, 5:].any() and not y[5:].any()
    fine = torch.ones(16, 16)
    assert backward.ready(fine) is fine
    column = torch.ones(16, 16).t()
    assert backward.ready(column) is column
    assert backward.ready(torch.ones(1, 1).expand(6, 16)).stride() == (16, 1)


@pytest.mark.parametrize("name", ("geglu_tanh", "geglu", "geglu_tanh_interleaved"))
def test_a_gate_is_the_same_where_a_gradient_is_recorded(name):
    a, b = (torch.randn(n, 64, generator=torch.Generator().manual_seed(n)).bfloat16() for n in (32, 48))
    want = tkq.gemm(a, b.t(), activation=name, out_dtype=torch.float32)
    found = tkq.gemm(a.clone().requires_grad_(), b.t(), activation=name, out_dtype=torch.float32)
    torch.testing.assert_close(found.detach(), want, rtol=1e-6, atol=1e-5)


@pytest.mark.parametrize("turned", (False, True))
def test_alpha_and_beta_are_in_the_gradients(turned):
    """Also in that of a layer's weight, which is made as it lies."""
    torch.manual_seed(0)
    a, b, c = (torch.randn(n, 8).bfloat16().requires_grad_() for n in (3, 8, 3))
    dy = torch.randn(3, 8).bfloat16()
    found = torch.autograd.grad(tkq.gemm(a, b.t() if turned else b, c=c, alpha=2.0, beta=0.5), (a, b, c), dy)
    wide = [x.detach().double().requires_grad_() for x in (a, b, c)]
    y = 2 * wide[0] @ (wide[1].t() if turned else wide[1]) + 0.5 * wide[2]
    for mine, exact in zip(found, torch.autograd.grad(y, wide, dy.double())):
        torch.testing.assert_close(mine.double(), exact, rtol=2**-7, atol=1e-3)


def test_out_has_no_gradients():
    a, c, out = (torch.zeros(8, 8, dtype=torch.bfloat16) for _ in range(3))
    for given in (dict(a=a.clone().requires_grad_(), b=a, c=c), dict(a=a, b=a.clone().requires_grad_(), c=c),
                  dict(a=a, b=a, c=c.clone().requires_grad_()),
                  dict(a=a, b=a, c=c, bias=torch.zeros(8).requires_grad_())):
        with pytest.raises(RuntimeError, match="gemm: out is given and an argument requires a gradient"):
            tkq.gemm(**given, beta=1.0, out=out)


def test_a_gradient_that_autograd_expanded_is_copied():
    """No product takes rows that are one row."""
    row = torch.zeros(1, 8, dtype=torch.bfloat16)
    for x in (row.expand(4, 8), row.t().expand(8, 4)):
        assert backward.ready(x).is_contiguous()
    assert backward.ready(x := torch.zeros(4, 16)[:, :8]) is x
