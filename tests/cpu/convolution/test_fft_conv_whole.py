"""The code of the kernels of whole sequences, by warpgroups of arrays: beside the convolution token by token."""
import numpy
import pytest
import torch

from tests.helpers.emulation import fft_whole
from tkq.convolution.fft import launch
from tkq.convolution.fft.plan import plan
from tkq.convolution.fft.spec import FftSpec
from tkq.convolution.fft.whole.gradient import SCALE
from tkq.convolution.fft.whole.launch import in_order
from tkq.reference import long_convolution as reference
from tkq.tile import halves


@pytest.mark.parametrize("L, mirrored", [(32768, False), (20000, True)])
def test_a_sequence(L, mirrored, monkeypatch):
    """The filter's spectrum; forth, times that, and back: each token is written once, none behind the end."""
    torch.manual_seed(0)
    u, k = 16 * torch.randn(1, 1, L).bfloat16(), torch.randn(1, L) / L**0.5
    spec = launch.spec_of((u,), launch.Given(u, k, None, True, None, None), mirrored)
    assert spec.whole and plan(spec, 3).warpgroups == 4
    taps = torch.nn.functional.pad(k[0].double(), (0, 32768 - L))
    with monkeypatch.context() as patched:
        spectrum = fft_whole.spectra(taps.numpy(), 127 + 7, mirrored, patched)
    moved = torch.polar(torch.ones(32768).double(), torch.arange(32768).double() * (torch.pi / 65536))
    want, found = torch.fft.fft(taps * moved) / 128, in_order(torch.from_numpy(spectrum)[None])[0]
    assert (found - (want.conj() if mirrored else want)).norm() < 5e-4 * want.norm()
    fft_whole.instead_of_the_dsl(monkeypatch)
    y, kept = fft_whole.convolved(u[0, 0].double().numpy(), spectrum, spec)
    own = fft_whole.own_spectrum(u[0, 0].double().numpy(), spec)
    assert all(numpy.array_equal(a, b) for a, b in zip(kept, own, strict=True))
    y = y * 128
    of_u, of_k = (torch.fft.rfft(x.double().reshape(-1), 2 * L) for x in (u, k))
    want = torch.fft.irfft(of_u * (of_k.conj() if mirrored else of_k), 2 * L)[:L].numpy()
    error = numpy.linalg.norm(y - want) / numpy.linalg.norm(want)
    assert error < 1.1e-3, f"{error:.1e}"


def test_a_filters_gradient(monkeypatch):
    """Two sequences' products; the taps from the spectrum."""
    torch.manual_seed(0)
    L = 20000
    u, dy = (16 * torch.randn(2, 1, L).bfloat16() for _ in range(2))
    given = launch.Given(u, torch.zeros(1, L), None, True, None, None)
    spec = launch.spec_of((u, dy), given)
    with monkeypatch.context() as patched:
        fft_whole.instead_of_the_dsl(patched)
        pairs = [[fft_whole.own_spectrum(x[b, 0].double().numpy(), spec) for x in (u, dy)] for b in range(2)]
        sums = fft_whole.product_sums(pairs, spec) * 2.0**SCALE
    found = torch.from_numpy(fft_whole.taps_of(sums, monkeypatch))[:L]
    want = reference.fft_conv_backward(dy.double(), u.double(), given.k.double())[1][0]
    assert (found - want).norm() < 1e-3 * want.norm(), (found - want).norm() / want.norm()


def test_words_of_other_tiles():
    with pytest.raises(TypeError, match="narrow_words: operand a is 3, allowed is an fp32 register tile"):
        halves.narrow_words(3)
    with pytest.raises(TypeError, match="fill_words: dst is 3, allowed with 2 words is an fp16 register tile of 8 col"):
        halves.fill_words(3, [1, 2])


def test_which_are_whole():
    assert [FftSpec(dtype, 64, blocks=blocks).whole for dtype in ("bf16", "fp16") for blocks in (1, 2, 4, 8)] == [
        False, False, False, True, False, False, False, False]
