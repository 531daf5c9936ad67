"""fft_conv's gradients on the GPU: what is around tensors that are parts of larger ones; one gradient at a time."""
import math

import pytest
import torch

import tkq
from tests.helpers.fft_conv import make
from tests.helpers.sanitizer.nan_fill import poisoned


@pytest.fixture(autouse=True)
def _poisoned():
    with poisoned():
        yield


@pytest.mark.parametrize("L", [1016, 4088, 8184, 20000, 262136])
def test_nan_behind_the_ends_of_what_gradients_read(L):
    """Of u, of dy, of filters."""
    given, wide = make(3, 2, L, L), torch.full((2, 4, 3, L + 8), math.nan, device="cuda", dtype=torch.bfloat16)
    taps = torch.full((3, L + 8), math.nan, device="cuda")
    u, k = given["u"].detach(), given["k"].detach()
    wide[0, :3, :2, :L], wide[1, :3, :2, :L], taps[:2, :L] = u, u.flip(0), k

    def gradients(u, k, dy):
        leaves = [x.detach().requires_grad_() for x in (u, k)]
        return torch.autograd.grad(tkq.fft_conv(*leaves), leaves, dy)

    want = gradients(u, k, u.flip(0))
    found = gradients(wide[0, :3, :2, :L], taps[:2, :L], wide[1, :3, :2, :L])
    for ours, theirs in zip(found, want, strict=True):
        assert ours.isfinite().all() and torch.equal(ours, theirs)


@pytest.mark.parametrize("L", [4088, 20000])
def test_one_gradient(L):
    """Of u, of k or of d alone: what it is where all are asked for."""
    given = make(3, 2, L, L, d=True)
    leaves = given["u"], given["k"], given["d"]
    dy = leaves[0].detach().flip(0)
    for i, want in enumerate(torch.autograd.grad(tkq.fft_conv(*leaves), leaves, dy)):
        alone = [x.detach().requires_grad_(j == i) for j, x in enumerate(leaves)]
        found, = torch.autograd.grad(tkq.fft_conv(*alone), alone[i], dy)
        assert found.dtype == want.dtype and (found - want).norm() <= 2**-8 * want.norm(), "ukd"[i]
