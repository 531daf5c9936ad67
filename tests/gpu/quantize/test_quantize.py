"""quantize_fp8 on a GPU beside its reference, on random and hard data."""
import math

import pytest
import torch

import tkq
from tests.helpers.gemm.fp8_cases import E4M3, E5M2
from tests.helpers.sanitizer.nan_fill import poisoned
from tkq.granularity import BLOCKS
from tkq.quantize import ops
from tkq.quantize.workspace import workspace_size
from tkq.reference.fp8 import dequantise, quantize_fp8
from tkq.runtime.call import counters

SHAPES = ((1, 8), (128, 128), (130, 264), (37, 1000), (257, 4096), (5, 333), (129, 7))
# Of all three, every day: bf16 in every way, others in half of them.
EVERYDAY = lambda granularity, transpose, x_dtype: x_dtype == torch.bfloat16 or transpose == (
    granularity in ("tensor", "1x128"))
GRANULARITIES = ("tensor", "row", "1x128", "128x128")


def check(q, scale, x, granularity, dtype):
    """The reference's scales to the last bit but one; q off by a rounding where 1 / scale is not exact, and seldom."""
    want, scales = quantize_fp8(x, BLOCKS[granularity], dtype)
    scales = scales.view(scale.shape)
    assert torch.equal(scale.isnan(), scales.isnan()) and torch.equal(scale.isinf(), scales.isinf())
    good = scales.isfinite()
    torch.testing.assert_close(scale[good], scales[good], rtol=3e-7, atol=0)
    assert torch.equal(q.float().isnan(), want.float().isnan())
    a, b = q.float().nan_to_num(), want.float().nan_to_num()
    differ = a != b
    assert differ.float().mean() < 2e-3 + 2 / differ.numel()
    step = torch.finfo(dtype).eps
    assert ((a - b).abs() <= b.abs() * step * 1.01 + torch.finfo(dtype).smallest_normal * step).all()


def run(x, granularity, dtype=E4M3, transpose=False):
    with poisoned():
        found = tkq.quantize_fp8(x, granularity, dtype, transpose=transpose)
    check(found[0], found[1], x, granularity, dtype)
    if transpose:
        check(found[2], found[3], x.t(), granularity, dtype)


@pytest.mark.parametrize("granularity", GRANULARITIES)
@pytest.mark.parametrize("transpose", (False, True))
@pytest.mark.parametrize("x_dtype", (torch.bfloat16, torch.float32))
@pytest.mark.sampled(when=EVERYDAY)
@pytest.mark.sampled(each_value=True)
def test_random(granularity, transpose, x_dtype):
    for shape in SHAPES:
        run(torch.randn(shape, device="cuda").to(x_dtype), granularity, transpose=transpose)


@pytest.mark.parametrize("granularity", GRANULARITIES)
@pytest.mark.parametrize("transpose", (False, True))
def test_hard_data(granularity, transpose):
    shape = (257, 528)
    for scale in (1e4, 1e-4, 1e-30):
        run(torch.randn(shape, device="cuda").bfloat16() * scale, granularity, transpose=transpose)
    x = torch.randn(shape, device="cuda").bfloat16()
    x[:, 3] = 3e4
    run(x, granularity, transpose=transpose)
    run(torch.zeros(shape, device="cuda").bfloat16(), granularity, transpose=transpose)
    run(torch.full(shape, -3.0, device="cuda").bfloat16(), granularity, transpose=transpose)


@pytest.mark.parametrize("granularity", GRANULARITIES)
@pytest.mark.parametrize("transpose", (False, True))
@pytest.mark.parametrize("x_dtype", (torch.bfloat16, torch.float16, torch.float32))
@pytest.mark.sampled(when=EVERYDAY)
@pytest.mark.sampled(each_value=True)
def test_nan_and_infinities(granularity, transpose, x_dtype):
    """One element; and one in each of a thread's rows, in odd and even columns, and in the last row and column."""
    for m, n in ((257, 528), (130, 333)):
        for bad in (math.nan, math.inf, -math.inf):
            for rows, columns in (([130 % m], [257]), ([*(9 * i for i in range(8)), m - 1, 100],
                                                       [*(37 * i for i in range(8)), 6, n - 1])):
                x = torch.randn(m, n, device="cuda").to(x_dtype)
                x[rows, columns] = bad
                run(x, granularity, transpose=transpose)


