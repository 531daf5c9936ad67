"""Sums of each token and those behind it, against float64: exactly rounded but for the last bits of float64."""
import pytest
import torch

from tests.helpers.sanitizer.nan_fill import poisoned
from tkq.linear_attention.suffix.launch import state_products, suffix_sums
from tkq.linear_attention.suffix.plan import HEADS, SEGMENTS, TILE


def make(*shape):
    torch.manual_seed(0)
    return torch.randn(*shape, device="cuda")


def check(x, less=None, end=None):
    with poisoned():
        found = suffix_sums(x, less, end)
    x, less = (y if y is None or y.dim() == 3 else y.double().sum(0) for y in (x, less))
    wide = x.double() if less is None else x.double() - less.double()
    want = wide.flip(1).cumsum(1).flip(1) + (0.0 if end is None else end.double()[:, None])
    assert found.dtype == torch.float32 and found.shape == x.shape and found.is_contiguous()
    torch.testing.assert_close(found.double(), want, rtol=2**-23, atol=1e-11)
    return found


@pytest.mark.parametrize("tokens", [1, 2, 7, 8, 9, 127, 128, 129, 1024, 5000, 40000])
def test_lengths(tokens):
    check(make(2, tokens, 3))


@pytest.mark.parametrize("heads", [1, 7, 31, 32, 33, 80])
def test_heads(heads):
    check(make(2, 1100, heads))


@pytest.mark.parametrize("tokens", [100, 2500, 33000])
@pytest.mark.parametrize("with_end", [False, True])
def test_differences(tokens, with_end):
    x, less = make(2, 2, tokens, 5)
    check(x, less, make(2, 5) if with_end else None)


@pytest.mark.parametrize("of_x, of_less", [(2, 2), (2, 1), (1, 4)])
def test_parts(of_x, of_less):
    """Of each 64 of a head's columns, in any order in memory: large ones whose sums nearly cancel."""
    x, less = 1e3 * make(5, of_x, 2, 700).permute(1, 2, 3, 0), make(of_less, 2, 700, 5)
    x[1:] -= x[:1]
    assert not x.is_contiguous()
    check(x, less, make(2, 5))


def test_segments_end_with_whole_tiles():
    """One segment a tile up to as many as a block reads totals of; then each has more of them."""
    check(make(1, SEGMENTS * TILE, 2))
    check(make(1, SEGMENTS * TILE + 1, 2))


@pytest.mark.parametrize("V, K", [(128, 128), (80, 64), (16, 32), (256, 128)])
def test_products_of_states(V, K):
    """Of every second state of several, and of those with NaN around them; large ones, too."""
    x, y = make(2, 6, 3, V + 1, K)
    x[:, :, V], y[1::2] = torch.nan, torch.nan
    x[2, 1] *= 1e6
    given = x[::2, :, :V], y[::2, :, :V]
    with poisoned():
        found = state_products(*given, -0.3)
    products = -0.3 * (given[0].double() * given[1].double())
    off = (found.double() - products.sum((-1, -2))).abs()
    assert found.shape == (3, 3) and (off <= 2**-22 * products.abs().sum((-1, -2))).all()
    assert torch.equal(state_products(*given, -0.3), found)


def test_no_states():
    assert state_products(make(0, 3, 16, 32), make(0, 3, 16, 32), 1.0).shape == (0, 3)


def test_sums_that_cancel():
    """Of large numbers little is left: in float32 it would be lost."""
    x = 1e4 * make(1, 3000, 4)
    found = check(x, x.flip(1).contiguous())
    assert found[:, 0].abs().max() < 1e-6 * found.abs().max()


@pytest.mark.parametrize("cuts, tokens, dtype", [
    ((0, 0, 1, 64, 129, 5000, 5000, 40000), 40013, torch.int32), ((7, 3, 900, -5, 500, 99999), 1000, torch.int64),
    ((3, 2500), 2600, torch.int32), ((5,), 70, torch.int32), (tuple(range(0, 3001, 3)), 3100, torch.int32)])
def test_packed_sequences(cuts, tokens, dtype):
    """Each by itself, also where cu_seqlens fall; NaN in tokens of none."""
    x, less = make(2, 1, tokens, 9)
    cu, end = torch.tensor(cuts, device="cuda", dtype=dtype), make(len(cuts) - 1, 9)
    begin, last = (min(max(c, 0), tokens) for c in (cuts[0], max(cuts)))
    for given in (x, less):
        given[:, :begin], given[:, last:] = torch.nan, torch.nan
    with poisoned():
        found = suffix_sums(x, less, end, cu)
    want = suffix_sums(x.double(), less.double(), end.double(), cu)  # by torch
    torch.testing.assert_close(found.double(), want, rtol=2**-23, atol=1e-11)
    assert not found[:, :begin].any() and not found[:, last:].any()


def test_not_a_number_stays_in_its_sequence():
    x, cu = make(1, 3000, 9), torch.tensor((0, 1100, 1700, 3000), device="cuda")
    x[0, 1500, 3] = torch.nan
    found, want = suffix_sums(x, cu=cu), suffix_sums(x.nan_to_num(), cu=cu)
    nan = found.isnan()
    assert nan[0, 1100:1501, 3].all() and nan.sum() == 401 and torch.equal(found[~nan], want[~nan])


def test_any_strides():
    x = make(3, 700, 2).permute(2, 1, 0)
    assert not x.is_contiguous() and torch.equal(check(x), check(x.contiguous()))


def test_nothing_behind_the_end_counts():
    wide = torch.full((2, 300, 16), torch.nan, device="cuda")
    wide[:, :100, :5] = make(2, 100, 5)
    assert torch.equal(check(wide[:, :100, :5]), check(wide[:, :100, :5].contiguous()))


def test_not_a_number_reaches_those_before_it():
    x = make(2, 2100, 9)
    x[1, 1500, 3] = torch.nan
    found, want = suffix_sums(x), suffix_sums(x.nan_to_num())
    nan = found.isnan()
    assert nan[1, :1501, 3].all() and nan.sum() == 1501 and torch.equal(found[~nan], want[~nan])


def test_no_tokens():
    assert suffix_sums(make(2, 0, 3)).shape == (2, 0, 3) and suffix_sums(make(0, 5, 3)).shape == (0, 5, 3)


def test_the_order_is_that_of_the_length_alone():
    """The same bits in each run, whatever the batch and the heads beside."""
    x = make(4, 9000, 20)
    found = suffix_sums(x)
    for _ in range(3):
        assert torch.equal(suffix_sums(x), found)
    assert torch.equal(suffix_sums(x[2:3, :, 11:12]), found[2:3, :, 11:12])


def test_more_heads_than_a_grid_has_rows():
    """65,536 blocks of heads, of which a grid has 65,535 but along x."""
    heads = HEADS * 65535 + 3
    x = make(1, 3, heads)
    assert torch.equal(check(x)[:, :, -3:], suffix_sums(x[:, :, -3:].contiguous()))
