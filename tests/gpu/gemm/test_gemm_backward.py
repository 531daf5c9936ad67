"""Gradients of gemm and nn.Linear on a GPU, beside float64 and PyTorch at the same precision."""
import copy

import pytest
import torch
from torch import nn

import tkq
import tkq.nn
from tkq.testing import assert_2x

BF16 = torch.bfloat16


@pytest.mark.parametrize("shape, out", (((300, 136), 264), ((3, 67, 72), 129), ((1, 136), 264), ((2, 8), 1)))
def test_linear(shape, out):
    """Odd numbers of rows and of outputs: inner sizes of the backward that are no multiples of 8."""
    torch.manual_seed(sum(shape) + out)
    ours = tkq.nn.Linear(shape[-1], out, device="cuda", dtype=BF16)
    theirs = nn.Linear(shape[-1], out, device="cuda", dtype=BF16)
    theirs.load_state_dict(ours.state_dict())
    exact = copy.deepcopy(theirs).double()
    x, dy = torch.randn(shape, device="cuda").to(BF16), torch.randn(*shape[:-1], out, device="cuda").to(BF16)
    results = []
    for layer in (ours, theirs, exact):
        z = x.detach().to(layer.weight.dtype).requires_grad_()
        y = layer(z)
        y.backward(dy.to(y.dtype))
        results.append((y.detach(), z.grad, layer.weight.grad, layer.bias.grad))
    for name, mine, peer, truth in zip(("y", "dx", "dweight", "dbias"), *results):
        assert mine.dtype == BF16
        assert_2x(mine, truth, peer, 2, f"{name} {shape}")


@pytest.mark.parametrize("batch", ((), pytest.param((3,), marks=pytest.mark.slow)))
def test_all_of_the_linear_form(batch):
    torch.manual_seed(1)
    shapes = (*batch, 201, 136), (*batch, 136, 264), (264,), (*batch, 201, 264)
    leaves = [torch.randn(s, device="cuda").to(BF16).requires_grad_() for s in shapes]
    y = tkq.gemm(leaves[0], leaves[1], bias=leaves[2], c=leaves[3], alpha=0.5, beta=-2.0)
    dy = torch.randn_like(y)
    mine = torch.autograd.grad(y, leaves, dy)
    wide = [x.detach().double().requires_grad_() for x in leaves]
    truth = torch.autograd.grad(0.5 * wide[0] @ wide[1] + wide[2] - 2 * wide[3], wide, dy.double())
    for name, got, want in zip(("a", "b", "bias", "c"), mine, truth):
        assert_2x(got, want, want.to(BF16), 2, name)


@pytest.mark.parametrize("activation", ("gelu", "swiglu"))
def test_with_an_activation(activation):
    torch.manual_seed(2)
    leaves = [torch.randn(s, device="cuda").to(BF16).requires_grad_() for s in ((200, 136), (136, 264))]
    y = tkq.gemm(*leaves, activation=activation)
    dy = torch.randn_like(y)
    mine = torch.autograd.grad(y, leaves, dy)
    compiled = torch.compile(lambda a, b: tkq.gemm(a, b, activation=activation), fullgraph=True, backend="aot_eager")
    for got, want in zip(torch.autograd.grad(compiled(*leaves), leaves, dy), mine):
        assert torch.equal(got, want)
    with torch.no_grad():  # fused: rounded once more or once less
        assert torch.allclose(tkq.gemm(*leaves, activation=activation).float(), y.float(), rtol=0.03, atol=0.5)


def test_expanded_gradients():
    a, b = (torch.randn(s, device="cuda").to(BF16).requires_grad_() for s in ((64, 72), (72, 40)))
    tkq.gemm(a, b).sum().backward()
    want = b.detach().double().sum(1).expand(64, 72)
    assert_2x(a.grad, want, want.to(BF16), 2, "a")
