"""LongSoftmax, which no plan has yet: its variants against float64, and the values that softmax makes NaN of."""
import math

import pytest
import torch

from tests.gpu.test_softmax import BIAS, DTYPES, TORCH, ULPS, make, nans, relative
from tests.rule import assert_2x
from tkq.softmax import ops, plan
from tkq.softmax.spec import SoftmaxSpec

pytestmark = pytest.mark.slow


def run(x, config, log=False, scale=1.0):
    out = nans(x)
    spec = SoftmaxSpec(x.shape[1], {v: k for k, v in DTYPES.items()}[x.dtype], 16 // x.element_size(), log)
    plan.check(spec, config)
    ops.compiled(spec, config, x.device)(x, out, scale)
    return out


def configs(N, dtype="bf16"):
    """One of each geometry."""
    found = {}
    for c in plan.long_variants(SoftmaxSpec(N, dtype, 4 if dtype == "fp32" else 8)):
        found.setdefault((c.cluster, c.warps, c.resident), c)
    return list(found.values())


def check(x, config, log=False, scale=1.0):
    y = run(x, config, log, scale)
    truth, peer = TORCH[log](x.double() * scale, -1), TORCH[log](x.float() * scale, -1).to(x.dtype)
    assert_2x(y, truth, peer, ulps=ULPS[x.dtype], what=str(config), bias_ulps=BIAS[x.dtype])
    if not log:
        relative(y, truth, str(config))
    assert torch.equal(y, run(x, config, log, scale)), "other bits in another run"


@pytest.mark.parametrize("dtype, N", [("bf16", 262144), ("bf16", 262136), ("bf16", 131072), ("fp32", 262144)])
def test_each_geometry(dtype, N):
    for config in configs(N, dtype):
        for M in (1, 5, 61):  # fewer rows than clusters, and several to each
            check(make((M, N), dtype, 2.0), config)


def test_fewer_blocks_than_fit():
    N = 262144
    for config in plan.variants(SoftmaxSpec(N, "bf16", 8)):
        if getattr(config, "most", 0):
            check(make((61, N), "bf16", 2.0), config)


@pytest.mark.parametrize("log", [False, True])
def test_hard_rows(log):
    N = 262144
    config = configs(N)[0]
    for size in (1e4, 1e-4, 0.0):
        check(make((9, N), "bf16", size), config, log, 0.7 if size == 1e-4 else 1.0)
    check(make((9, N), "bf16", 2.0), config, log, -0.7)


def test_infinities_and_nan_are_torchs():
    x = make((9, 262144), "bf16")
    x[0], x[1], x[5] = -math.inf, -math.inf, torch.finfo(x.dtype).min
    x[0, 20], x[2, -1], x[3, 0], x[4, ::2] = 3.0, math.inf, math.nan, -math.inf
    x[6, :131072] = -math.inf  # half of the blocks have nothing but that
    for config in configs(262144):
        for log in (False, True) if config is configs(262144)[0] else (False,):
            y, peer = run(x, config, log), TORCH[log](x.float(), -1).bfloat16()
            assert torch.equal(y.isnan(), peer.isnan()), config
            assert torch.allclose(y.float(), peer.float(), rtol=2**-7, atol=1e-6, equal_nan=True), config


def test_rows_that_are_apart_and_beside_poison():
    wide = torch.full((23, 262144 + 64), math.nan, device="cuda", dtype=torch.bfloat16)
    x = wide[:, 32:-32].copy_(make((23, 262144), "bf16"))
    room = torch.full_like(wide, math.nan)
    out = room[:, 32:-32]
    config = configs(262144)[0]
    ops.compiled(SoftmaxSpec(262144, "bf16", 8), config, x.device)(x, out, 1.0)
    assert torch.equal(out, run(x.contiguous(), config))
    assert room[:, :32].isnan().all() and room[:, -32:].isnan().all()
