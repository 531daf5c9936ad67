"""Transforms of several passes on a CPU: plans, and the kernels' steps in float64."""
import dataclasses
import math

import pytest
import torch

from tkq.convolution.fft.long.launch import WORKSPACE, column_recipe, slices
from tkq.convolution.fft.long.spec import ColumnSpec, LargestSpec, RowSpec, Size, size_of
from tkq.convolution.fft.long.steps import parts_of, powers_of, sums
from tkq.convolution.fft.spec import MOST_TOKENS
from tkq.reference import long_convolution as reference

WIDE = torch.float64


def test_every_length_has_a_size():
    for tokens in (1, 8192, 8193, 32769, 65536, 262144, 262145, 524288, 524289, 1048577, 2097153, MOST_TOKENS):
        size = size_of(tokens)
        assert size_of(tokens, True) == dataclasses.replace(size, split=True)
        half = size.points // 2
        assert size.points >= tokens and (half < tokens or size.points == 8192)
        assert size.tiles * 4096 == size.points == 64 * size.radix * size.row
        # a sequence below 2^(above + 1) has a spectrum no longer than 2^13, and one of 4096 points more than a bit less
        assert 12 < size.above + 1 + math.log2(size.points * size.scale) <= 13
    assert size_of(MOST_TOKENS + 1) is None and size_of(MOST_TOKENS).radix == 16


def test_specs_refuse_by_name():
    for words, make in (("ColumnSpec: radix is 3", lambda: ColumnSpec("bf16", 3)),
                        ("ColumnSpec: noted is True", lambda: ColumnSpec("bf16", 16, noted=True)),
                        ("RowSpec: rows is 3", lambda: RowSpec(3)),
                        ("LargestSpec: dtype is 'fp8'", lambda: LargestSpec("fp8"))):
        with pytest.raises(ValueError, match=words):
            make()


