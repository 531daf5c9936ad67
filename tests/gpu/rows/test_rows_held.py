"""RowKernel by one block for each tile, whose threads hold a row: every kind of kernel without column sums, by plans
that are not the chosen ones as well: several rows to a warp, several warps, clusters, rows that end within a chunk."""
import math

import pytest
import torch

from bench.ops.row_forward_kernels import SoftmaxMean, SoftmaxScaled
from tests.helpers.rows import row_kernels as kernels
from tkq.rows.persistent import launch
from tkq.rows.persistent.plan import plan
from tkq.testing import assert_2x

BF16, FP32, NAN = torch.bfloat16, torch.float32, math.nan
# columns, blocks of a cluster, warps, elements of a thread
SIZES = [(1, 1, 4, 32), (7, 1, 4, 32), (96, 1, 8, 32), (1000, 1, 4, 64), (1001, 1, 8, 32), (1024, 1, 4, 32),
         (4096, 1, 4, 32), (4096, 1, 16, 64), (4096, 2, 8, 32), (16384, 1, 16, 64), (40000, 4, 8, 64),
         (50001, 4, 16, 64), (65536, 16, 4, 64)]
ROWS = (1, 5, 700)


def run(cls, size, past_l1=True, **arguments):
    _, cluster, warps, per_thread = size
    spec = launch.spec_of(cls, arguments)
    p = plan(spec.shape, held=True, cluster=cluster, warps=warps, per_thread=per_thread, past_l1=past_l1)
    assert p.held and p.cluster == cluster
    cls.launch(plan=p, **arguments)


def empty(*shape, dtype=FP32):
    return torch.full(shape, NAN, device="cuda", dtype=dtype)


def randn(M, N, dtype=BF16, seed=0):
    g = torch.Generator("cuda").manual_seed(seed + N)
    return torch.randn(M, N, device="cuda", generator=g).to(dtype)


@pytest.mark.parametrize("size", SIZES, ids=str)
@pytest.mark.sampled(when=lambda size: size in (SIZES[2], *SIZES[8::2]))  # of the others some in three exchanges
def test_two_exchanges_and_a_number(size):
    for M in ROWS:
        x = randn(M, size[0])
        means = [empty(M) for _ in range(3)]
        run(SoftmaxMean, size, x=x, mean=means[0])
        if size in (SIZES[4], SIZES[8]):
            run(SoftmaxMean, size, past_l1=False, x=x, mean=means[1])
            assert torch.equal(means[0], means[1])
        y = empty(*x.shape, dtype=BF16)
        run(SoftmaxScaled, size, x=x, y=y, mean=means[2])
        truth, peer = ((torch.softmax(x, -1) * x).sum(-1) for x in (x.double(), x.float()))
        assert_2x(means[0], truth, peer, ulps=16, what=f"M {M}", bias_ulps=8)
        assert torch.allclose(means[2], means[0], rtol=1e-5, atol=1e-6)
        full = torch.softmax(x.double(), -1) * x.double()
        assert_2x(y, full, full.to(BF16), ulps=2, what=f"rows, M {M}")


@pytest.mark.parametrize("size", SIZES, ids=str)
@pytest.mark.sampled(when=lambda size: size in SIZES[::2])
def test_a_pair_in_one_exchange_and_rows_that_are_stored(size):
    for M in ROWS:
        x = randn(M, size[0])
        y, lse, alone = empty(*x.shape), empty(M), empty(M)
        run(kernels.Softmax, size, x=x, y=y, lse=lse, scale=0.7)
        assert_2x(y, *(torch.softmax(x.to(t) * 0.7, -1) for t in (torch.float64, FP32)), ulps=16, bias_ulps=8)
        assert_2x(lse, *(torch.logsumexp(x.to(t) * 0.7, -1) for t in (torch.float64, FP32)), ulps=4, bias_ulps=2)
        if size in SIZES[1::2]:  # the same exchange, without the rows
            run(kernels.LogSumExp, size, x=x, lse=alone)
            assert_2x(alone, *(torch.logsumexp(x.to(t), -1) for t in (torch.float64, FP32)), ulps=4, bias_ulps=2)


