"""Based's gradients against those of the sum over tokens in float64, beside the launches in plain PyTorch."""
import pytest
import torch

import tkq.nn
from tests.gpu.linear_attention.test_based import BF16, FP16, make
from tests.helpers import based_launches
from tests.helpers.sanitizer.nan_fill import poisoned
from tkq.linear_attention.based import gradients as launches
from tkq.linear_attention.based.gradients import Saved, backward
from tkq.linear_attention.based.launch import Given
from tkq.reference.based import based_backward
from tkq.testing import assert_2x


def gradients(given, do, scale=0.25, norm=True):
    """Of tkq.based."""
    leaves = [x.detach().requires_grad_() for x in given]
    return torch.autograd.grad(tkq.based(*leaves, scale, norm), leaves, do)


def of_peer(given, do, scale, norm):
    """The same launches in plain PyTorch."""
    o, sums = based_launches.launched(Given(*given, norm), scale)
    with pytest.MonkeyPatch.context() as patched:
        for name, f in (("launch", based_launches.launched), ("prepare", based_launches.prepared),
                        ("launch_gradient", based_launches.launched_gradient)):
            patched.setattr(launches, name, f)
        return backward(Saved(*given, *((o, sums) if norm else (None, None))), scale, do)


def check(given, scale=0.25, norm=True):
    do = torch.randn_like(given[2])
    with poisoned():
        found = gradients(given, do, scale, norm)
    want = based_backward(do.double(), *(x.double() for x in given), scale, norm)
    for name, mine, exact, theirs in zip("qkv", found, want, of_peer(given, do, scale, norm)):
        assert_2x(mine, exact, theirs, what=name)


@pytest.mark.parametrize("S", [2, 65, 300])  # the gradients of one token are 0
def test_lengths(S):
    check(make(2, S, 2, 2, 64))


def test_float16_and_two_parts_of_values():
    check(make(2, 200, 1, 2, 80, FP16), scale=0.3)


@pytest.mark.parametrize("dtype", [BF16, FP16])
@pytest.mark.slow  # kernels of their own
def test_without_a_norm(dtype):
    check(make(2, 200, 2, 2, 64, dtype), norm=False)


@pytest.mark.parametrize("kind", ["large", "values alike", "alike"])
def test_hard_data(kind):
    q, k, v = make(2, 260, 2, 4, 64)
    if kind == "large":
        q, k = q * 10, k * 10
    elif kind == "values alike":  # the gradients of q and k are what rounding leaves of 0
        v = torch.full_like(v, 0.75)
    else:
        q, k = torch.full_like(q, 0.75), torch.full_like(k, 0.75)
    check((q, k, v))


def test_the_same_bits():
    given = make(2, 700, 4, 8, 64)
    do = torch.randn_like(given[2])
    first = gradients(given, do)
    for _ in range(3):
        assert all(map(torch.equal, gradients(given, do), first))


def test_gradients_of_odd_strides():
    """Those that come in: expanded, and in rows that TMA does not take."""
    given = [x.requires_grad_() for x in make(1, 65, 2, 2, 64)]
    o = tkq.based(*given)
    for do in (torch.ones((), device="cuda", dtype=BF16).expand(1, 65, 2, 64),
               torch.randn(1, 65, 2, 67, device="cuda").to(BF16)[..., 1:65]):
        found, want = (torch.autograd.grad(o, given, x, retain_graph=True) for x in (do, do.contiguous()))
        assert all(map(torch.equal, found, want))


def test_a_layer():
    """tkq.nn.BasedAttention against float64."""
    torch.manual_seed(0)
    based_launches.check_layer(tkq.nn.BasedAttention(256, num_heads=4, device="cuda", dtype=BF16),
                               torch.randn(2, 100, 256, device="cuda").to(BF16))
