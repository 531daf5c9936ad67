"""The code of the kernel of whole sequences, by warpgroups of arrays: beside the convolution token by token."""
import numpy
import pytest
import torch

from tests.helpers.emulation import fft_whole
from tkq.convolution.fft import launch
from tkq.convolution.fft.plan import plan
from tkq.convolution.fft.spec import FftSpec


@pytest.mark.parametrize("L, taps, conjugate", [(32768, 32768, False), (20000, 50000, True)])
def test_a_sequence(L, taps, conjugate, monkeypatch):
    """Forth, times the filter's spectrum, and back: each token is written once, none behind the end."""
    fft_whole.instead_of_the_dsl(monkeypatch)
    torch.manual_seed(0)
    u, k = 16 * torch.randn(1, 1, L).bfloat16(), torch.randn(1, taps) / L**0.5
    given = launch.Given(u, k, None, True, None, None)
    spec = launch.spec_of((u,), given, conjugate)
    assert spec.whole and plan(spec, 3).warpgroups == 4
    spectrum, up = launch._whole_spectrum(given, spec)
    y = fft_whole.convolved(u[0, 0].double().numpy(), spectrum[0].double().numpy(), spec) * up.item()
    of_u, of_k = (torch.fft.rfft(x[..., :L].double().reshape(-1), 2 * L) for x in (u, k))
    want = torch.fft.irfft(of_u * (of_k.conj() if conjugate else of_k), 2 * L)[:L].numpy()
    error = numpy.linalg.norm(y - want) / numpy.linalg.norm(want)
    assert error < 1.1e-3, f"{error:.1e}"


def test_which_are_whole():
    assert [FftSpec(dtype, 64, blocks=blocks).whole for dtype in ("bf16", "fp16") for blocks in (1, 2, 4, 8)] == [
        False, False, False, True, False, False, False, False]
