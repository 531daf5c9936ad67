"""fft_conv's gradients on the GPU: what is around tensors that are parts of larger ones."""
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
