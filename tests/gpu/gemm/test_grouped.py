"""grouped_gemm on a GPU: exact where sums are; rows of no group, and of the next one, untouched."""
import math

import pytest
import torch

import tkq
from tests.helpers.gemm.fp8_cases import E4M3, E5M2, blocks, matrix, scale
from tkq.gemm.grouped import ops
from tkq.gemm.grouped.plan import FAST, PROMOTED, fit_to_spec
from tkq.gemm.grouped.spec import GroupedSpec
from tkq.granularity import PRODUCTS
from tkq.reference.grouped import bounds, grouped_gemm
from tkq.testing import assert_2x

SIZES = {"equal": [128] * 4, "skewed": [0, 1, 700, 0, 130, 3, 500, 0], "all in one": [0, 0, 300], "none": [0, 0],
         "single rows": [1] * 40, "just over a tile": [129, 0, 1, 129], "many": [5, 0, 64, 1] * 20}
KINDS = ("bf16", "bf16 rows", "row", "1x128_128x128")
POISON = 7.0


def ends(sizes):
    return torch.tensor(sizes, device="cuda").cumsum(0).int()


def whole(*shape, seed=0):
    g = torch.Generator("cuda").manual_seed(seed)
    return torch.randint(-3, 4, shape, device="cuda", generator=g).bfloat16()


def operands(kind, m, groups, n, k):
    """(a, b, scale_a, scale_b) of whole numbers."""
    if kind.startswith("bf16"):
        b = whole(groups, n, k, seed=1).transpose(1, 2)
        return whole(m, k), b.contiguous() if kind == "bf16 rows" else b, None, None
    b = torch.cat([matrix(n, k, E4M3, "cuda", i, True).view(torch.uint8) for i in range(groups)]).view(E4M3)
    to_a, to_b = {"row": ((m, 1), (groups, 1, n)),
                  "1x128_128x128": ((m, blocks(k)), (groups, blocks(k), blocks(n)))}[kind]
    return (matrix(m, k, E4M3, "cuda", 0, True), b.view(groups, n, k).transpose(1, 2), scale(to_a, "cuda", 0, True),
            scale(to_b, "cuda", 1, True))


def spec_of(kind):
    if kind.startswith("bf16"):
        return GroupedSpec(b_major="n" if kind == "bf16 rows" else "k")
    return GroupedSpec("m", "e4m3", "e4m3", "bf16", *PRODUCTS[kind])


def check(kind, sizes, n, k, config, behind=5, blocks=None):
    """Into a view between poisoned rows: rows of groups are exact, the others as they were."""
    m, offsets = sum(sizes) + behind, ends(sizes)
    a, b, *scales = operands(kind, m, len(sizes), n, k)
    if behind:
        a.view(torch.uint8)[sum(sizes):] = 0xFF  # NaN in bf16 and e4m3
    buffer = torch.full((m + 2, n + 16), POISON, dtype=torch.bfloat16, device="cuda")
    spec = spec_of(kind)
    ops.run(spec, a, b, buffer[1:-1, 8:-8], offsets, scales, fit_to_spec(config, spec), blocks)
    want = torch.full_like(buffer, POISON)
    want[1:1 + sum(sizes), 8:-8] = grouped_gemm(a, b, offsets, *scales, torch.bfloat16, torch.float64)[:sum(sizes)]
    wrong = buffer != want
    assert not wrong.any(), f"{kind} {sizes} {n} {k}: {int(wrong.sum())} wrong, rows {wrong.any(1).nonzero()[:9].t()}"


@pytest.mark.slow
@pytest.mark.parametrize("kind", KINDS)
def test_every_tile(kind):
    for config in PROMOTED if kind == "1x128_128x128" else FAST:
        for sizes in SIZES.values():
            check(kind, sizes, 776, 272, config)
        check(kind, SIZES["skewed"], 1536, 528, config, behind=0, blocks=6)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.sampled(when=lambda kind: kind != "bf16 rows")
def test_the_tile_of_large_products(kind):
    """Several tiles a block, written under the next ones; blocks without work."""
    config = (PROMOTED if kind == "1x128_128x128" else FAST)[0]
    check(kind, SIZES["skewed"], 1536, 528, config, behind=0, blocks=6)
    check(kind, SIZES["equal"], 776, 272, config)


