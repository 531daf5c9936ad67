"""fft_conv on the GPU: numerics by the 2x rule, hard signals, ends, gates, the same bits in every run."""
import math

import pytest
import torch

import tkq
from tests.helpers.fft_conv import check, make
from tests.helpers.sanitizer.nan_fill import poisoned


@pytest.fixture(autouse=True)
def _poisoned():
    with poisoned():
        yield


@pytest.mark.parametrize("B, L, taps", [(5, 2048, 2048), (64, 2048, 777), (5, 1544, 5000), (5, 1032, 1)])
def test_numerics(B, L, taps):
    check(make(B, 3, L, taps))


@pytest.mark.parametrize("L", [4096, 2056])
def test_blocks(L):
    check(make(5, 2, L, L))


@pytest.mark.parametrize("L, taps", [(8192, 8192), (6200, 10000), (4104, 3)])
def test_four_blocks(L, taps):
    check(make(3, 2, L, taps))


def test_gates_and_odd_lengths():
    check(make(5, 2, 333, 400, gates="pre post", d=True))


def test_short():
    for L in (1, 3, 63):
        check(make(3, 2, L, 70), gradients=False, what=str(L))
    u, d = make(3, 2, 63, 1)["u"].detach(), torch.tensor([0.5, 2.0], device="cuda")
    y = tkq.fft_conv(u, torch.zeros(2, 0, device="cuda"), d)  # no taps
    assert torch.allclose(y.float(), u.float() * d[:, None], rtol=2**-7)


def test_fp16_and_strides():
    given = make(9, 3, 640, 640, "fp16", d=True)
    given["u"] = torch.randn(3, 9, 1280, device="cuda").half().transpose(0, 1)[..., 8:648]
    check(given, gradients=False)


@pytest.mark.parametrize("taps", [100, 4096, 6000])
def test_circular(taps):
    check(make(5, 3, 4096, taps), causal=False)


def test_circular_of_any_length():
    check(make(7, 2, 1000, 1500), causal=False)


@pytest.mark.parametrize("signal", ["impulses", "constant", "alternating", "range", "tiny", "huge"])
def test_hard_signals(signal):
    given = make(5, 3, 2048, 2048)
    u, t = given["u"].detach(), torch.arange(2048, device="cuda")
    with torch.no_grad():
        if signal == "impulses":
            u.zero_()
            for b in range(5):
                u[b, :, (0, 1, 64, 1000, 2047)[b]] = 1 + b
        if signal == "constant":
            u.fill_(3)
            given["k"].fill_(1 / 2048)
        if signal == "alternating":
            u.copy_(1 - 2.0 * (t % 2).expand_as(u))
        if signal == "range":
            u.mul_(torch.exp2(torch.randint(-30, 3, u.shape, device="cuda").float()))
        if signal in ("tiny", "huge"):  # each sequence of another size, its partner in a transform too
            sizes = (1e-30 if signal == "tiny" else 1e30) * torch.exp2(-3.0 * torch.arange(5, device="cuda"))
            u.mul_(sizes[:, None, None])
    check(given, gradients=signal not in ("tiny", "huge"))


def test_filters_of_any_size():
    given = make(5, 3, 2048, 2048)
    with torch.no_grad():
        given["k"].mul_(torch.tensor([1e-30, 1.0, 1e30], device="cuda")[:, None])
    check(given, gradients=False)
    with torch.no_grad():
        given["k"].zero_()
        assert not tkq.fft_conv(given["u"], given["k"]).any()


@pytest.mark.parametrize("L", [2048, 3000])
def test_nan_and_infinities_stay_in_their_sequence(L):
    given = make(5, 3, L, L)
    u = given["u"].detach()
    clean = tkq.fft_conv(u, given["k"].detach())
    u[1, 0, L - 1], u[0, 1, 5] = math.nan, math.inf
    y = tkq.fft_conv(u, given["k"].detach())
    bad = torch.zeros(5, 3, dtype=torch.bool, device="cuda")
    bad[1, 0] = bad[0, 1] = True
    assert y.isnan().all(2)[bad].all() and torch.equal(y[~bad], clean[~bad])


def test_nan_behind_the_ends():
    """Of tokens, of heads' filters, of sequences."""
    given = make(5, 3, 2040, 2040)
    wide = torch.full((6, 4, 2048), math.nan, device="cuda", dtype=torch.bfloat16)
    taps = torch.full((4, 2048), math.nan, device="cuda")
    wide[:5, :3, :2040], taps[:3, :2040] = given["u"].detach(), given["k"].detach()
    for u, k in ((wide[:5, :3, :2040], taps[:3, :2040]), (wide[:5, :3, :2039], taps[:3, :2039])):
        n = u.shape[2]
        want = tkq.fft_conv(given["u"].detach()[..., :n].contiguous(), given["k"].detach()[:, :n].contiguous())
        y = tkq.fft_conv(u, k)
        assert y.isfinite().all() and torch.equal(y, want)


@pytest.mark.parametrize("B, L", [(64, 2048), (5, 4096)])
def test_the_same_bits(B, L):
    given = make(B, 3, L, L)
    run = lambda: torch.autograd.grad(tkq.fft_conv(given["u"], given["k"]), (given["u"], given["k"]),
                                      given["u"].detach())
    assert all(torch.equal(a, b) for a, b in zip(run(), run(), strict=True))


def test_sequences_do_not_reach_each_other():
    """A sequence's result is the same with other partners' numbers a millionth and a million times as large."""
    given = make(4, 2, 2048, 2048)
    u, k = given["u"].detach(), given["k"].detach()
    y = tkq.fft_conv(u, k)
    scaled = torch.tensor([1.0, 2.0**20, 2.0**-20, 1.0], device="cuda")[:, None, None]
    assert torch.equal(tkq.fft_conv((u * scaled).bfloat16(), k), (y * scaled).bfloat16())
