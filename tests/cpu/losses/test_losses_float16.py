"""linear_cross_entropy's gradients of float16, whose sums and factors are not of 16 bits."""
import pytest
import torch
import torch.nn.functional as F

import tkq


@pytest.mark.parametrize("reduction, over", [("mean", 1), ("sum", 2048)])
@pytest.mark.parametrize("compiled", [False, True])
def test_sums_of_a_float16_weight_s_gradient_beyond_its_range(reduction, over, compiled):
    """They are divided before they are rounded."""
    x, weight = torch.full((2048, 8), 100.0).half(), (torch.randn(16, 8) / 100).half().requires_grad_()
    target = torch.zeros(2048, dtype=torch.long)
    call = torch.compile(tkq.linear_cross_entropy, backend="aot_eager") if compiled else tkq.linear_cross_entropy
    found, = torch.autograd.grad(call(x, weight, target, reduction=reduction) / over, weight)
    wide = weight.detach().double().requires_grad_()
    want, = torch.autograd.grad(F.cross_entropy(x.double() @ wide.t(), target), wide)
    torch.testing.assert_close(found.double(), want, rtol=1e-2, atol=0.2)


@pytest.mark.parametrize("factor", [65536.0, 1e-4])
def test_factors_of_a_float16_gradient_are_not_of_16_bits(factor):
    """The first scale of a GradScaler, and one whose product with 1 / rows is 0 in float16."""
    rows = 4 if factor > 1 else 4096
    x = (torch.randn(rows, 8) * (1e-3 if factor > 1 else 1)).half().requires_grad_()
    weight, target = (torch.randn(16, 8) * (1e-3 if factor > 1 else 30)).half(), torch.arange(rows) % 16
    reduction = "sum" if factor > 1 else "mean"
    found, = torch.autograd.grad(tkq.linear_cross_entropy(x, weight, target, reduction=reduction) * factor, x)
    wide = x.detach().double().requires_grad_()
    loss = F.cross_entropy(wide @ weight.double().t(), target, reduction=reduction)
    want, = torch.autograd.grad(loss * factor, wide)
    assert (found.double() - want).norm() <= 2e-2 * want.norm()
