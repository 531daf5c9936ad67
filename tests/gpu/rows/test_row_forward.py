"""Forward reductions on RowKernel whose stages are free one row early, and the same on ReductionBase: every plan."""
import math

import pytest
import torch

from bench.ops.row_forward_kernels import SoftmaxMean, SoftmaxMeanInOnePass, SoftmaxScaled
from tkq.rows.persistent.launch import spec_of
from tkq.rows.persistent.plan import plan
from tkq.testing import assert_2x

BF16, NAN = torch.bfloat16, math.nan


def rows(M, N, seed=0):
    g = torch.Generator("cuda").manual_seed(seed + N)
    return torch.randn(M, N, device="cuda", generator=g).to(BF16)


def wanted(x):
    return (torch.softmax(x, -1) * x).sum(-1)


@pytest.mark.parametrize("N", (
    7, 1001, 4096, 65536, *(
        pytest.param(N, marks=pytest.mark.slow) for N in (96, 1000, 1024, 16384, 40000, 50001))))
def test_a_number_of_each_row(N):
    for M in (1, 5, 3000 if N < 20000 else 700):
        x = rows(M, N)
        mean, scaled = (torch.full((M,), NAN, device="cuda") for _ in range(2))
        y = torch.full_like(x, NAN)
        SoftmaxMean.launch(x=x, mean=mean)
        SoftmaxScaled.launch(x=x, y=y, mean=scaled)
        truth, peer = wanted(x.double()), wanted(x.float())
        assert_2x(mean, truth, peer, ulps=16, what=f"M {M} N {N}", bias_ulps=8)
        assert torch.allclose(scaled, mean, rtol=1e-5, atol=1e-6)
        full = torch.softmax(x.double(), -1) * x.double()
        assert_2x(y, full, full.to(BF16), ulps=2, what=f"rows, M {M} N {N}")
        if N % 8 == 0:
            one = torch.full((M,), NAN, device="cuda")
            SoftmaxMeanInOnePass.launch(x, one)
            assert_2x(one, truth, peer, ulps=16, what=f"ReductionBase, M {M} N {N}", bias_ulps=8)


@pytest.mark.parametrize("N", (1024, 4096, 16384, 65536))
def test_rings_that_are_barely_deep_enough(N):
    """The same bits whatever the ring's depth: a stage that is free too early would be overwritten while it is read."""
    x = rows(2000 if N < 65536 else 300, N)
    found = []
    for stages in (3, 4):
        p = plan(spec_of(SoftmaxMean, dict(x=x, mean=torch.empty(len(x), device="cuda"))).shape, stages=stages)
        for _ in range(3):
            mean = torch.full((len(x),), NAN, device="cuda")
            SoftmaxMean.launch(plan=p, x=x, mean=mean)
            found.append((p, mean))
    for p, mean in found:
        assert_2x(mean, wanted(x.double()), wanted(x.float()), ulps=16, what=str(p), bias_ulps=8)
    assert all(torch.equal(found[0][1], mean) for p, mean in found if p == found[0][0])