@pytest.mark.parametrize("kind", KINDS)
def test_the_public_function(kind):
    for sizes in (SIZES["skewed"], SIZES["equal"]):
        check_public(kind, sizes)


def check_public(kind, sizes):
    m, offsets = sum(sizes), ends(sizes)
    a, b, sa, sb = operands(kind, m, len(sizes), 264, 400)
    got = tkq.grouped_gemm(a, b, offsets, scale_a=sa, scale_b=sb)
    assert torch.equal(got, grouped_gemm(a, b, offsets, sa, sb, torch.bfloat16, torch.float64))


def inside(x, rows=16, cols=16):
    """x again, amid NaN: its last two dimensions, as they lie, are part of a larger matrix."""
    turned = x.stride(-1) != 1
    x = x.mT if turned else x
    *batch, m, n = x.shape
    wide = torch.full((*batch, m + rows, n + 2 * cols), math.nan, device=x.device).to(x.dtype)
    view = wide[..., :m, cols:cols + n]
    view.view(torch.uint8).copy_(x.view(torch.uint8))
    return view.mT if turned else view


@pytest.mark.parametrize("kind", KINDS)
def test_views_and_orders_of_scales(kind):
    sizes = SIZES["skewed"]
    a, b, sa, sb = operands(kind, sum(sizes), len(sizes), 264, 400)
    want = grouped_gemm(a, b, ends(sizes), sa, sb, torch.bfloat16, torch.float64)
    a, b = inside(a), inside(b)
    assert torch.equal(tkq.grouped_gemm(a, b, ends(sizes), scale_a=sa, scale_b=sb), want)
    if sa is not None:
        other = dict(scale_a=sa.repeat_interleave(3, 1)[:, ::3], scale_b=sb.mT.contiguous().mT)
        assert torch.equal(tkq.grouped_gemm(a, b, ends(sizes), **other), want)


def test_views_along_k():
    sizes, offsets = SIZES["skewed"], ends(SIZES["skewed"])
    x, y = whole(sum(sizes), 328), whole(sum(sizes), 520, seed=1)
    want = grouped_gemm(x.t(), y, offsets, wide=torch.float64)
    assert torch.equal(tkq.grouped_gemm(inside(x).t(), inside(y), offsets), want)


@pytest.mark.slow
@pytest.mark.parametrize("kind", KINDS)
def test_a_single_row(kind):
    """A dimension of one element, whose stride says nothing, under the descriptor that clips the result."""
    check_public(kind, [1])


@pytest.mark.parametrize("out_dtype", (torch.bfloat16, torch.float32))
def test_the_gradient_of_weights(out_dtype):
    for sizes in SIZES.values():
        m = sum(sizes) + 5
        x, y, offsets = whole(m, 328), whole(m, 520, seed=1), ends(sizes)
        x[sum(sizes):] = math.nan
        y[sum(sizes):] = math.nan
        got = tkq.grouped_gemm(x.t(), y, offsets, out_dtype=out_dtype)
        want = grouped_gemm(x.t(), y, offsets, out_dtype=out_dtype, wide=torch.float64)
        assert torch.equal(got, want), sizes


# ---- float8 along K --------------------------------------------------------------------------------------

FLOAT8_K = ("row", "row of groups", "1x128_1x128")