@pytest.mark.parametrize("size", SIZES[1:], ids=str)
@pytest.mark.sampled(when=lambda size: size in SIZES[1::4] or size[1] > 2)
def test_three_exchanges_and_a_vector(size):
    for M in ROWS:
        x = randn(M, size[0])
        y = empty(*x.shape, dtype=BF16)
        run(kernels.ThreeExchanges, size, x=x, y=y)

        def formula(x):
            d = x.amax(-1, keepdim=True) - x
            return -d * (d.square().sum(-1, keepdim=True) / d.sum(-1, keepdim=True))

        assert_2x(y, formula(x.double()), formula(x.float()).to(BF16), ulps=1, what=f"M {M}")
        wide, w = x.float() + 1000.0, torch.randn(size[0], device="cuda")
        out, mean, rstd = empty(*x.shape), empty(M), empty(M)
        run(kernels.ExactLayerNorm, size, x=wide, y=out, weight=w, mean=mean, rstd=rstd, eps=1e-5)
        about = mean.double()[:, None]
        spread = torch.rsqrt((wide.double() - about).square().mean(-1) + 1e-5)
        truth = (wide.double() - about) * spread[:, None] * w.double()
        assert (mean.double() - wide.double().mean(-1)).abs().max() < 4e-4
        assert torch.allclose(rstd.double(), spread, rtol=2e-6)
        assert (out - truth).abs().max() < 1e-5 * truth.abs().max()


@pytest.mark.parametrize("N", [96, 1000, 4096])
def test_several_loads_and_types(N):
    x, residual, w = randn(77, N), randn(77, N, FP32, seed=1), torch.randn(N, device="cuda").half()
    y, total, rstd = torch.empty_like(x).fill_(NAN), torch.empty_like(residual).fill_(NAN), empty(77)
    run(kernels.Residual, (N, 1, 8, 32), x=x, residual=residual, y=y, total=total, weight=w, rstd=rstd, eps=1e-6,
        offset=1.0)
    both = x.double() + residual.double()
    truth = both * torch.rsqrt(both.square().mean(-1, keepdim=True) + 1e-6) * (w.double() + 1)
    assert torch.equal(total, x.float() + residual)
    assert_2x(y, truth, truth.to(BF16), ulps=1)


@pytest.mark.parametrize("N", [96, 1001, 4096, 32768, *(
    pytest.param(N, marks=pytest.mark.slow) for N in (1000, 1024, 16384))])
def test_the_default_is_held_and_leaves_out_what_is_around_a_row(N):
    """Rows of a wider matrix, whose neighbours are NaN: a column past the end, or a row past the last, shows."""
    wide = torch.full((64, N + 64), NAN, device="cuda", dtype=BF16)
    x = wide[3:60, 8:8 + N]
    x.copy_(randn(57, N))
    for cls, names, truth in ((SoftmaxMean, ("mean",), (torch.softmax(x.double(), -1) * x.double()).sum(-1)),
                              (kernels.LogSumExp, ("lse",), torch.logsumexp(x.double(), -1))):
        guarded = empty(59)
        out = guarded[1:58]
        assert plan(launch.spec_of(cls, dict(x=x, **{names[0]: out})).shape).held
        cls.launch(x=x, **{names[0]: out})
        assert (out - truth).abs().max() < 1e-5 * truth.abs().max()
        assert torch.isnan(guarded[0]) and torch.isnan(guarded[58])


@pytest.mark.parametrize("N", [96, 4096])
def test_infinities(N):
    x = randn(6, N, FP32)
    x[1] = -math.inf
    x[1, N // 3] = 2.0
    x[2, 5], x[3, N - 1] = NAN, math.inf
    x[4, :-1] = -math.inf
    x[5] = -math.inf
    lse = empty(6)
    kernels.LogSumExp.launch(x=x, lse=lse)
    assert torch.isnan(lse[2]) and not torch.isfinite(lse[3]) and lse[5] == -math.inf
    assert torch.allclose(lse[[0, 1, 4]].double(), torch.logsumexp(x[[0, 1, 4]].double(), -1), rtol=1e-6)


def test_the_same_bits_every_time_and_behind_a_kernel_that_writes_what_is_read():
    """Launched under the end of the kernel before, whose result must be there."""
    x, out = torch.empty(20000, 1024, device="cuda", dtype=BF16), []
    source = randn(20000, 1024)
    for i in range(8):
        x.copy_(source) if i % 2 else x.zero_()
        mean = empty(20000)
        SoftmaxMean.launch(x=x, mean=mean)
        out.append(mean)
    assert all(not m.any() for m in out[::2])
    assert all(torch.equal(out[1], m) for m in out[3::2]) and out[1].any()
