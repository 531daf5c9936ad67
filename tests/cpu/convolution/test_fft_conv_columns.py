"""The code of the columns' kernels whose radix comes first, by a warpgroup of arrays: beside the transforms."""
import numpy
import pytest
import torch

from tests.cpu.convolution.test_fft_conv_passes import radix_first as exactly
from tests.helpers.emulation import fft_columns
from tkq.convolution.fft.long.spec import ColumnSpec, Size
from tkq.convolution.fft.spec import row_scale

CASES = [(1, True), (2, True), (4, True), (8, False), (8, True), (16, False), (16, True)]


@pytest.mark.parametrize("radix, split", CASES)
def test_forth_and_back(radix, split, monkeypatch):
    """A sequence that ends before the last row; the way back of what came, of tiles of two exponents."""
    fft_columns.instead_of_the_dsl(monkeypatch)
    size, spec = Size(radix, 2, split), ColumnSpec("bf16", radix, split=split)
    torch.manual_seed(0)
    x = torch.randn(size.points - 1000).bfloat16().double()
    planes = fft_columns.columns(x.numpy(), spec, size.points)
    found = planes[0] + 1j * planes[1] + (planes[2] + 1j * planes[3] if split else 0)
    want = exactly(x, size).numpy() * row_scale(spec.rows)
    close(found, want, 1e-6 if split else 1e-3)
    exponents = 100 + numpy.arange(size.tiles) % 2  # a tile of 4096 points each: those of smaller ones count as half
    fewer = numpy.exp2(exponents - exponents.max()).repeat(4096).reshape(planes.shape[1:])
    y = fft_columns.back(planes, exponents, spec, size.points)
    close(y, back_of(found * fewer, spec, size), 1e-6 if split else 1e-3)


def back_of(z, spec, size):
    """The sum over frequencies k1 = q + Q c, of rows 64 q + c."""
    row, n1, n2 = numpy.arange(spec.rows), numpy.arange(spec.rows), numpy.arange(size.row)
    r = row // 64 + spec.radix * (row % 64) - 0.25
    turned = z * numpy.exp(2j * numpy.pi * r[:, None] * n2 / size.points)
    return (numpy.exp(2j * numpy.pi * n1[:, None] * r / spec.rows) @ turned).real * row_scale(spec.rows)


def close(found, want, most):
    error = numpy.linalg.norm(found - want) / numpy.linalg.norm(want)
    assert error < most, f"{error:.1e}"
