# ruff: noqa: F401, F811
"""Norms of a sum with a residual stored in 16 bits: what their backward pass reads is the rounded sum, and so are the
mean and rstd that it is given. Rows that vary by less than they are rounded show it."""
import math

import pytest
import torch

import tkq
from tests.gpu.norms.test_norm_option_gradients import backward, check_gradients, leaves_of
from tests.helpers.norms.options import EPS, HARD, KINDS, harden, make, poison, torch_norm
from tkq import runtime
from tkq.norms import launch
from tkq.norms.config import Config, waits_together
from tkq.norms.launch import Call, recipe
from tkq.norms.spec import NormSpec
from tkq.testing import assert_2x


def check_statistics(found, h, what=""):
    """rstd and mean, of the rows of h."""
    rstd, mean = found
    exact = h.double().flatten(0, -2)
    centre = exact.mean(1, keepdim=True) if mean is not None else 0.0
    truth = ((exact - centre).square().mean(1) + EPS).rsqrt()
    assert ((rstd.double() / truth - 1).abs().max() <= 1e-6), what
    if mean is not None:
        off = (mean.double() - centre[:, 0]).abs()
        assert (off <= 4e-7 * exact.abs().amax(1)).all(), what
        assert (off[(exact == exact[:, :1]).all(1)] == 0).all(), f"{what}: a row of one number has that for its mean"


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("N", [64, 1000, 4098, 4096, 16384, 65536, 131072, 262144])
@pytest.mark.sampled(when=lambda kind, N: N == 1000 or (kind == "rmsnorm") == (N in (4096, 65536, 262144)))
def test_the_statistics(kind, N):
    """Those that a backward pass is to have are of what it reads: of x, or of the sum as it is stored."""
    for how in (None, *HARD):
        x, extra = make((19, N), "bf16", mean=0.0 if how else 2.0, weight="bf16", residual="bf16")
        if how is not None:
            harden(how, x, extra["residual"])
        call = Call(kind, EPS, total=torch.bfloat16, stats=True)
        y, h, rstd, mean, _ = launch.norm(call, x, extra["weight"], None, extra["residual"])
        check_statistics((rstd, mean), h, how)
        assert torch.equal(h, (x.float() + extra["residual"].float()).bfloat16())
        truth, same = (torch_norm(kind, *(t.to(dtype) for t in (x, extra["weight"])), None,
                                  extra["residual"].to(dtype))[0] for dtype in (torch.float64, torch.float32))
        assert_2x(y, truth, same.bfloat16(), ulps=1, what=f"{how}: the result is of the sum itself")
        for _ in range(2):
            plain, _, rstd, mean, _ = launch.norm(Call(kind, EPS, stats=True), x, extra["weight"], None, None)
        check_statistics((rstd, mean), x, how)
        assert torch.equal(plain, getattr(tkq, kind)(x, extra["weight"], eps=EPS))


def test_several_rows_that_wait_for_their_cluster_together():
    """By a config of its own: such rows have no residual where plans choose."""
    config, N = Config(128, 128, 8, "shared", False, 2), 16384
    spec = NormSpec("layernorm", N, "bf16", "bf16", None, 8, residual="bf16", total="bf16", stats=True)
    assert waits_together(spec, config)
    for how in (None, *HARD):
        x, extra = make((7, N), "bf16", weight="bf16", residual="bf16")
        if how is not None:
            harden(how, x, extra["residual"])
        out, total = (torch.full_like(x, math.nan) for _ in range(2))
        rstd, mean = (torch.full((7,), math.nan, device="cuda") for _ in range(2))
        runtime.function(recipe(spec, config))(x, extra["weight"], None, out, extra["residual"], total, rstd, mean,
                                               None, EPS, None)
        check_statistics((rstd, mean), total, how)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("x, N", [("bf16", 64), ("bf16", 1024), ("fp16", 4096), ("bf16", 8192), ("bf16", 16384),
                                  ("bf16", 65536), ("bf16", 262144)])
@pytest.mark.sampled(when=lambda kind, N: N != 4096 and (kind == "rmsnorm") == (N in (64, 1024, 16384, 262144)))
def test_gradients_with_a_sum_in_16_bits(backward, kind, x, N):
    """By each plan, of rows that are rounded by as much as they vary: the gradient at the sum as it is stored."""
    for how in (None, *HARD):
        if (x, how) != ("fp16", "large"):  # that would be infinite
            leaves = leaves_of((37, N), x, how=how, weight=x, residual=x)
            for with_sum in (True, False):
                for t in leaves.values():
                    t.grad = None
                check_gradients(kind, leaves, with_sum=with_sum, what=how)


@pytest.mark.parametrize("heads", [True, False])
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.sampled(each_value=True)
def test_gradients_of_hard_heads_with_a_residual(kind, heads):
    for how in (None, *HARD):
        leaves = leaves_of((33, 5, 128), "bf16", how=how, weight=((5, 128), "bf16") if heads else "bf16",
                           residual="bf16")
        check_gradients(kind, leaves, what=how)


def test_a_constant_row_with_a_residual_gives_the_weight_no_gradient(backward):
    """It is 0 when it is centred, whatever its sum was rounded by."""
    leaves = leaves_of((64, 1024), "bf16", how="constant", weight="bf16", residual="bf16")
    y = tkq.layernorm(**leaves)
    y.backward(torch.randn_like(y))
    assert (leaves["weight"].grad == 0).all()
