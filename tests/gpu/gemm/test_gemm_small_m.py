"""The GEMM for few rows on a GPU: exact where sums are, the same bits every time."""
import itertools
import math

import pytest
import torch

import tkq
from tests.gpu.gemm.test_gemm import operands, whole
from tests.gpu.gemm.test_gemm_epilogue import between_poison, exact, matrix, vector
from tkq.gemm.dense import small_m_plan
from tkq.gemm.dense.small_m_config import SmallMConfig
from tkq.gemm.dense.spec import GemmSpec
from tkq.testing import assert_2x

BF16 = torch.bfloat16
ROWS = (1, 2, 7, 8, 15, 16, 17, 31, 32, 33, 63, 64, 65, 100, 127, 128)


@pytest.mark.parametrize("b_major", "kn")
def test_every_number_of_rows(b_major):
    rows = ROWS if b_major == "k" else (1, 33, 128)
    for m, (n, k) in itertools.product(rows, ((64, 64), (200, 1000), (1001, 520), (1, 8), (4096, 2056))):
        a, b = operands((m, n, k), "k", b_major)
        assert torch.equal(between_poison(a, b, first=3), exact(a, b)), (m, n, k)


CONFIGS = [SmallMConfig(16, 64, 1), SmallMConfig(16, 64, 8), SmallMConfig(64, 128, 2), SmallMConfig(64, 128, 8),
           SmallMConfig(128, 64, 4)]


@pytest.mark.parametrize("config", CONFIGS, ids=lambda x: x.name)
def test_every_split(config):
    config = small_m_plan.fit_to_spec(config, GemmSpec())
    for m, n, k in ((config.m, 136, 512), (config.m - 3, 500, 4096), (1, 64, 520)):
        a, b = operands((m, n, k), "k", "k")
        assert torch.equal(between_poison(a, b, config), exact(a, b)), (m, n, k)


@pytest.mark.parametrize("out_dtype", (
    BF16, *(pytest.param(dtype, marks=pytest.mark.slow) for dtype in (torch.float16, torch.float32))))
def test_epilogues(out_dtype):
    for m, n in ((5, 1000), (33, 1001), (128, 264)):
        a, b = operands((m, n, 1032), "k", "k")
        extra = dict(bias=vector(n), c=matrix(m, n, dtype=out_dtype), alpha=0.5, beta=2.0, activation="relu")
        assert torch.equal(between_poison(a, b, out_dtype=out_dtype, **extra), exact(a, b, out_dtype, **extra))
    a, b = a / 8, b / 4
    for activation in ("silu", "gelu", "gelu_tanh"):
        got = between_poison(a, b, out_dtype=out_dtype, activation=activation)
        truth = exact(a, b, torch.float64, activation=activation)
        assert_2x(got, truth, truth.to(out_dtype), 2, activation)


@pytest.mark.parametrize("b_major, activation", (("k", "swiglu"), ("k", "geglu_interleaved"),
                                                 pytest.param("n", "swiglu", marks=pytest.mark.slow)))
def test_gated(b_major, activation):
    for m, n, k in ((1, 1040, 2056), (16, 272, 72), (33, 1040, 520), (128, 8192, 520)):
        a, b = operands((m, n, k), "k", b_major)
        a, b, bias = a / 8, b / 4, vector(n) / 4
        got = between_poison(a, b, activation=activation, bias=bias)
        truth = exact(a, b, torch.float64, activation=activation, bias=bias)
        assert_2x(got, truth, truth.to(BF16), 2, f"{activation} {m, n, k}")


@pytest.mark.parametrize("m", (1, 16, 64, 128))
def test_error_and_repeats(m):
    g = torch.Generator("cuda").manual_seed(m)
    a, b = (torch.randn(s, device="cuda", generator=g).to(BF16) for s in ((m, 8192), (4096, 8192)))
    y = tkq.gemm(a, b.t())
    assert_2x(y, a.double() @ b.t().double(), a @ b.t(), 1, f"M {m}")
    assert all(torch.equal(y, tkq.gemm(a, b.t())) for _ in range(20))
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        z = tkq.gemm(a, b.t())
    z.fill_(math.nan)
    graph.replay()
    assert torch.equal(z, y)


def test_not_finite():
    a, b = operands((16, 264, 520), "k", "k")
    a, b = a.clone(), b.clone()
    a[3, 5], b[7, 100], b[500, 200] = math.inf, math.nan, -math.inf
    got, want = tkq.gemm(a, b, out_dtype=torch.float32), exact(a, b, torch.float32)
    assert torch.equal(torch.isnan(got), torch.isnan(want)) and torch.equal(got.nan_to_num(), want.nan_to_num())


def test_odd_operands_take_another_way():
    a, b = whole(16, 520, BF16, "r", first=3, pad=2), whole(520, 264, BF16, "c", seed=1)
    assert torch.equal(between_poison(a, b), exact(a, b))
    a = whole(16, 520, BF16, "c")
    assert torch.equal(between_poison(a, b), exact(a, b))
