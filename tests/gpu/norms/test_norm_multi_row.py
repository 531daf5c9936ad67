"""LayerNormMultiRow, whose rows wait for their cluster together: against float64, hard rows, the calls that take it."""
import math

import pytest
import torch

import tkq
from tests.helpers.norms.long_layernorm import check_calls
from tkq import runtime
from tkq.norms.config import Config, waits_together
from tkq.norms.launch import recipe
from tkq.norms.plan import plan
from tkq.norms.spec import NormSpec
from tkq.testing import assert_2x

EPS, N = 1e-5, 65536
SPEC = NormSpec("layernorm", N, "bf16", "fp32", "fp32", 8)
# slots of a row: 64, 32, 128, 16 (more and fewer than lanes)
CONFIGS = [plan(SPEC), Config(128, 128, 8, "shared", False, 2), Config(256, 256, 16, "shared", False, 3),
           Config(128, 128, 4, "shared", False, 2)]


def make(M, N=N, dtype=torch.bfloat16, seed=0):
    g = torch.Generator("cuda").manual_seed(seed)
    return ((torch.randn(M, N, device="cuda", generator=g)).to(dtype),
            *(torch.randn(N, device="cuda", generator=g) for _ in range(2)))


def check(y, x, weight, bias, what=""):
    def norm(t):
        return torch.nn.functional.layer_norm(t, t.shape[-1:], weight.to(t.dtype), bias.to(t.dtype), EPS)

    assert_2x(y, norm(x.double()), norm(x.float()).to(x.dtype), ulps=1, what=what)


def test_each_way():
    for config in CONFIGS:
        spec = SPEC if config.tile(SPEC).per_thread <= 64 else NormSpec("layernorm", N // 2, "bf16", "fp32", "fp32", 8)
        assert waits_together(spec, config)
        run = runtime.function(recipe(spec, config))
        for M in (1, 2, 5, 61, 500):  # fewer rows than a thread has, and a rest
            x, weight, bias = make(M, spec.N)
            outs = [torch.full_like(x, math.nan) for _ in range(2)]
            for out in outs:
                run(x, weight, bias, out, EPS)
            check(outs[0], x, weight, bias, f"{config} M {M}")
            assert torch.equal(*outs), "other bits in another run"


def test_hard_rows():
    x, weight, bias = make(9)
    outlier = x.clone()
    outlier[torch.arange(9), torch.arange(9) * 7001] = 1e4
    for t in (x * 1e4, x * 1e-4, x * 0 + 3.0, x + 1000, outlier):
        check(tkq.layernorm(t, weight, bias, eps=EPS), t, weight, bias)


def test_nan_stays_in_its_row():
    x, weight, bias = make(9)
    x[2, 5], x[7, N - 1] = math.nan, math.inf
    y, clean = tkq.layernorm(x, weight, bias, eps=EPS), [0, 1, 3, 4, 5, 6, 8]
    assert torch.isnan(y[[2, 7]]).all()
    check(y[clean], x[clean], weight, bias)


def test_calls_that_take_it():
    check_calls(65536, "bfloat16", "float32")


def test_with_a_residual_and_the_sum():
    """float32 rows, whose sum with the residual is normalised: options of the kernel, by a config of its own."""
    x, weight, bias = make(7, 16384, torch.float32)
    spec = NormSpec("layernorm", 16384, "fp32", "fp32", "fp32", 4, residual="fp32", total="fp32", stats=True)
    config = Config(128, 128, 8, "shared", False, 2)
    assert waits_together(spec, config)
    residual = make(7, 16384, torch.float32, seed=2)[0]
    out, total = (torch.full_like(x, math.nan) for _ in range(2))
    rstd, mean = (torch.full((7,), math.nan, device="cuda") for _ in range(2))
    runtime.function(recipe(spec, config))(x, weight, bias, out, residual, total, rstd, mean, None, EPS, None)
    h = x + residual
    assert torch.equal(total, h)
    check(out, h, weight, bias)
    wide = h.double()
    assert torch.allclose(mean.double(), wide.mean(-1), atol=1e-7)
    assert torch.allclose(rstd.double(), torch.rsqrt(wide.var(-1, correction=0) + EPS), rtol=1e-6)


@pytest.mark.parametrize("N", [65528, 60000])
def test_rows_that_leave_threads_without_elements_wait_one_by_one(N):
    x, weight, bias = make(11, N)
    check(tkq.layernorm(x, weight, bias, eps=EPS), x, weight, bias)


def test_recorded():
    """With the mean and rstd that the backward needs."""
    x, *vectors = make(7, 32768)
    spec = NormSpec("layernorm", 32768, "bf16", "fp32", "fp32", 8, stats=True)
    assert waits_together(spec, plan(spec))
    dy = torch.randn(x.shape, device="cuda", generator=torch.Generator("cuda").manual_seed(3)).to(x.dtype)

    def gradients(norm, dtype):
        leaves = [t.to(dtype or t.dtype, copy=True).requires_grad_() for t in (x, *vectors)]
        y = norm(leaves[0], *leaves[1:])
        return y, *torch.autograd.grad(y, leaves, dy.to(y.dtype))

    def of_torch(x, weight, bias):
        return torch.nn.functional.layer_norm(x, x.shape[-1:], weight, bias, EPS)

    found = gradients(lambda x, weight, bias: tkq.layernorm(x, weight, bias, eps=EPS), None)
    for name, ours, truth, same in zip(("y", "dx", "dweight", "dbias"), found, gradients(of_torch, torch.float64),
                                       gradients(of_torch, torch.float32), strict=True):
        assert_2x(ours, truth, same.to(ours.dtype), ulps=1, what=name)
