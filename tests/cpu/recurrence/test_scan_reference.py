"""The reference of the scan: its gradients against autograd's of its forward. tkq.scan on a CPU."""
import pytest
import torch

import tkq
from tkq.reference import recurrence as reference


@pytest.mark.parametrize("reverse", [False, True])
@pytest.mark.parametrize("T", [0, 1, 9])
def test_gradients_are_autograds(T, reverse):
    torch.manual_seed(0)
    a, b, state = (torch.randn(s, dtype=torch.float64, requires_grad=True) for s in ((2, T, 5), (2, T, 5), (2, 5)))
    h, final = reference.scan(a.detach(), b.detach(), state.detach(), reverse)
    steps, last = [], state
    for t in reversed(range(T)) if reverse else range(T):
        last = a[:, t] * last + b[:, t]
        steps.append(last)
    torch.testing.assert_close(final, last)
    dh, dfinal = torch.randn_like(h), torch.randn_like(final)
    loss = (last * dfinal).sum()
    if T:
        mine = torch.stack(steps[::-1] if reverse else steps, 1)
        torch.testing.assert_close(h, mine)
        loss = loss + (mine * dh).sum()
    wanted = torch.autograd.grad(loss, (a, b, state), allow_unused=True, materialize_grads=True)
    found = reference.scan_backward(dh, dfinal, a.detach(), h, state.detach(), reverse)
    for x, y in zip(found, wanted, strict=True):
        torch.testing.assert_close(x, y)


@pytest.mark.parametrize("time", [False, True])
def test_on_a_cpu(time):
    torch.manual_seed(0)
    a, b, state = torch.randn(2, 9, 5).mul(0.5), torch.randn(2, 9, 5), torch.randn(2, 5)
    if time:
        a, b = (x.mT.contiguous().mT for x in (a, b))
    leaves = [t.requires_grad_() for t in (a, b, state)]
    h, final = tkq.scan(*leaves, False, True)
    assert h.stride() == a.stride() and torch.equal(h[:, -1], final)
    found = torch.autograd.grad((h, final), leaves, (torch.ones_like(h), torch.ones_like(final)))
    wanted = reference.scan_backward(torch.ones_like(h), torch.ones_like(final), a, h, state, False)
    for x, y in zip(found, wanted, strict=True):
        torch.testing.assert_close(x, y)


def test_refuses_by_name():
    a = torch.zeros(2, 9, 5)
    with pytest.raises(ValueError, match="scan: b:"):
        tkq.scan(a, a[:, :8])
    with pytest.raises(TypeError, match="b is torch.bfloat16, a is torch.float32"):
        tkq.scan(a, a.bfloat16())
    with pytest.raises(ValueError, match="scan: initial_state:"):
        tkq.scan(a, a, a[:, 0, :4])
    with pytest.raises(TypeError, match="reverse"):
        tkq.scan(a, a, None, 1)
