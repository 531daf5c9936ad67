"""PersistentLayerNorm: its variants against float64, rows that are hard to centre, and the calls that take it."""
import math

import pytest
import torch

from tests.helpers.norms.long_layernorm import check_calls
from tkq import runtime
from tkq.norms import persistent_plan
from tkq.norms.spec import NormSpec
from tkq.runtime.device import clusters
from tkq.testing import assert_2x

EPS = 1e-5


def make(M, N, bias=True, seed=0):
    g = torch.Generator("cuda").manual_seed(seed)
    x = torch.randn(M, N, device="cuda", generator=g).bfloat16()
    weight, b = (torch.randn(N, device="cuda", generator=g) for _ in range(2))
    return x, weight, b if bias else None


def run(p, x, weight, bias):
    spec = NormSpec("layernorm", x.shape[1], "bf16", "fp32", None if bias is None else "fp32", 8)
    out = torch.full_like(x, math.nan)
    units = p.min_blocks_per_sm * clusters.resident(x.device, p.cluster, p.block)
    runtime.function(persistent_plan.recipe(spec, p))(x, weight, bias, out, EPS, units)
    return out


def check(p, x, weight, bias):
    def norm(t):
        return torch.nn.functional.layer_norm(t, t.shape[-1:], weight.to(t.dtype), None if bias is None else bias.to(
            t.dtype), EPS)

    y = run(p, x, weight, bias)
    assert_2x(y, norm(x.double()), norm(x.float()).bfloat16(), ulps=1, what=str(p))
    assert torch.equal(y, run(p, x, weight, bias)), "other bits in another run"


def geometries(N, bias):
    found = {}
    for p in persistent_plan.variants(NormSpec("layernorm", N, "bf16", "fp32", "fp32" if bias else None, 8)):
        found.setdefault((p.cluster, p.warps, p.min_blocks_per_sm), p)
    return list(found.values())


@pytest.mark.slow
@pytest.mark.parametrize("N, bias", [(262144, True), (262144, False), (131072, True), (100008, True), (65536, True)])
def test_each_geometry(N, bias):
    for p in geometries(N, bias):
        for M in (1, 5, 61):  # fewer rows than clusters, and several to each
            check(p, *make(M, N, bias))


def test_hard_rows():
    N = 262144
    p = geometries(N, True)[0]
    for change in (lambda x: x * 1e4, lambda x: x * 1e-4, lambda x: x * 0 + 3.0, lambda x: x + 1000):
        x, weight, bias = make(9, N)
        check(p, change(x), weight, bias)
    x, weight, bias = make(9, N)
    x[:, 77] = 1e4
    check(p, x, weight, bias)


def test_nan_and_infinity_stay_in_their_rows():
    x, weight, bias = make(6, 262144)
    x[1, 5], x[3, -1] = math.nan, math.inf
    y = run(geometries(262144, True)[0], x, weight, bias)
    assert y[[1, 3]].isnan().all() and not y[[0, 2, 4, 5]].isnan().any()


@pytest.mark.parametrize("N, x, vectors", [(262144, "bfloat16", "bfloat16"), (131072, "float16", "float32")])
def test_calls_that_take_it(N, x, vectors):
    check_calls(N, x, vectors)