def tokens(kind, m, n, k, groups, types=(E4M3, E4M3)):
    """(a, b, scale_a, scale_b) of whole numbers; a pitch that is a multiple of 16 bytes, NaN behind K."""
    def padded(rows, dtype, seed):
        wide = torch.full((rows, -(-k // 16) * 16 + 16), 0x7F, dtype=torch.uint8, device="cuda")
        wide[:, :k] = matrix(rows, k, dtype, "cuda", seed, True).view(torch.uint8)
        return wide.view(dtype)[:, :k]

    shapes = {"row": ((m, 1), (1, n)), "row of groups": ((groups, m, 1), (groups, 1, n)),
              "1x128_1x128": ((m, blocks(k)), (blocks(k), n))}[kind]
    return (padded(m, types[0], 0), padded(n, types[1], 1).t(), scale(shapes[0], "cuda", 0, True),
            scale(shapes[1], "cuda", 1, True))


def check_along_k(kind, sizes, m, n, config, out="bf16", behind=5, blocks=None):
    """Into a view with poisoned rows and columns around it; columns of no group are NaN."""
    k, offsets = sum(sizes) + behind, ends(sizes)
    a, b, *scales = tokens(kind, m, n, k, len(sizes))
    a[:, sum(sizes):].view(torch.uint8)[:] = 0x7F
    b.t()[:, sum(sizes):].view(torch.uint8)[:] = 0x7F
    spec = GroupedSpec("k", "e4m3", "e4m3", out, *PRODUCTS[kind if "128" in kind else "row"])
    dtype = {"bf16": torch.bfloat16, "fp32": torch.float32}[out]
    buffer = torch.full((len(sizes), m + 2, n + 16), POISON, dtype=dtype, device="cuda")
    ops.run(spec, a, b, buffer[:, 1:-1, 8:-8], offsets, scales, fit_to_spec(config, spec), blocks)
    want = torch.full_like(buffer, POISON)
    want[:, 1:-1, 8:-8] = grouped_gemm(a, b, offsets, *scales, dtype, torch.float64)
    wrong = buffer != want
    assert not wrong.any(), f"{kind} {sizes} {m} {n} {config.name}: {int(wrong.sum())} wrong, in groups " \
        f"{wrong.flatten(1).any(1).nonzero()[:9].t()}"


@pytest.mark.slow
@pytest.mark.parametrize("kind", FLOAT8_K)
def test_float8_along_k(kind):
    for config in PROMOTED if kind == "1x128_1x128" else FAST:
        for sizes in SIZES.values():
            check_along_k(kind, sizes, 328, 520, config)
        check_along_k(kind, SIZES["skewed"], 1001, 1032, config, behind=0, blocks=6)


@pytest.mark.parametrize("kind", FLOAT8_K)
def test_float8_along_k_of_the_public_function(kind):
    for sizes in (SIZES["skewed"], [16] * 9, [0, 127, 1, 128, 129, 0]):
        a, b, sa, sb = tokens(kind, 65, 264, sum(sizes), len(sizes))
        for out_dtype in (None, torch.float32):
            got = tkq.grouped_gemm(a, b, ends(sizes), scale_a=sa, scale_b=sb, out_dtype=out_dtype)
            want = grouped_gemm(a, b, ends(sizes), sa, sb, out_dtype, torch.float64)
            assert torch.equal(got, want), (sizes, out_dtype)


def test_types_of_float8_along_k():
    sizes = [100, 30, 158]
    for types in ((E5M2, E4M3), (E4M3, E5M2)):
        args = tokens("row", 136, 264, sum(sizes), 3, types)
        got = tkq.grouped_gemm(*args[:2], ends(sizes), scale_a=args[2], scale_b=args[3])
        assert torch.equal(got, grouped_gemm(*args[:2], ends(sizes), *args[2:], wide=torch.float64)), types


@pytest.mark.parametrize("kind", FLOAT8_K)
def test_float8_groups_along_k_do_not_touch_each_other(kind):
    """NaN in a group, in either operand, beside a clean one in the same steps and the same stages."""
    sizes = [100, 30, 200, 1, 0, 53]
    for bad, (i, j) in enumerate(bounds(ends(sizes), sum(sizes))):
        for operand in (0, 1):
            a, b, sa, sb = tokens(kind, 136, 264, sum(sizes), len(sizes))
            (a if operand == 0 else b.t())[:, i:j].view(torch.uint8)[:] = 0x7F
            c = tkq.grouped_gemm(a, b, ends(sizes), scale_a=sa, scale_b=sb)
            assert [bool(x.isnan().any()) for x in c] == [x == bad and j > i for x in range(len(sizes))]


def test_float8_gradient_of_weights_beside_bf16():
    """From what the quantiser makes of tokens, in one pass with what the forward takes."""
    sizes = [300, 0, 17, 195]
    x, y = (torch.randn(512, n, device="cuda").bfloat16() for n in (256, 520))
    _, _, xt, scale_x = tkq.quantize_fp8(x, "1x128", transpose=True)
    _, _, yt, scale_y = tkq.quantize_fp8(y, "1x128", transpose=True)
    got = tkq.grouped_gemm(xt, yt.t(), ends(sizes), scale_a=scale_x, scale_b=scale_y.t(), out_dtype=torch.float32)
    want = grouped_gemm(x.t(), y, ends(sizes), out_dtype=torch.float32)
    assert ((got - want).norm() / want.norm()).item() < 0.05 and not got[1].any()


@pytest.mark.parametrize("kind", ("bf16", "row", "1x128_1x128"))
def test_graph_with_changed_sizes_along_k(kind):
    if kind == "bf16":
        a, b, scales = whole(1008, 136).t(), whole(1008, 264, seed=1), {}
    else:
        a, b, sa, sb = tokens(kind, 136, 264, 1008, 4)
        scales = dict(scale_a=sa, scale_b=sb)
    offsets = ends([252] * 4)
    tkq.grouped_gemm(a, b, offsets, **scales)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        c = tkq.grouped_gemm(a, b, offsets, **scales)
    for sizes in ([1008, 0, 0, 0], [1, 2, 3, 1002], [0, 0, 500, 508], [100, 0, 0, 1]):
        offsets.copy_(ends(sizes))
        c.fill_(math.nan)
        graph.replay()
        want = grouped_gemm(a, b, offsets, *scales.values(), out_dtype=torch.bfloat16, wide=torch.float64)
        assert torch.equal(c, want), sizes


def test_groups_do_not_touch_each_other():
    """NaN in one group stays there, along M and along K."""
    sizes = [100, 30, 200, 1]
    offsets = ends(sizes)
    for bad, (i, j) in enumerate(bounds(offsets, sum(sizes))):
        a, b = whole(sum(sizes), 272), whole(4, 272, 264, seed=1)
        a[i:j] = math.nan
        c = tkq.grouped_gemm(a, b, offsets)
        rows = torch.arange(sum(sizes), device="cuda")
        assert torch.equal(c.isnan().all(1), (rows >= i) & (rows < j))
        assert torch.equal(c.isnan().any(1), (rows >= i) & (rows < j))
        g = tkq.grouped_gemm(a.t(), whole(sum(sizes), 264, seed=1), offsets)
        assert [bool(x.isnan().any()) for x in g] == [x == bad for x in range(4)]


def test_random_against_float64():
    sizes = [300, 0, 17, 195]
    offsets = ends(sizes)
    a, b = (torch.randn(s, device="cuda").bfloat16() for s in ((512, 1024), (4, 1024, 520)))
    truth = grouped_gemm(a, b, offsets, out_dtype=torch.float64, wide=torch.float64)
    assert_2x(tkq.grouped_gemm(a, b, offsets), truth, truth.bfloat16(), ulps=0.1, what="bf16")


def test_backward():
    sizes = [100, 0, 300, 29]
    offsets, m = ends(sizes), sum(sizes) + 3
    a, b, d = torch.randn(m, 256, device="cuda"), torch.randn(4, 256, 512, device="cuda"), torch.randn(
        m, 512, device="cuda")
    a, b = a.bfloat16().requires_grad_(), b.bfloat16().requires_grad_()
    d[sum(sizes):] = 0
    d = d.bfloat16()
    tkq.grouped_gemm(a, b, offsets).backward(d)
    x, y = (t.detach().double().requires_grad_() for t in (a, b))
    sum((x[i:j] @ y[g] * d[i:j].double()).sum() for g, (i, j) in enumerate(bounds(offsets, m))).backward()
    assert_2x(a.grad, x.grad, x.grad.bfloat16(), ulps=0.1, what="a")
    assert_2x(b.grad, y.grad, y.grad.bfloat16(), ulps=0.1, what="b")


def test_backward_of_columns_that_are_no_multiple_of_8():
    offsets = ends([100, 0, 29])
    a, b = torch.randn(129, 256, device="cuda"), torch.randn(3, 12, 256, device="cuda")
    a, b = a.bfloat16().requires_grad_(), b.bfloat16().transpose(1, 2).requires_grad_()
    y = tkq.grouped_gemm(a, b, offsets, out_dtype=torch.float32)
    d = torch.randn_like(y).bfloat16()
    da, db = torch.autograd.grad(y, (a, b), d.float())
    with torch.no_grad():
        torch.testing.assert_close(y.detach(), tkq.grouped_gemm(a, b, offsets, out_dtype=torch.float32))
    x, w = (t.detach().double().requires_grad_() for t in (a, b))
    rows = torch.cat([x[i:j] @ w[g] for g, (i, j) in enumerate(bounds(offsets, 129))])
    for got, want in zip((da, db), torch.autograd.grad(rows, (x, w), d.double())):
        assert_2x(got, want, want.bfloat16(), ulps=0.1, what="columns")


def test_no_rows_at_all():
    a, b = whole(0, 272).requires_grad_(), whole(3, 272, 264).requires_grad_()
    tkq.grouped_gemm(a, b, ends([0, 0, 0])).sum().backward()
    assert a.grad.shape == a.shape and not b.grad.any()


def test_offsets_that_make_no_sense():
    a, b = whole(300, 272), whole(4, 272, 264, seed=1)
    for offsets in ([5, 3, 400, 300], [-4, 2, 100, 2**31 - 1], [10**9] * 4):
        offsets = torch.tensor(offsets, device="cuda", dtype=torch.int32)
        c = tkq.grouped_gemm(a, b, offsets)
        want = grouped_gemm(a, b, offsets, wide=torch.float64)
        known = torch.zeros(300, dtype=torch.bool, device="cuda")
        for i, j in bounds(offsets, 300):
            known[i:j] = True
        overlapping = len(set(offsets.tolist())) < 4 or offsets.tolist() != sorted(offsets.tolist())
        if not overlapping:
            assert torch.equal(c[known], want[known])
        torch.cuda.synchronize()


@pytest.mark.parametrize("kind", ("bf16", "1x128_128x128"))
def test_graph_with_changed_sizes(kind):
    a, b, sa, sb = operands(kind, 1000, 4, 520, 272)
    offsets = ends([250] * 4)
    tkq.grouped_gemm(a, b, offsets, scale_a=sa, scale_b=sb)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        c = tkq.grouped_gemm(a, b, offsets, scale_a=sa, scale_b=sb)
    for sizes in ([1000, 0, 0, 0], [1, 2, 3, 994], [0, 0, 500, 500], [333, 333, 333, 1]):
        offsets.copy_(ends(sizes))
        c.fill_(math.nan)
        graph.replay()
        assert torch.equal(c, grouped_gemm(a, b, offsets, sa, sb, torch.bfloat16, torch.float64)), sizes


@pytest.mark.slow
@pytest.mark.parametrize("kind", KINDS)
def test_many_repeats_are_bitwise_equal(kind):
    sizes = SIZES["skewed"]
    args, offsets = operands(kind, sum(sizes), len(sizes), 1032, 1040), ends(sizes)
    a, b, sa, sb = args
    want = tkq.grouped_gemm(a, b, offsets, scale_a=sa, scale_b=sb)
    assert all(torch.equal(tkq.grouped_gemm(a, b, offsets, scale_a=sa, scale_b=sb), want) for _ in range(300))


@pytest.mark.slow
@pytest.mark.parametrize("kind", FLOAT8_K)
def test_many_repeats_along_k_are_bitwise_equal(kind):
    """Masks are written by both consumers, and under products that run."""
    sizes = [100, 30, 200, 1, 0, 53, 1000, 16]
    a, b, sa, sb = tokens(kind, 1000, 1032, sum(sizes), len(sizes))
    want = tkq.grouped_gemm(a, b, ends(sizes), scale_a=sa, scale_b=sb)
    assert torch.equal(want, grouped_gemm(a, b, ends(sizes), sa, sb, torch.bfloat16, torch.float64))
    assert all(torch.equal(tkq.grouped_gemm(a, b, ends(sizes), scale_a=sa, scale_b=sb), want) for _ in range(300))


@pytest.mark.slow
@pytest.mark.alone
def test_more_than_2_31_results_along_k():
    m, n, sizes = 16384 + 8, 32768, [3, 0, 40, 16, 21]
    x, y = whole(sum(sizes), m), whole(sum(sizes), n, seed=1)
    got = tkq.grouped_gemm(x.t(), y, ends(sizes))
    for g, (i, j) in enumerate(bounds(ends(sizes), sum(sizes))):
        assert torch.equal(got[g, -70:], (x[i:j, -70:].float().t() @ y[i:j].float()).bfloat16())


@pytest.mark.slow
@pytest.mark.alone
def test_more_than_2_31_results():
    n, k, sizes = 65536, 64, [16384, 3, 0, 16400]
    a, b, offsets = whole(sum(sizes), k), whole(4, n, k, seed=1).transpose(1, 2), ends(sizes)
    c = tkq.grouped_gemm(a, b, offsets)
    for g, (i, j) in enumerate(bounds(offsets, sum(sizes))):
        if j > i:
            rows = slice(max(i, j - 70), j)
            assert torch.equal(c[rows], (a[rows].float() @ b[g].float()).bfloat16())
