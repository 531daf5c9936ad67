"""Based's forward against the sum over tokens in float64, beside its chunks in plain PyTorch, rounded alike."""
import math

import pytest
import torch

import tkq
from tests.helpers import based_launches
from tests.helpers.sanitizer.nan_fill import poisoned
from tkq.linear_attention.based.launch import Given, launch
from tkq.reference.based import based as exactly
from tkq.testing import assert_2x

BF16, FP16 = torch.bfloat16, torch.float16


def make(B, S, H, HV, V, dtype=BF16):
    torch.manual_seed(S)
    q, k = torch.randn(2, B, S, H, 16, device="cuda").to(dtype)
    return q, k, torch.randn(B, S, HV, V, device="cuda").to(dtype)


def check(q, k, v, scale=0.25, norm=True, reverse=False):
    """reverse: without a norm."""
    given = Given(q, k, v, norm, reverse)
    with poisoned():
        o, sums = launch(given, scale)
    peer, sums_of_peer = based_launches.launched(given, scale)
    wide = [x.double() for x in (q, k, v)]
    want, sums_wanted = exactly(*[x.flip(1) for x in wide] if reverse else wide, scale, norm)
    assert_2x(o, want.flip(1) if reverse else want, peer, what="o")
    if norm:
        # two parts of bf16 leave 2^-18 of a moment, 32 ulps; tensor cores cut off what they add, an ulp for each 16
        # tokens at most
        ulps = 36 + q.shape[1] / 16
        assert_2x(sums[..., None], sums_wanted[..., None], sums_of_peer[..., None], ulps=ulps, bias_ulps=ulps,
                  what="sums")
    return o


@pytest.mark.parametrize("S", [1, 64, 65, 300])
def test_lengths(S):
    check(*make(2, S, 2, 2, 64))


def test_reversed():
    check(*make(2, 300, 1, 2, 64), norm=False, reverse=True)


def test_float16_and_two_parts_of_values():
    check(*make(2, 200, 1, 2, 80, FP16), scale=0.3)


def test_without_a_norm():
    check(*make(2, 200, 2, 2, 64), norm=False)


def test_segments():
    """Of one head, 5 of 9 chunks but for the last, and 2 of 8."""
    for S in (2600, 1024):
        check(*make(1, S, 1, 1, 64))


@pytest.mark.parametrize("kind", ["large", "small", "one huge element", "scores of -1"])
def test_hard_data(kind):
    q, k, v = make(2, 260, 2, 2, 64)
    if kind == "large":
        q, k = q * 30, k * 30
    elif kind == "small":
        q, k, v = q * 1e-4, k * 1e-4, v * 1e-4
    elif kind == "one huge element":
        k[0, 17, 0, 5], v[1, 250, 1, 9] = 1e4, 1e4
    else:  # where weights are smallest
        q, k, v = torch.full_like(q, 0.5), torch.full_like(k, -0.5), v * 1e4
    check(q, k, v)


def test_nothing_behind_the_end_counts():
    """NaN in the rows behind each tensor's own."""
    given = make(1, 100, 2, 2, 64)

    def behind(x):
        wide = torch.full((1, 200, *x.shape[2:]), math.nan, device="cuda", dtype=x.dtype)
        wide[:, :100] = x
        return wide[:, :100]

    assert torch.equal(tkq.based(*given), tkq.based(*map(behind, given)))


def test_views_are_read_in_place():
    """Slices of a packed tensor, heads before tokens."""
    packed = torch.randn(2, 100, 4, 96, device="cuda").to(BF16)
    q, k, v = packed.split((16, 16, 64), -1)
    v = v.transpose(1, 2).contiguous().transpose(1, 2)
    assert torch.equal(tkq.based(q, k, v), tkq.based(*(x.contiguous() for x in (q, k, v))))


def test_the_same_bits():
    given = make(2, 1000, 4, 8, 64)
    first = tkq.based(*given)
    assert all(torch.equal(tkq.based(*given), first) for _ in range(5))


def test_no_tokens():
    q, k, v = make(2, 0, 2, 2, 64)
    assert tkq.based(q, k, v).shape == v.shape
