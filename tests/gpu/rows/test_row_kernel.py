"""RowKernel on the GPU: other monoids, several exchanges a row, streams of every kind, results, columns alone."""
import math

import pytest
import torch

from tests.helpers.rows import row_kernels as kernels
from tkq.runtime.device import arch, clusters
from tkq.testing import assert_2x

BF16, FP32 = torch.bfloat16, torch.float32
NAN = float("nan")
SIZES = [7, 96, 1000, 4096, 40000]  # read directly; several rows to a warp; a warp; a group of warps; a cluster

ODD = [1001, 50001]  # read directly by several warps, and by a cluster


def rows(M):
    return torch.full((M,), NAN, device="cuda")


def randn(M, N, dtype=BF16, scale=1.0, seed=0):
    g = torch.Generator("cuda").manual_seed(seed + N)
    return (torch.randn(M, N, device="cuda", generator=g) * scale).to(dtype)


def softmax(x, scale=1.0, dtype=FP32):
    y, lse = torch.full(x.shape, NAN, device="cuda", dtype=dtype), rows(len(x))
    kernels.Softmax.launch(x=x, y=y, lse=lse, scale=scale)
    return y, lse


@pytest.mark.parametrize("N", SIZES + ODD)
def test_a_pair_in_one_exchange(N):
    for M in (1, 5, 700):
        x = randn(M, N, scale=4.0)
        y, lse = softmax(x, 0.7)
        truth, peer = (torch.softmax(x.to(t) * 0.7, -1) for t in (torch.float64, FP32))
        assert_2x(y, truth, peer, ulps=16, what=f"M {M}", bias_ulps=8)
        assert_2x(lse, torch.logsumexp(x.double() * 0.7, -1), torch.logsumexp(x.float() * 0.7, -1), ulps=4, bias_ulps=2)


