"""flash_attn_fp8 without lse: rows summed up by a product with ones, and a share of P made in software,
`tkq.tile.exp2_e4m3`, as planned; flash_attn_fp8_varlen without lse, whose plan is that with lse."""
import itertools
import math

import pytest
import torch

from tests.helpers.attention import fp8_varlen
from tests.helpers.attention.fp8 import F8, call, compare, make, quantised

MODES = ("two_level", "fast")
DIMS = (64, 128, 256)
NAN = 0x7F


@pytest.mark.parametrize("causal", (False, True))
@pytest.mark.parametrize("accumulate", MODES)
@pytest.mark.parametrize("dim", DIMS)
@pytest.mark.sampled(when=lambda accumulate, dim, causal: causal == ((accumulate, dim) != ("fast", 256)))
def test_without_lse(accumulate, dim, causal):
    """Of short and long sequences, of hard data, and of a maximum that moves."""
    check = lambda given, what, ulps=1: compare(given, what, None, accumulate, return_lse=False, ulps=ulps,
                                                causal=causal)
    for rows, keys in ((1, 1), (113, 203), (1, 777), (300, 100), (300, 2500), (1024, 1024)):
        check(make(2, rows, keys, 4, 2, dim), f"{rows} x {keys}")
    g = torch.Generator("cuda").manual_seed(dim)
    q, k, v = (torch.randn(2, 517, 4, dim, device="cuda", generator=g) for _ in range(3))
    peaked, dominating = k.clone(), k.clone()
    peaked[:, ::50], dominating[:, 0] = q[:, ::50] * 4, 30 * q.mean(1)
    for what, tensors in {"large scores": (q * 20, k, v), "peaked rows": (q, peaked, v), "one key": (q, dominating, v),
                          "equal keys": (q, k[:, :1].expand(-1, 517, -1, -1), v), "mean": (q, k, v * 1000 + 500),
                          "constant": (q, k, torch.ones_like(v)), "below zero": (-q.abs(), k.abs() * 8, v)}.items():
        check(quantised(*tensors), what, ulps=2)
    up = torch.linspace(0, 1, 1500, device="cuda")[None, :, None]
    for size, ramp in itertools.product((0.05, 1.0, 20.0), (up, 1 - up)):
        q, k = torch.zeros(1, 200, 2, dim, device="cuda"), torch.zeros(1, 1500, 2, dim, device="cuda")
        q[..., 0], k[..., 0] = torch.rand(1, 200, 2, device="cuda") + 0.5, dim * size * ramp
        check(quantised(q, k, torch.randn(1, 1500, 2, dim, device="cuda")), f"moving {size}", ulps=2)


@pytest.mark.parametrize("dim, accumulate", ((64, "fast"), *(
    pytest.param(*each, marks=pytest.mark.slow) for each in ((64, "two_level"), (128, "fast")))))
def test_windows_without_lse(dim, accumulate):
    given = make(2, 700, 900, 4, 2, dim)
    for left, right in ((0, 0), (200, 100), (5, 600)):
        compare(given, "window", None, accumulate, return_lse=False, left=left, right=right)


@pytest.mark.parametrize("dim, accumulate", ((64, "fast"), (64, "two_level"), (128, "fast"), *(
    pytest.param(*each, marks=pytest.mark.slow) for each in ((128, "two_level"), (256, "fast"), (256, "two_level")))))
def test_packed_without_lse(dim, accumulate):
    given = fp8_varlen.make(fp8_varlen.EDGES, 4, 2, dim, spare=150)
    fp8_varlen.compare(given, "edges", accumulate=accumulate, return_lse=False, causal=True)
    large = fp8_varlen.make(fp8_varlen.EDGES, 4, 2, dim, scale=20.0)
    fp8_varlen.compare(large, "large scores", accumulate=accumulate, return_lse=False, ulps=2, causal=True)


@pytest.mark.parametrize("dim, accumulate", ((64, "fast"), (64, "two_level"), (128, "fast"), (128, "two_level")))
def test_numbers_that_are_none_without_lse(dim, accumulate):
    """Integers cannot be NaN themselves: a key's NaN is in the rows that see it, wherever the key lies among others;
    scores of 0 times an infinite factor are NaN in each row."""
    given = make(1, 300, 300, 2, 2, dim)
    run = lambda **changed: call(given | changed, None, accumulate, return_lse=False, causal=True)[0]
    for key in range(230, 262):
        wrong = given["k"].view(torch.uint8).clone()
        wrong[0, key, 0, 1] = NAN
        o = run(k=wrong.view(F8))
        assert o[0, key:, 0].isnan().all() and o.isnan().sum() == (300 - key) * dim, key
    zeros = torch.zeros_like(given["k"].view(torch.uint8)).view(F8)
    assert run(k=zeros, k_descale=torch.full_like(given["k_descale"], math.inf)).isnan().all()