def test_heads_are_covered_once():
    for heads, each in ((768, 6 << 20), (1, 1 << 40), (7, 1), (10, WORKSPACE // 3)):
        found = slices(heads, each)
        assert [h for s in found for h in range(heads)[s]] == list(range(heads))
        assert all((s.stop - s.start) * each <= WORKSPACE or s.stop - s.start == 1 for s in found)


@pytest.mark.parametrize("dtype", ["bf16", "fp32"])
@pytest.mark.parametrize("radix", [1, 2, 4])
def test_tiles_of_columns_fit(dtype, radix):
    for back in (False, True):
        spec, config = column_recipe(ColumnSpec(dtype, radix), back).args
        held = 2 * 8192 + 16 * spec.rows + config.warpgroups * radix * 128 * spec.cols * 2
        assert held * config.blocks < 220 << 10


@pytest.mark.parametrize("split", [False, True])
@pytest.mark.parametrize("radix", [1, 2, 4, 8, 16])
def test_tiles_fit_where_the_radix_comes_first(radix, split):
    spec = ColumnSpec("bf16", radix, split=split)
    assert spec.radix_first == (split or radix > 4)
    if spec.radix_first:
        for back in (False, True):
            config = column_recipe(spec, back).args[1]
            factors = (1 + split) * (2 if back else 4) * 8192
            assert factors + 16 * spec.rows + config.warpgroups * spec.tile_bytes < 220 << 10
        # a thread's parts are a tile, once
        assert spec.each * parts_of(spec.cols, spec.each) * 128 == 64 * spec.cols


def number(x):
    return x.real, x.imag


@pytest.mark.parametrize("n", [1, 2, 4, 8, 16])
def test_sums_of_a_radix(n):
    """Their order, forth and back; powers of a root."""
    x = torch.randn(n, dtype=torch.complex128)
    for back in (False, True):
        want = torch.fft.ifft(x, norm="forward") if back else torch.fft.fft(x)
        found = torch.stack([torch.complex(*v) for v in sums([number(v) for v in x], back)])
        torch.testing.assert_close(found, want)
    one = torch.polar(torch.tensor(1.0, dtype=WIDE), torch.tensor(0.3, dtype=WIDE))
    for i, v in enumerate(powers_of(number(one), n)):
        torch.testing.assert_close(torch.complex(*v), one**(i + 1))


def root(i, n):
    return torch.polar(torch.ones_like(i, dtype=WIDE), -2 * math.pi * i.to(WIDE) / n)


def columns(x, size):
    """As `Columns` goes about it: of a radix q products with every q-th row, sums of q of them."""
    q, rows = size.radix, 64 * size.radix
    x = torch.nn.functional.pad(x, (0, size.points - len(x))).view(rows, size.row).to(torch.complex128)
    c, n, r = torch.arange(64) - 0.25, torch.arange(64), torch.arange(rows) - 0.25
    found = [(root(c[:, None] * n, 64) @ x[a::q]) * root(a * c, rows)[:, None] for a in range(q)]
    turned = [sum(v * root(torch.tensor(a * k), q) for a, v in enumerate(found)) for k in range(q)]
    return torch.cat(turned) * root(r[:, None] * torch.arange(size.row), size.points)


def radix_first(x, size):
    """As `RadixFirstColumns` goes about it: sums of q rows 64 apart, then products; rows in an order of their own."""
    q, rows = size.radix, 64 * size.radix
    x = torch.nn.functional.pad(x, (0, size.points - len(x))).view(q, 64, size.row).to(torch.complex128)
    a, b, c = torch.arange(q), torch.arange(64), torch.arange(64)
    found = []
    for k in range(q):
        z = (x * root(a * (k - 0.25), q)[:, None, None]).sum(0) * root(b * (k - 0.25), rows)[:, None]
        r = k + q * c - 0.25
        found.append(root(b * c[:, None], 64) @ z * root(r[:, None] * torch.arange(size.row), size.points))
    return torch.cat(found)


def test_the_order_of_rows():
    """Where the radix comes first, forth and back agree on it."""
    for size in (Size(1, 2), Size(4, 2), Size(8, 2), Size(16, 2)):
        x = torch.randn(size.points, dtype=WIDE)
        q, k1 = size.radix, torch.arange(64 * size.radix)
        want, found = columns(x, size), radix_first(x, size)
        torch.testing.assert_close(found[k1 % q * 64 + k1 // q], want)
        row = torch.arange(64)
        for k in range(q):  # as `RadixFirstBack` finds them
            torch.testing.assert_close(found[row % q * 64 + row // q + 64 // q * k], want[row + 64 * k])


def back(z, size):
    """As `ColumnsBack` goes about it."""
    q, rows = size.radix, 64 * size.radix
    c, n, r = torch.arange(64) - 0.25, torch.arange(64), torch.arange(rows) - 0.25
    z = (z * root(-r[:, None] * torch.arange(size.row), size.points)).view(q, 64, size.row)
    y = torch.empty(rows, size.row, dtype=WIDE)
    for a in range(q):
        total = sum(z[k] * root(torch.tensor(-a * k), q) for k in range(q)) * root(-a * c, rows)[:, None]
        y[a::q] = (root(c[:, None] * n, 64).mH @ total).real
    return y.view(-1) / size.points


@pytest.mark.parametrize("size, L", [(Size(1, 2), 8000), (Size(2, 2), 16384), (Size(4, 2), 30001)])
def test_a_convolution_in_passes(size, L):
    torch.manual_seed(0)
    u, k, dy = (torch.randn(L, dtype=WIDE) for _ in range(3))
    x, f, d = (torch.fft.fft(columns(t, size)) for t in (u, k, dy))
    want = reference.fft_conv(u[None, None], k[None])[0, 0]
    du, dk, *_ = reference.fft_conv_backward(dy[None, None], u[None, None], k[None])
    for product, right in ((x * f, want), (d * f.conj(), du[0, 0]), (x.conj() * d, dk[0])):
        found = back(torch.fft.ifft(product, norm="forward"), size)[:L]
        torch.testing.assert_close(found, right, rtol=1e-8, atol=1e-8)
