"""float8 products of few rows, or of few tiles, whose K blocks of a cluster share: exact where sums are."""
from dataclasses import replace

import pytest
import torch

import tkq
from tests.gpu.gemm.test_fp8_gemm import check_exact, spec_of
from tests.helpers.gemm.fp8_cases import E4M3, E5M2, KINDS, exact, operands
from tests.helpers.process.streams import check_back_and_forth
from tkq.gemm.fp8 import ops
from tkq.gemm.fp8 import plan as fp8_plan
from tkq.gemm.fp8.small_m_config import SmallMFp8Config
from tkq.gemm.fp8.small_m_plan import fit_to_spec, plan
from tkq.gemm.fp8.spec import Fp8Spec
from tkq.reference.fp8 import fp8_gemm, narrowed
from tkq.testing import assert_2x

SHAPES = tuple((m, rows, split) for m in (16, 32, 64, 128) for rows in (64, 128) for split in (1, 2, 4, 8))
USUAL = ((16, 64, 4), (16, 128, 1), (128, 128, 4))


def take(kind, size, config, promote=False, out="bf16", first=8):
    spec = spec_of(kind, out, promote)
    check_exact(kind, size, fit_to_spec(config, spec), promote, out=out, first=first)


@pytest.mark.parametrize("m, rows, split", [
    pytest.param(*shape, marks=[pytest.mark.slow] * (shape not in USUAL)) for shape in SHAPES])