@pytest.mark.parametrize("granularity", GRANULARITIES)
@pytest.mark.parametrize("transpose", (False, True))
@pytest.mark.sampled(when=lambda granularity, transpose: transpose == (granularity in ("tensor", "1x128")))
def test_e5m2_and_fp16(granularity, transpose):
    run(torch.randn(257, 528, device="cuda").half(), granularity, E5M2, transpose=transpose)


@pytest.mark.parametrize("granularity", GRANULARITIES)
@pytest.mark.parametrize("transpose", (False, True))
def test_views(granularity, transpose):
    x = torch.randn(300, 1100, device="cuda").bfloat16()
    for view in (x[3:260, 8:536], x[::2, :528], x[:257, 5:533], x[:1, :528], x[:1, :300].t()):
        run(view, granularity, transpose=transpose)


def test_what_comes_out_is_what_the_gemm_takes():
    x, w = (torch.randn(n, 1024, device="cuda").bfloat16() for n in (200, 384))
    want = x.double() @ w.double().t()
    for kind_x, kind_w in (("tensor", "tensor"), ("row", "row"), ("1x128", "128x128"), ("1x128", "1x128")):
        (a, sa), (b, sb) = tkq.quantize_fp8(x, kind_x), tkq.quantize_fp8(w, kind_w)
        got = tkq.fp8_gemm(a, b.t(), sa, sb.t() if sb.dim() == 2 else sb, out_dtype=torch.float32)
        assert (got - want).norm() < 0.05 * want.norm()
        exact = dequantise(a, sa, torch.float64) @ dequantise(b, sb, torch.float64).t()
        # fast sums, those of whole-tensor and row scales, lose bits with K: as in test_fp8_gemm
        assert (got - exact).abs().max() < (3e-3 if kind_w in ("tensor", "row") else 6e-4) * exact.abs().max()


@pytest.mark.parametrize("granularity", GRANULARITIES)
def test_repeats_are_bitwise_equal(granularity):
    x = torch.randn(300, 1000, device="cuda").bfloat16()
    for transpose in (False, True):
        first = tkq.quantize_fp8(x, granularity, transpose=transpose)
        for _ in range(20):
            for got, want in zip(tkq.quantize_fp8(x, granularity, transpose=transpose), first):
                assert torch.equal(got.float(), want.float())


@pytest.mark.parametrize("shape", ((300, 1000), (700, 1040)))
@pytest.mark.parametrize("granularity", GRANULARITIES)
def test_what_was_largest_in_the_call_before_is_forgotten(granularity, shape):
    """In calls that take the short way, too: numbers 64 times smaller have scales 64 times smaller."""
    x = torch.randn(shape, device="cuda").bfloat16()
    for _ in range(5):
        first = tkq.quantize_fp8(x, granularity, transpose=True)
    smaller = tkq.quantize_fp8(x.mul_(2**-6), granularity, transpose=True)
    for (got, scale), (want, scale_before) in zip((smaller[:2], smaller[2:]), (first[:2], first[2:])):
        assert torch.equal(scale, scale_before * 2**-6) and torch.equal(got.float(), want.float())


WITH_WORKSPACE = (("tensor", False), ("tensor", True), ("row", True))


@pytest.mark.parametrize("granularity, transpose", WITH_WORKSPACE)
def test_few_tiles_and_many(granularity, transpose):
    """Tiles that fit on the GPU at once, and more: of the same rows and columns the same, to the last bit."""
    x = torch.zeros(41 * 128 + 3, 16 * 128, device="cuda").bfloat16()
    x[:259] = torch.randn(259, 16 * 128)
    x[0, 0] = 7  # the largest, in all
    for part in (x[:259], x[:256], x[:255, :1000], x[:, :1280], x[:259, :7]):
        run(part, granularity, transpose=transpose)
    many, few = (tkq.quantize_fp8(part, granularity, transpose=transpose) for part in (x, x[:256]))
    assert torch.equal(many[0][:256].float(), few[0].float()) and torch.equal(many[1][:256], few[1])
    if transpose:
        more = tkq.quantize_fp8(x[:259], granularity, transpose=True)
        assert torch.equal(many[2][:, :259].float(), more[2].float()) and torch.equal(many[3], more[3])


