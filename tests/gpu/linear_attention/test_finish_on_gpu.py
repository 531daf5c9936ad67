"""What follows the engine's launches in a backward: sums over heads that share one of q and k, dot products of rows,
sums of columns over each token and those behind it."""
import itertools

import pytest
import torch

from tests.helpers.sanitizer.nan_fill import poisoned
from tkq.linear_attention.channels.launch import column_sums
from tkq.linear_attention.channels.plan import FILLED, sums_segments
from tkq.linear_attention.finish.launch import over_shared, row_dots, sum_rounded
from tkq.reference.linear_attention import edges

BF16, F16, F32 = torch.bfloat16, torch.float16, torch.float32


def randn(*shape, dtype=F32, seed=0):
    torch.manual_seed(seed)
    return torch.randn(*shape, device="cuda").to(dtype)


@pytest.mark.parametrize("K, of, heads, dtype", [
    (64, BF16, 2, BF16), (128, BF16, 24, BF16), (128, F32, 1, BF16), (96, F32, 3, F16)])
def test_sums_over_shared_heads(K, of, heads, dtype):
    """From the first head to the last in float32, and rounded once: the same bits."""
    given = randn(2, 37, 3 * heads, K, dtype=of)
    x = randn(2, 37, 3, K, dtype=dtype)
    with poisoned():
        found = over_shared(given, x)
    want = torch.zeros_like(x, dtype=F32)
    for of_head in given.float().unflatten(2, (3, heads)).unbind(3):
        want = want + of_head
    assert found.dtype == dtype and torch.equal(found, want.to(dtype))


def test_sums_of_what_lies_in_another_order():
    """Of which a view has the shape that the kernel takes, and not its strides."""
    x = randn(2, 37, 64).transpose(0, 1)
    assert torch.equal(sum_rounded(x, BF16), sum_rounded(x.contiguous(), BF16))


def test_a_large_element_and_what_cancels():
    """Of three heads that share one: added up from the first to the last, so that the third stays."""
    given, x = randn(1, 300, 6, 64, dtype=BF16), randn(1, 300, 2, 64, dtype=BF16)
    without, large = given.clone(), 2.0**120
    given[0, 17, 0, 5], given[0, 17, 1, 5] = large, -large
    without[0, 17, :2, 5] = 0.0
    found = over_shared(given, x)
    assert torch.equal(found, over_shared(without, x)) and found[0, 17, 0, 5] == given[0, 17, 2, 5]


@pytest.mark.parametrize("V, dtype, out", [(64, BF16, F32), (80, F16, F32), (256, BF16, BF16)])
def test_dot_products(V, dtype, out):
    a, b = (randn(2, 301, 5, V, dtype=dtype, seed=i) for i in range(2))
    with poisoned():
        found = row_dots(a, b, out)
    exact, sizes = (a.double() * b.double()).sum(-1), (a.double() * b.double()).abs().sum(-1)
    room = (8 + V // 8) * 2**-24 * sizes + (2**-8 if out == BF16 else 0.0) * exact.abs()
    assert found.dtype == out and bool(((found.double() - exact).abs() <= room).all())


@pytest.mark.parametrize("end", [False, True])
def test_sums_behind_each_token(end):
    for S, C in ((1, 32), (63, 48), (64, 256), (65, 512), (300, 80), (2000, 130)):
        given, at_end = [randn(2, S, C, seed=i) for i in range(2)], randn(2, C) if end else None
        with poisoned():
            found = column_sums(*given, at_end)
        want = (given[0].double() - given[1].double()).flip(1).cumsum(1).flip(1)
        want = want + at_end.double()[:, None] if end else want
        # in a chunk 64 sums of float32, each of what is at most in the chunk; then two roundings
        torch.testing.assert_close(found.double(), want, rtol=2**-22, atol=64 * 64 * 2**-24)


def test_one_segment_and_several_give_the_same_bits():
    given = [randn(8, 700, FILLED // 8, seed=i) for i in range(2)]
    few = [x[3:4, :, 100:150].contiguous() for x in given]
    assert sums_segments(FILLED, 11) == 1 and sums_segments(50, 11) == 11
    with poisoned():
        whole, part = column_sums(*given), column_sums(*few)
    assert torch.equal(whole[3:4, :, 100:150], part)


@pytest.mark.parametrize("cuts, tokens, C", [
    ((0, 0, 1, 64, 129, 700, 700, 3000), 3013, 40), ((7, 3, 900, -5, 500, 99999), 1000, 130), ((5,), 70, 32)])
def test_packed_sequences(cuts, tokens, C):
    """Each as by itself, bit for bit, also where cu_seqlens fall; NaN in tokens of none."""
    cu, end, given = torch.tensor(cuts, device="cuda"), randn(len(cuts) - 1, C), [
        randn(1, tokens, C, seed=i) for i in range(2)]
    bounds = edges(cu, tokens).tolist()
    for x in given:
        x[:, :bounds[0]], x[:, bounds[-1]:] = torch.nan, torch.nan
    with poisoned():
        found = column_sums(*given, end, cu)
    assert not found[:, :bounds[0]].any() and not found[:, bounds[-1]:].any()
    for n, (a, e) in enumerate(itertools.pairwise(bounds)):
        alone = column_sums(*(x[:, a:e].contiguous() for x in given), end[n:n + 1])
        assert torch.equal(found[:, a:e], alone), n


def test_no_tokens():
    empty = torch.empty(2, 0, 4, 64, device="cuda", dtype=BF16)
    assert over_shared(empty, empty[:, :, :2]).shape == (2, 0, 2, 64)
    assert row_dots(empty, empty, F32).shape == (2, 0, 4)
    sums = torch.empty(2, 0, 64, device="cuda")
    assert column_sums(sums, sums).shape == (2, 0, 64)
