"""fft_conv on the GPU: circular sequences of too many tokens to be written twice."""
import math

import pytest
import torch

import tkq
from tests.helpers.fft_conv import WHOLE, check, make
from tests.helpers.sanitizer.nan_fill import poisoned

pytestmark = pytest.mark.slow  # a kernel and large transforms; that two convolutions make one is tested on a CPU


@pytest.fixture(autouse=True)
def _poisoned():
    with poisoned():
        yield


@pytest.mark.parametrize("L, taps, gates", [(2**22, 2**22, ""), (2**22 - 3, 5000000, "pre post")])
def test_circular_of_millions_of_tokens(L, taps, gates):
    """Too many to be written twice: causal, and around the circle."""
    check(make(2, 2, L, taps, gates=gates, d=bool(gates)), causal=False)


def test_hard_signals_of_a_circle_of_millions_of_tokens():
    """Results are of one size throughout, of which a growing part is causal, the rest around the circle: their sum in
    float32, rounded once. One frequency is most of them."""
    L = 2**22
    given, g = make(2, 1, L, L), torch.Generator("cuda").manual_seed(3)
    with torch.no_grad():
        given["u"].fill_(3)
        given["u"][1].mul_(1 - 2.0 * (torch.arange(L, device="cuda") % 2))
        given["k"].copy_(torch.randn(1, L, device="cuda", generator=g) / L**0.5)
        given["k"][:, 1000] += 5
        given["k"][:, 0] += 3  # a token's own tap is in the causal part alone
    check(given, causal=False, gradients=False, more=WHOLE)


def test_nan_stay_in_their_sequence_of_a_circle_of_millions_of_tokens():
    L = 2**22 - 8
    given = make(2, 2, L, L)
    u, k = given["u"].detach(), given["k"].detach()
    clean = tkq.fft_conv(u, k, None, False)
    u[1, 0, L - 1] = math.nan
    y = tkq.fft_conv(u, k, None, False)
    bad = torch.zeros(2, 2, dtype=torch.bool, device="cuda")
    bad[1, 0] = True
    assert y[bad].isnan().all() and torch.equal(y[~bad], clean[~bad])