@pytest.mark.parametrize("granularity, transpose", WITH_WORKSPACE)
def test_more_tiles_than_run_at_once(granularity, transpose):
    """2 * 16 * 128 blocks, of which those that wait must not keep out those that are waited for."""
    x = torch.randn(16 * 128 - 8, 128 * 128 - 24, device="cuda").bfloat16()
    for _ in range(3):
        run(x, granularity, transpose=transpose)
    workspace = counters.workspace(0, workspace_size(ops._largest_of(granularity, *x.shape, transpose)))
    assert workspace[0].item() in (0, -1 << 31)  # no tickets


def test_calls_that_share_a_workspace():
    """Of several sizes and kinds, one of more tiles than fit on the GPU at once, after each other: each finds its half
    as zeros, and odd numbers of them leave the other half to the next."""
    given = [(torch.randn(m, n, device="cuda").bfloat16() * 2**i, transpose, granularity)
             for i, (m, n) in enumerate(((1000, 1040), (8, 8), (2400, 2000), (136, 1032), (1500, 128)))
             for granularity, transpose in WITH_WORKSPACE]
    for _ in range(3):
        for x, transpose, granularity in given:
            run(x, granularity, transpose=transpose)
    sizes = [workspace_size(ops._largest_of(granularity, *x.shape, transpose)) for x, transpose, granularity in given]
    assert len({counters.workspace(0, size).data_ptr() for size in sizes}) < len(set(sizes))  # some do share one


@pytest.mark.parametrize("granularity, transpose", WITH_WORKSPACE)
def test_side_by_side(granularity, transpose):
    """Calls on several streams have a workspace each, and get on where others, or torch's kernels, hold the SMs."""
    given = [torch.randn(1024, 4096 + 264 * i, device="cuda").bfloat16() * 2**i for i in range(4)]
    a, streams = torch.randn(4096, 4096, device="cuda"), [torch.cuda.Stream() for _ in given]
    torch.cuda.synchronize()
    for _ in range(10):
        found = []
        for x, stream in zip(given, streams):
            with torch.cuda.stream(stream):
                a @ a
                found.append(tkq.quantize_fp8(x, granularity, transpose=transpose))
        torch.cuda.synchronize()
    for x, (q, scale, *rest) in zip(given, found):
        check(q, scale, x, granularity, E4M3)
        if transpose:
            check(*rest, x.t(), granularity, E4M3)


@pytest.mark.parametrize("shape", ((257, 528), (700, 1040)))
def test_graph(shape):
    x = torch.randn(shape, device="cuda").bfloat16()
    for granularity in GRANULARITIES:
        tkq.quantize_fp8(x, granularity, transpose=True)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            q, scale, qt, scale_t = tkq.quantize_fp8(x, granularity, transpose=True)
        for factor in (2, 0.01):
            x.mul_(factor)
            graph.replay()
            check(q, scale, x, granularity, E4M3)
            check(qt, scale_t, x.t(), granularity, E4M3)


def test_rows_of_a_cluster():
    """Enough tiles that blocks of a cluster begin apart: none may send to one that is not ready."""
    x = torch.randn(8192, 32776, device="cuda", dtype=torch.bfloat16)
    for _ in range(3):
        with poisoned():
            q, scale = tkq.quantize_fp8(x, "row")
    for rows in (slice(0, 100), slice(8092, 8192)):
        check(q[rows], scale[rows], x[rows], "row", E4M3)


def test_rows_longer_than_one_block_holds():
    """By rows, without the transpose too: x is read twice."""
    x = torch.randn(9, 262144 + 264, device="cuda").bfloat16()
    run(x, "row")
    run(x[:, :262144 + 3], "row")


@pytest.mark.slow
@pytest.mark.alone
def test_more_than_2_31_elements():
    x = torch.randn(65537, 32768 + 8, device="cuda", dtype=torch.bfloat16)
    for granularity in GRANULARITIES:
        q, scale = tkq.quantize_fp8(x, granularity)
        if granularity != "tensor":
            last = -(-65537 // 128) - 1
            part = scale[65408:] if granularity != "128x128" else scale[last - 1:]
            check(q[65408:], part, x[65408:], granularity, E4M3)
