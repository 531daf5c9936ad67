"""flash_attn_fp8 with a share of P by integers, `tkq.tile.exp2_e4m3`: the configuration is given, no plan has it."""
import itertools
from dataclasses import replace

import pytest
import torch

from tests.helpers.attention.fp8 import F8, call, compare, make, quantised
from tkq.attention.fp8.plan import plan
from tkq.attention.fp8.spec import Fp8Spec

MODES = ("two_level", "fast")
DIMS = (64, 128, 256)
NAN = 0x7F


def by_integers(dim, causal, accumulate):
    """The plan, with a share of P by integers."""
    planned = plan(Fp8Spec(dim, causal, accumulate=accumulate, descales="qkv"))
    return replace(planned, norm="products", integers={64: 2, 128: 3, 256: 4}[dim])


@pytest.mark.parametrize("accumulate", MODES)
@pytest.mark.parametrize("dim", DIMS)
@pytest.mark.sampled(when=lambda accumulate, dim: (accumulate, dim) in (("fast", 64), ("two_level", 128)))
def test_p_by_integers(accumulate, dim):
    """Of short and long sequences, of hard data, and of a maximum that moves."""
    causal = dim == 128
    config = by_integers(dim, causal, accumulate)
    check = lambda given, what, ulps=1: compare(given, what, config, accumulate, return_lse=False, ulps=ulps,
                                                causal=causal)
    for rows, keys in ((1, 1), (113, 203), (1, 777), (300, 2500), (1024, 1024)):
        check(make(2, rows, keys, 4, 2, dim), f"{rows} x {keys}")
    g = torch.Generator("cuda").manual_seed(dim)
    q, k, v = (torch.randn(2, 517, 4, dim, device="cuda", generator=g) for _ in range(3))
    peaked, dominating = k.clone(), k.clone()
    peaked[:, ::50], dominating[:, 0] = q[:, ::50] * 4, 30 * q.mean(1)
    for what, tensors in {"large scores": (q * 20, k, v), "peaked rows": (q, peaked, v), "one key": (q, dominating, v),
                          "equal keys": (q, k[:, :1].expand(-1, 517, -1, -1), v), "mean": (q, k, v * 1000 + 500),
                          "constant": (q, k, torch.ones_like(v))}.items():
        check(quantised(*tensors), what, ulps=2)
    up = torch.linspace(0, 1, 1500, device="cuda")[None, :, None]
    for size, ramp in itertools.product((0.05, 1.0, 20.0), (up, 1 - up)):
        q, k = torch.zeros(1, 200, 2, dim, device="cuda"), torch.zeros(1, 1500, 2, dim, device="cuda")
        q[..., 0], k[..., 0] = torch.rand(1, 200, 2, device="cuda") + 0.5, dim * size * ramp
        check(quantised(q, k, torch.randn(1, 1500, 2, dim, device="cuda")), f"moving {size}", ulps=2)


def test_numbers_that_are_none_by_integers():
    """Which cannot be NaN themselves: a key's NaN is in the rows that see it, wherever the key lies among others."""
    given, config = make(1, 300, 300, 2, 2, 64), by_integers(64, True, "fast")
    for key in range(230, 262):
        wrong = given["k"].view(torch.uint8).clone()
        wrong[0, key, 0, 1] = NAN
        o, _ = call(given | dict(k=wrong.view(F8)), config, "fast", return_lse=False, causal=True)
        assert o[0, key:, 0].isnan().all() and o.isnan().sum() == (300 - key) * 64, key
