"""grouped_gemm on a GPU: exact where sums are; rows of no group, and of the next one, untouched."""
import math

import pytest
import torch

import tkq
from tests.fp8_cases import E4M3, blocks, matrix, scale
from tests.rule import assert_2x
from tkq.gemm import grouped_ops
from tkq.gemm.grouped_spec import FAST, PROMOTED, GroupedSpec, fitted
from tkq.reference_grouped import bounds, grouped_gemm

pytestmark = pytest.mark.slow  # until they have run on a GPU once
SIZES = {"equal": [128] * 4, "skewed": [0, 1, 700, 0, 130, 3, 500, 0], "all in one": [0, 0, 300], "none": [0, 0],
         "single rows": [1] * 40, "just over a tile": [129, 0, 1, 129], "many": [5, 0, 64, 1] * 20}
KINDS = ("bf16", "bf16 rows", "row", "block")
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
    to_a, to_b = {"row": ((m, 1), (groups, 1, n)), "block": ((m, blocks(k)), (groups, blocks(k), blocks(n)))}[kind]
    return (matrix(m, k, E4M3, "cuda", 0, True), b.view(groups, n, k).transpose(1, 2), scale(to_a, "cuda", 0, True),
            scale(to_b, "cuda", 1, True))


def spec_of(kind):
    if kind.startswith("bf16"):
        return GroupedSpec(b_major="n" if kind == "bf16 rows" else "k")
    return GroupedSpec("m", "e4m3", "e4m3", "bf16", kind)


def check(kind, sizes, n, k, config, behind=5, blocks=None):
    """Into a view between poisoned rows: rows of groups are exact, the others as they were."""
    m, offsets = sum(sizes) + behind, ends(sizes)
    a, b, *scales = operands(kind, m, len(sizes), n, k)
    if behind:
        a.view(torch.uint8)[sum(sizes):] = 0xFF  # NaN in bf16 and e4m3
    buffer = torch.full((m + 2, n + 16), POISON, dtype=torch.bfloat16, device="cuda")
    spec = spec_of(kind)
    grouped_ops.run(spec, a, b, buffer[1:-1, 8:-8], offsets, scales, fitted(config, spec), blocks)
    want = torch.full_like(buffer, POISON)
    want[1:1 + sum(sizes), 8:-8] = grouped_gemm(a, b, offsets, *scales, torch.bfloat16, torch.float64)[:sum(sizes)]
    wrong = buffer != want
    assert not wrong.any(), f"{kind} {sizes} {n} {k}: {int(wrong.sum())} wrong, rows {wrong.any(1).nonzero()[:9].t()}"


@pytest.mark.parametrize("kind", KINDS)
def test_every_tile(kind):
    for config in PROMOTED if kind == "block" else FAST:
        for sizes in SIZES.values():
            check(kind, sizes, 776, 272, config)
        check(kind, SIZES["skewed"], 1536, 528, config, behind=0, blocks=6)


@pytest.mark.parametrize("kind", KINDS)
def test_the_public_function(kind):
    for sizes in (SIZES["skewed"], SIZES["equal"]):
        check_public(kind, sizes)


def check_public(kind, sizes):
    m, offsets = sum(sizes), ends(sizes)
    a, b, sa, sb = operands(kind, m, len(sizes), 264, 400)
    got = tkq.grouped_gemm(a, b, offsets, scale_a=sa, scale_b=sb)
    assert torch.equal(got, grouped_gemm(a, b, offsets, sa, sb, torch.bfloat16, torch.float64))


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


@pytest.mark.parametrize("kind", ("bf16", "block"))
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
def test_more_than_2_31_results():
    n, k, sizes = 65536, 64, [16384, 3, 0, 16400]
    a, b, offsets = whole(sum(sizes), k), whole(4, n, k, seed=1).transpose(1, 2), ends(sizes)
    c = tkq.grouped_gemm(a, b, offsets)
    for g, (i, j) in enumerate(bounds(offsets, sum(sizes))):
        if j > i:
            rows = slice(max(i, j - 70), j)
            assert torch.equal(c[rows], (a[rows].float() @ b[g].float()).bfloat16())