def test_every_shape(m, rows, split):
    """Rows and columns that end within a tile, fewer steps of K than blocks, more, a step's rest."""
    config = SmallMFp8Config(m, rows, split, pdl=split == 2)
    more = ((m + 1, 136, 272), (3 * m - 5, 200, 1168)) if config.tiled else ()
    for M, n, k in ((1, 16, 16), (m, 136, 272), (m - 3, 63, 1168), (max(1, m // 2), 528, 2064), *more):
        for kind in KINDS:
            take(kind, (M, n, k), config)
    take("tensor" if rows == 64 else "row", (m, 200, 1040), config, promote=True)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("out", ("fp16", "fp32"))
@pytest.mark.sampled(when=lambda kind, out: (kind, out) in (("row", "fp32"), ("1x128_128x128", "fp16")))
def test_results(kind, out):
    for size, first in (((13, 137, 272), 3), ((64, 200, 1040), 8)):
        take(kind, size, SmallMFp8Config(64, 64, 2), out=out, first=first)
    take(kind, (300, 137, 1040), SmallMFp8Config(128, 64, 2), out=out, first=3)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.sampled(when=lambda kind: kind in ("row", "1x128_128x128"))
def test_more_rows_than_a_tile(kind):
    """As they are planned."""
    for size in ((129, 136, 4112), (700, 264, 4096), (1000, 16, 8208), (200, 1000, 4096)):
        config = plan(spec_of(kind), *size, 132)
        assert config.tiled and config.m < size[0]
        take(kind, size, config)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("out", ("bf16", "e4m3"))
@pytest.mark.sampled(when=lambda kind, out: (out == "e4m3") == (kind == "row"))
def test_bias_and_activation(kind, out):
    sizes = ((5, 200, 784, 1), (64, 136, 4096, 8), (300, 136, 4096, 4))
    for M, n, k, split in sizes if (kind in ("row", "1x128_128x128")) == (out == "bf16") else sizes[1:2]:
        args = operands(M, n, k, kind, device="cuda", b=E5M2 if kind == "row" else torch.float8_e4m3fn)
        bias, scale = torch.randn(n, device="cuda"), torch.tensor([0.7], device="cuda") if out == "e4m3" else None
        spec = replace(spec_of(kind, "bf16"), out=out, bias="fp32", activation="silu",
                       b="e5m2" if kind == "row" else "e4m3")
        dtype = torch.bfloat16 if out == "bf16" else torch.float8_e4m3fn
        got = torch.full((M, n), float("nan"), device="cuda").to(dtype)
        config = plan(spec, M, n, k, 132)
        assert config.split == split
        ops.run(spec, *args, got, config, bias=bias, out_scale=scale)
        truth = fp8_gemm(*args, bias, "silu", torch.float64, wide=torch.float64)
        if out == "e4m3":
            truth = (truth / scale.double()).clamp(-448, 448)
        like = truth.to(dtype)
        if out == "e4m3":  # an ulp of its largest value would allow anything
            got, like = got.float(), like.float()
        assert_2x(got, truth, like, ulps=0.6, what=f"{kind} {(M, n, k)} {out}")


@pytest.mark.parametrize("kind", KINDS)
def test_nan_behind_rows(kind):
    """Of K, of M and of N, where TMA's tiles reach: nothing of it counts."""
    for M, n, k in ((9, 72, 1040), (50, 100, 2064), (300, 100, 4112)):
        a, b, *scales = operands(M, n, k, kind, device="cuda", whole=True, powers=True)
        wide = [torch.full((x.shape[0] + 130, k + 144), 0x7F, dtype=torch.uint8, device="cuda") for x in (a, b.t())]
        for to, x in zip(wide, (a, b.t())):
            to[:x.shape[0], :k] = x.view(torch.uint8)
        a, b = (to.view(torch.float8_e4m3fn)[:x.shape[0], :k] for to, x in zip(wide, (a, b.t())))
        assert torch.equal(tkq.fp8_gemm(a, b.t(), *scales), fp8_gemm(a, b.t(), *scales, wide=torch.float64))


@pytest.mark.parametrize("M, rows, split", ((16, 16, 2), (128, 128, 4), (64, 64, 8), (300, 128, 2)))
@pytest.mark.parametrize("promote", (False, True))
@pytest.mark.parametrize("captured", (False, True))
@pytest.mark.sampled(when=lambda promote, M: promote == (M in (16, 300)))
def test_launched_under_the_end_of_the_one_before(captured, promote, M, rows, split):
    size = 1024
    spec = Fp8Spec(out="e4m3", scale_a="tensor", scale_b="tensor", promote=promote)
    config = fit_to_spec(SmallMFp8Config(rows, 64, split, pdl=True), spec)
    first, *weights = (torch.randn(n, size, device="cuda").to(E4M3) for n in (M, size, size))
    one, scale = torch.ones((), device="cuda"), torch.tensor([0.9 * size**0.5], device="cuda")

    def run(source, weight, target):
        ops.run(spec, source, weight.t(), one, one, target, config, out_scale=scale)

    check_back_and_forth(run, first, weights, 100, captured)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("M, k, row", ((20, 2064, 3), (300, 4112, 203)))
@pytest.mark.sampled(each_value=True)
def test_nan_in_used_operands(kind, M, k, row):
    """It reaches its own row and its own column, and nothing else."""
    a, b, *scales = operands(M, 264, k, kind, device="cuda", whole=True, powers=True)
    a.view(torch.uint8)[row, 1000] = b.t().view(torch.uint8)[7, 2000] = 0x7F
    got = tkq.fp8_gemm(a, b, *scales)
    nan = torch.zeros_like(got, dtype=torch.bool)
    nan[row] = nan[:, 7] = True
    assert torch.equal(got.isnan(), nan)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.sampled(when=lambda kind: kind in ("row", "1x128_128x128"))
def test_long_k(kind):
    """As long as models have it, in one block and in eight."""
    for split in (1, 8):
        take(kind, (13, 136, 28672), SmallMFp8Config(16, 64, split, pdl=True))


@pytest.mark.parametrize("n", (136, 137))
def test_float8_results_between_guards(n):
    args, guard = operands(13, n, 2064, "row", device="cuda", whole=True, powers=True), 0x33
    scale = torch.tensor([4.0], device="cuda")
    buffer = torch.full((15, 16 + n + 16), guard, dtype=torch.uint8, device="cuda")
    c = buffer[1:-1, 16:16 + n]
    spec = Fp8Spec(out="e4m3", scale_a="row", scale_b="row", store="direct")
    ops.run(spec, *args, c.view(E4M3), fit_to_spec(SmallMFp8Config(16, 64, 4), spec), out_scale=scale)
    assert torch.equal(c.view(E4M3).float(), narrowed(exact(args) / 4, E4M3).float())
    c.fill_(guard)
    assert (buffer == guard).all(), "written outside the result"


@pytest.mark.slow
@pytest.mark.alone
def test_more_than_2_31_results():
    m, n, k = 32, (1 << 26) + 16, 16
    a, b, sa, sb = operands(m, n, k, "row", device="cuda", whole=True, powers=True)
    assert isinstance(fp8_plan.plan(spec_of("row"), m, n, k, 132), SmallMFp8Config)
    got = tkq.fp8_gemm(a, b, sa, sb)
    for columns in (slice(0, 128), slice(n - 130, n)):
        part = exact((a, b[:, columns], sa, sb[:, columns]), torch.bfloat16)
        assert torch.equal(got[:, columns], part)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("M, n, shape", ((64, 1024, (64, 64, 8)), (300, 512, (128, 64, 2)), (300, 512, (128, 128, 4))))
@pytest.mark.sampled(when=lambda kind, M: (M == 64) == (kind in ("tensor", "1x128_1x128")))
@pytest.mark.sampled(each_value=True)
def test_the_same_bits_every_time(kind, M, n, shape):
    spec = spec_of(kind, promote=kind != "row")
    args = operands(M, n, 8192, kind, device="cuda")
    config = fit_to_spec(SmallMFp8Config(*shape, pdl=True), spec)
    first = None
    for _ in range(200):
        got = torch.full((M, n), float("nan"), device="cuda", dtype=torch.bfloat16)
        ops.run(spec, *args, got, config)
        first = got if first is None else first
        assert torch.equal(got, first)
