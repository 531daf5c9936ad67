"""Long rows, quantised by persistent kernels (`tkq.norms.forward.fp8_persistent`): variants against float64, more rows
than clusters, types, a residual, and the rows beside one that is not a number. Hard rows: test_norm_quant.py, whose
long ones with float32 weight and bias take it."""
import math

import pytest
import torch

import tkq
from tests.gpu.norms.test_norm_quant import E4M3, check_quantised, check_result
from tests.helpers.norms.options import EPS, make, poison  # noqa: F401  a fixture
from tkq import runtime
from tkq.norms import fp8_persistent_plan, launch
from tkq.norms.spec import NormSpec
from tkq.runtime.device import clusters

HEAVY = dict(weight="fp32", bias="fp32")


def spec_of(kind, N, granularity):
    return NormSpec(kind, N, "bf16", "fp32", "fp32", 8, out="e4m3", scale=granularity)


def run(kind, p, x, extra, granularity):
    spec = spec_of(kind, x.shape[1], granularity)
    asked = launch.Call(kind, EPS, out=E4M3, scale=granularity)
    results = launch.allocate(asked, x)
    results[0].view(torch.uint8).fill_(0x7F)  # NaN
    results[4].fill_(math.nan)
    units = p.min_blocks_per_sm * clusters.resident(x.device, p.cluster, p.block)
    runtime.function(fp8_persistent_plan.recipe(spec, p))(
        *launch._arguments(asked, (x, None), extra["weight"], extra["bias"], results), units)
    return results[0], results[4]


@pytest.mark.slow
@pytest.mark.parametrize("granularity", ["row", "1x128"])
@pytest.mark.parametrize("kind, N", [("layernorm", 262144), ("layernorm", 131072), ("layernorm", 100008),
                                     ("layernorm", 65536), ("layernorm", 16384), ("layernorm", 12296),
                                     ("rmsnorm", 100008)])
def test_each_geometry(kind, N, granularity):
    for p in fp8_persistent_plan.variants(spec_of(kind, N, granularity)):
        for M in (1, 5, 61):  # fewer rows than clusters, and several to each
            x, extra = make((M, N), "bf16", **HEAVY)
            found = run(kind, p, x, extra, granularity)
            check_result(kind, x, extra, granularity, found, f"{p} M {M}")
            again = run(kind, p, x, extra, granularity)
            assert torch.equal(found[0].view(torch.uint8), again[0].view(torch.uint8)), "other bits in another run"
            assert torch.equal(found[1], again[1])


@pytest.mark.parametrize("kind, most, N, granularity, x, vectors", [
    ("layernorm", 53, 262144, "1x128", "bf16", HEAVY),
    ("layernorm", 19, 131072, "row", "bf16", dict(weight="bf16", bias="bf16")),
    ("rmsnorm", 19, 262144, "row", "bf16", HEAVY),
    pytest.param("layernorm", 19, 100008, "1x128", "fp16", dict(weight="fp32"), marks=pytest.mark.slow),
    pytest.param("rmsnorm", 19, 100008, "1x128", "fp16", dict(weight="fp32"), marks=pytest.mark.slow),
    pytest.param("layernorm", 811, 16384, "row", "bf16", HEAVY, marks=pytest.mark.slow),
    ("rmsnorm", 411, 20008, "1x128", "fp16", dict(weight="fp32")),
    pytest.param("layernorm", 53, 131072, "row", "bf16", dict(residual="bf16", **HEAVY), marks=pytest.mark.slow),
    ("layernorm", 29, 262144, "1x128", "bf16", dict(residual="bf16", **HEAVY))], ids=str)
def test_many_rows_and_other_types(kind, most, N, granularity, x, vectors):
    """One row, and more (811, 411 or 53, or 29 with two tensors, are more than the stages of all clusters); rows apart;
    NaN, infinity and a constant row beside others, which have the bits that they had."""
    quantised = getattr(tkq, f"{kind}_quant")
    assert fp8_persistent_plan.planned(NormSpec(kind, N, x, vectors["weight"], vectors.get("bias"), 8,
                                            vectors.get("residual"), out="e4m3", scale=granularity))
    for M in (1, most):
        rows, extra = make((M, N), x, **vectors)
        q, scale = check_quantised(kind, rows, extra, granularity, f"M {M}")
    apart = dict(extra)
    for name, t in dict(extra, x=rows).items():
        if t.dim() == 2:
            apart[name] = torch.full((M, N + 64), math.nan, device="cuda", dtype=t.dtype)[:, :N].copy_(t)
    found = quantised(**apart, eps=EPS, granularity=granularity)
    assert torch.equal(found[0].view(torch.uint8), q.view(torch.uint8)) and torch.equal(found[1], scale)
    rows[3], rows[9, 150], rows[16, N - 1] = 3.0, math.nan, math.inf
    changed, changed_scale = quantised(rows, **extra, eps=EPS, granularity=granularity)
    for row in (9, 16) if kind == "layernorm" or granularity == "row" else (9,):
        assert changed_scale[row].isnan().all() and changed[row].float().isnan().all()
    others = [row for row in range(M) if row not in (3, 9, 16)]
    assert torch.equal(changed[others].view(torch.uint8), q[others].view(torch.uint8))
    assert torch.equal(changed_scale[others], scale[others])
    alone = {name: t[3:4] if t.dim() == 2 else t for name, t in extra.items()}
    check_quantised(kind, rows[3:4], alone, granularity, "a constant row")


def test_what_is_added_to_the_weight():
    """A weight_offset, as a weight that is as much more: they have the same bits."""
    x, extra = make((19, 100008), "bf16", weight="fp32")
    found = tkq.rmsnorm_quant(x, **extra, eps=EPS, weight_offset=0.375, granularity="1x128")
    wanted = tkq.rmsnorm_quant(x, extra["weight"] + 0.375, eps=EPS, granularity="1x128")
    assert torch.equal(found[0].view(torch.uint8), wanted[0].view(torch.uint8)) and torch.equal(found[1], wanted[1])