@pytest.mark.parametrize("N", [96, 4096])
def test_infinities_in_the_pair(N):
    x = randn(6, N, FP32)
    x[1] = -math.inf
    x[1, N // 3] = 2.0
    x[2, 5], x[3, N - 1] = NAN, math.inf
    x[4, :-1] = -math.inf
    lse = rows(6)
    kernels.LogSumExp.launch(x=x, lse=lse)
    truth = torch.logsumexp(x.double(), -1)
    assert torch.isnan(lse[2]) and not torch.isfinite(lse[3])
    assert torch.allclose(lse[[0, 1, 4, 5]].double(), truth[[0, 1, 4, 5]], rtol=1e-6)
    x[5] = -math.inf
    kernels.LogSumExp.launch(x=x, lse=lse)
    assert lse[5] == -math.inf


@pytest.mark.parametrize("N", SIZES + ODD)
def test_two_exchanges(N):
    """The variance about the mean, of rows whose mean is far away: one pass of sums would lose every digit."""
    for M in (1, 6, 700):
        x = randn(M, N, FP32) + 1000.0
        w = torch.randn(N, device="cuda")
        y, mean, rstd = torch.full_like(x, NAN), rows(M), rows(M)
        kernels.ExactLayerNorm.launch(x=x, y=y, weight=w, mean=mean, rstd=rstd, eps=1e-5)
        wide = x.double()
        about = mean.double()[:, None]
        spread = torch.rsqrt((wide - about).square().mean(-1) + 1e-5)
        assert (mean.double() - wide.mean(-1)).abs().max() < 4e-4
        assert torch.allclose(rstd.double(), spread, rtol=2e-6)
        truth = (wide - about) * spread[:, None] * w.double()
        assert (y - truth).abs().max() < 1e-5 * truth.abs().max()


@pytest.mark.parametrize("N", SIZES + ODD)
def test_three_exchanges(N):
    for M in (1, 2, 3, 900):
        x = randn(M, N)
        y = torch.full_like(x, NAN)
        kernels.ThreeExchanges.launch(x=x, y=y)

        def formula(x):
            d = x.amax(-1, keepdim=True) - x
            return -d * (d.square().sum(-1, keepdim=True) / d.sum(-1, keepdim=True))

        assert_2x(y, formula(x.double()), formula(x.float()).to(BF16), ulps=1, what=f"M {M}")


@pytest.mark.parametrize("N", [96, 1000, 40000, *ODD])
def test_the_same_bits_every_time(N):
    """A pair in one exchange, two exchanges, three of several monoids."""
    x = randn(700, N)
    w, wide = torch.randn(N, device="cuda"), x.float()

    def run():
        y, total, third = torch.full_like(wide, NAN), torch.full_like(wide, NAN), torch.full_like(x, NAN)
        lse, mean, rstd = rows(700), rows(700), rows(700)
        kernels.Softmax.launch(x=x, y=y, lse=lse, scale=0.7)
        kernels.ExactLayerNorm.launch(x=wide, y=total, weight=w, mean=mean, rstd=rstd, eps=1e-5)
        kernels.ThreeExchanges.launch(x=x, y=third)
        return y, lse, total, mean, rstd, third

    first = run()
    assert all(torch.isfinite(t).all() for t in first)
    for _ in range(10):
        assert all(torch.equal(a, b) for a, b in zip(run(), first))


@pytest.mark.parametrize("N", SIZES)
def test_five_sums_and_columns_that_need_them(N):
    for M in (1, 600):
        x = randn(M, N)
        y, total, moments = torch.full_like(x, NAN), torch.full((N,), NAN, device="cuda"), [rows(M) for _ in range(5)]
        kernels.Moments.launch(x=x, y=y, total=total, **{f"m{i}": m for i, m in enumerate(moments)})
        wide, narrow = x.double(), x.float()
        for i, m in enumerate(moments):
            assert_2x(m, wide.pow(i).mean(-1), narrow.pow(i).mean(-1), ulps=4, what=f"moment {i}", bias_ulps=1)
        centred = wide - wide.mean(-1, keepdim=True)
        assert_2x(y, centred, (narrow - narrow.mean(-1, keepdim=True)).to(BF16), ulps=1)
        weighted = [(t - t.mean(-1, keepdim=True)) * t.square().mean(-1, keepdim=True) for t in (wide, narrow)]
        assert_2x(total, weighted[0].sum(0), weighted[1].sum(0), ulps=8)


@pytest.mark.parametrize("N", SIZES)
@pytest.mark.parametrize("more", [False, True])
@pytest.mark.sampled(each_value=True)
def test_columns_alone(N, more):
    for M in (1, 3000):
        dy, other = randn(M, N), randn(M, N, FP32, seed=1) if more else None
        dbias = torch.full((N,), NAN, device="cuda")
        kernels.BiasGradient.launch(dy=dy, more=other, dbias=dbias)
        truth, peer = ((dy.to(t) + (other.to(t) if more else 0)).sum(0) for t in (torch.float64, FP32))
        assert_2x(dbias, truth, peer, ulps=4)


@pytest.mark.parametrize("N", [96, 4096, 40000])
def test_streams_of_several_types(N):
    x, residual, w = randn(77, N), randn(77, N, FP32, seed=1), torch.randn(N, device="cuda").half()
    y, total, rstd = torch.full_like(x, NAN), torch.full_like(residual, NAN), rows(77)
    kernels.Residual.launch(x=x, residual=residual, y=y, total=total, weight=w, rstd=rstd, eps=1e-6, offset=1.0)
    both = x.double() + residual.double()
    truth = both * torch.rsqrt(both.square().mean(-1, keepdim=True) + 1e-6) * (w.double() + 1)
    assert torch.equal(total, x.float() + residual)
    assert_2x(y, truth, truth.to(BF16), ulps=1)


def test_rows_with_a_stride_of_their_own():
    wide = [torch.full((50, 1040), NAN, device="cuda", dtype=t) for t in (BF16, FP32)]
    x, y = wide[0][:, 8:1032], wide[1][:, 4:1028]
    x.copy_(randn(50, 1024))
    lse = rows(50)
    kernels.Softmax.launch(x=x, y=y, lse=lse, scale=1.0)
    assert torch.allclose(y, torch.softmax(x.float(), -1), rtol=1e-5, atol=1e-8)
    assert torch.isnan(wide[1][:, :4]).all() and torch.isnan(wide[1][:, 1028:]).all()


def test_no_rows():
    dbias = torch.full((64,), NAN, device="cuda")
    kernels.BiasGradient.launch(dy=randn(0, 64), dbias=dbias)
    assert not dbias.any()
    y, lse = softmax(randn(0, 64))
    assert y.shape == (0, 64) and lse.shape == (0,)


def test_how_many_clusters_fit():
    num_sms = arch.num_sms("cuda")
    assert clusters.resident(torch.device("cuda"), 1, 384) == num_sms
    fits = [clusters.resident(torch.device("cuda"), c, 384) * c for c in (2, 4, 8, 16)]
    assert all(num_sms // 2 < blocks <= num_sms for blocks in fits), fits
