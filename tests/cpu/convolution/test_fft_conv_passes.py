"""Transforms of several passes on a CPU: plans, and the kernels' steps in float64."""
import math

import pytest
import torch

from tkq.convolution.fft.long.launch import WORKSPACE, _heads, column_recipe
from tkq.convolution.fft.long.spec import ColumnSpec, LargestSpec, RowSpec, Size, size_of
from tkq.convolution.fft.plan import most_tokens
from tkq.convolution.fft.spec import MOST_TOKENS
from tkq.reference import long_convolution as reference

WIDE = torch.float64


def test_every_length_has_a_size():
    for tokens in (1, 8192, 8193, 32769, 65536, 262144, 262145, 524288, 524289, MOST_TOKENS):
        size = size_of(tokens)
        half = size.points // 2
        assert size.points >= tokens and (half < tokens or size.points == 8192)
        assert size.tiles * 4096 == size.points == 64 * size.radix * size.row
        # a sequence below 2^(above + 1) has a spectrum no longer than 2^13, and one of 4096 points more than a bit less
        assert 12 < size.above + 1 + math.log2(size.points * size.scale) <= 13
    assert size_of(MOST_TOKENS + 1) is None and most_tokens(True) == MOST_TOKENS == 2 * most_tokens(False)


def test_specs_refuse_by_name():
    for words, make in (("ColumnSpec: radix is 3", lambda: ColumnSpec("bf16", 3)),
                        ("RowSpec: rows is 3", lambda: RowSpec(3)),
                        ("LargestSpec: dtype is 'fp8'", lambda: LargestSpec("fp8"))):
        with pytest.raises(ValueError, match=words):
            make()


def test_heads_are_covered_once():
    for heads, each in ((768, 6 << 20), (1, 1 << 40), (7, 1), (10, WORKSPACE // 3)):
        slices = _heads(heads, each)
        assert [h for s in slices for h in range(heads)[s]] == list(range(heads))
        assert all((s.stop - s.start) * each <= WORKSPACE or s.stop - s.start == 1 for s in slices)


@pytest.mark.parametrize("dtype", ["bf16", "fp32"])
@pytest.mark.parametrize("radix", [1, 2, 4])
def test_tiles_of_columns_fit(dtype, radix):
    for back in (False, True):
        spec, config = column_recipe(ColumnSpec(dtype, radix), back).args
        held = 2 * 8192 + 16 * spec.rows + config.warpgroups * radix * 128 * spec.cols * 2
        assert held * config.blocks < 220 << 10


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
