"""KeptLayerNormQuantised: its variants against float64, more rows than clusters, types, and the rows beside one that is
not a number. Hard rows: test_norm_quant.py, whose long ones with float32 weight and bias take it."""
import math

import pytest
import torch

import tkq
from tests.gpu.test_norm_quant import E4M3, check_quantised, check_result
from tests.norm_options import EPS, make, poison  # noqa: F401  a fixture
from tkq import runtime
from tkq.norms import launch, quant_kept_plan
from tkq.norms.spec import NormSpec
from tkq.runtime import clusters

HEAVY = dict(weight="fp32", bias="fp32")


def spec_of(N, granularity):
    return NormSpec("layernorm", N, "bf16", "fp32", "fp32", 8, out="e4m3", scale=granularity)


def run(p, x, extra, granularity):
    spec = spec_of(x.shape[1], granularity)
    asked = launch.Call("layernorm", EPS, out=E4M3, scale=granularity)
    results = launch.allocate(asked, x)
    results[0].view(torch.uint8).fill_(0x7F)  # NaN
    results[4].fill_(math.nan)
    units = p.resident * clusters.resident(x.device, p.cluster, p.block)
    runtime.function(quant_kept_plan.recipe(spec, p))(
        *launch._arguments(asked, (x, None), extra["weight"], extra["bias"], results), units)
    return results[0], results[4]


@pytest.mark.slow
@pytest.mark.parametrize("granularity", ["row", "block"])
@pytest.mark.parametrize("N", [262144, 131072, 100008, 65536])
def test_each_geometry(N, granularity):
    for p in quant_kept_plan.variants(spec_of(N, granularity)):
        for M in (1, 5, 61):  # fewer rows than clusters, and several to each
            x, extra = make((M, N), "bf16", **HEAVY)
            found = run(p, x, extra, granularity)
            check_result("layernorm", x, extra, granularity, found, f"{p} M {M}")
            again = run(p, x, extra, granularity)
            assert torch.equal(found[0].view(torch.uint8), again[0].view(torch.uint8)), "other bits in another run"
            assert torch.equal(found[1], again[1])


@pytest.mark.parametrize("most, N, granularity, x, vectors", [
    (53, 262144, "block", "bf16", HEAVY), (19, 131072, "row", "bf16", dict(weight="bf16", bias="bf16")),
    (19, 100008, "block", "fp16", dict(weight="fp32"))], ids=str)
def test_many_rows_and_other_types(most, N, granularity, x, vectors):
    """One row, and more (53 are more than the stages of all clusters); rows apart; NaN, infinity and a constant row
    beside others, which have the bits that they had."""
    for M in (1, most):
        rows, extra = make((M, N), x, **vectors)
        q, scale = check_quantised("layernorm", rows, extra, granularity, f"M {M}")
    apart = torch.full((M, N + 64), math.nan, device="cuda", dtype=rows.dtype)[:, :N].copy_(rows)
    found = tkq.layernorm_quant(apart, **extra, eps=EPS, granularity=granularity)
    assert torch.equal(found[0].view(torch.uint8), q.view(torch.uint8)) and torch.equal(found[1], scale)
    rows[3], rows[9, 150], rows[16, N - 1] = 3.0, math.nan, math.inf
    changed, changed_scale = tkq.layernorm_quant(rows, **extra, eps=EPS, granularity=granularity)
    for row in (9, 16):
        assert changed_scale[row].isnan().all() and changed[row].float().isnan().all()
    others = [row for row in range(M) if row not in (3, 9, 16)]
    assert torch.equal(changed[others].view(torch.uint8), q[others].view(torch.uint8))
    assert torch.equal(changed_scale[others], scale[others])
    check_quantised("layernorm", rows[3:4], extra, granularity, "a constant row")
