"""cross_entropy whose gradient is written over the logits, on the GPU: what autograd is told of it."""
import pytest
import torch

import tkq
from tests.helpers.losses.cases import make


def test_autograd_notices_a_gradient_written_over_logits():
    h, target = torch.randn(8, 4096, device="cuda"), torch.zeros(8, dtype=torch.int64, device="cuda")
    h.requires_grad_()
    for _ in range(3):  # the first call, one that is known, one like it again
        logits = torch.tanh(h)
        _, gradient = tkq.cross_entropy_and_gradient(logits, target, inplace=True)
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            logits.backward(gradient)


def test_logits_that_share_memory_are_not_written_over():
    logits, target = torch.randn(1, 4096, device="cuda"), torch.zeros(6, dtype=torch.int64, device="cuda")
    before = logits.clone()
    with pytest.raises(ValueError, match="cross_entropy_and_gradient: logits: is .* share memory"):
        tkq.cross_entropy_and_gradient(logits.expand(6, 4096), target, inplace=True)
    shared = (logits.requires_grad_() * 1).expand(6, 4096)
    with pytest.raises(ValueError, match="cross_entropy: logits: is .* share memory"):
        tkq.cross_entropy(shared, target, inplace_backward=True)
    assert torch.equal(logits, before)


def test_inplace_backward():
    for shape in ((37, 1000), (3, 4, 50257)):
        logits, target = make(shape)
        apart = logits.clone().requires_grad_()
        wanted, = torch.autograd.grad(tkq.cross_entropy(apart * 1, target), apart)
        leaf = logits.clone().requires_grad_()
        x = leaf * 1
        loss = tkq.cross_entropy(x, target, inplace_backward=True)
        before = torch.cuda.memory_allocated()
        found, = torch.autograd.grad(loss, x, retain_graph=True)
        assert found.data_ptr() == x.data_ptr() and torch.equal(found, wanted)
        assert torch.cuda.memory_allocated() - before < 4096
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            torch.autograd.grad(loss, x)
        with pytest.raises(RuntimeError, match="logits is a leaf"):
            tkq.cross_entropy(leaf, target, inplace_backward=True)
        assert torch.equal(leaf, logits)


def test_another_backward_of_the_logits_is_an_error():
    logits, target = make((5, 100))
    x = logits.clone().requires_grad_() * 1
    other = x.square().sum()
    torch.autograd.grad(tkq.cross_entropy(x, target, inplace_backward=True), x)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        torch.autograd.grad(other, x)
