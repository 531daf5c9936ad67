"""fft_conv of split operands on the GPU: results as torch.fft's in float32, hard signals, ends, the same bits."""
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


def split(given, causal=True, gradients=True, what=""):
    return check(given, causal, gradients, what, "split")


@pytest.mark.parametrize("B, L, taps, dtype", [
    (5, 4096, 4096, "fp16"), (64, 4096, 777, "bf16"), (5, 3080, 5000, "fp16"), (5, 2056, 1, "bf16")])
def test_one_pass(B, L, taps, dtype):
    split(make(B, 3, L, taps, dtype))


@pytest.mark.parametrize("L, taps, dtype", [
    (8192, 8192, "fp16"), (12400, 20000, "fp16"), *(pytest.param(*each, marks=pytest.mark.slow) for each in (
        (20000, 3, "bf16"), (65536, 65536, "fp16"), (131072, 5, "fp16")))])
def test_several_passes(L, taps, dtype):
    """Rows of 128 to 2048 points; every day of 128 and 256, and elsewhere here of 4096."""
    split(make(3, 2, L, taps, dtype))


@pytest.mark.parametrize("B, L, taps, dtype", [(3, 262144, 262144, "fp16"), (1, 262136, 3, "bf16"),
                                               (1, 500001, 500001, "fp16"),
                                               pytest.param(1, 2**20, 2**20, "fp16", marks=pytest.mark.slow)])
def test_columns_of_one_to_four_parts(B, L, taps, dtype):
    split(make(B, 2, L, taps, dtype))


@pytest.mark.parametrize("L, taps", [pytest.param(2**21, 2**21, marks=pytest.mark.slow), (2**22 - 3, 5 * 2**20)])
def test_millions_of_tokens(L, taps):
    split(make(1, 2, L, taps, "fp16"))


@pytest.mark.parametrize("B, H, L, taps, dtype", [
    (2, 2, 9001, 7001, "fp16"), *(pytest.param(*each, marks=pytest.mark.slow) for each in (
        (5, 2, 333, 400, "fp16"), (1, 1, 1500001, 70001, "bf16")))])
def test_gates_and_odd_lengths(B, H, L, taps, dtype):
    split(make(B, H, L, taps, dtype, gates="pre post", d=True), gradients=L < 2**20)


@pytest.mark.slow  # of one product test_fft_conv.py has them every day
def test_short():
    for L in (1, 3, 63):
        split(make(3, 2, L, 70, "fp16"), what=str(L))
    u, d = make(3, 2, 63, 1)["u"].detach(), torch.tensor([0.5, 2.0], device="cuda")
    y = tkq.fft_conv(u, torch.zeros(2, 0, device="cuda"), d, precision="split")  # no taps
    assert torch.allclose(y.float(), u.float() * d[:, None], rtol=2**-8, atol=2**-20)


def test_strides():
    given = make(9, 3, 640, 640, "fp16", d=True)
    given["u"] = torch.randn(3, 9, 1280, device="cuda").half().transpose(0, 1)[..., 8:648]
    split(given, gradients=False)


@pytest.mark.parametrize("L, taps, dtype", [
    (4096, 100, "fp16"), (1100, 1500, "fp16"), (100000, 150000, "fp16"), *(
        pytest.param(*each, marks=pytest.mark.slow) for each in ((4096, 6000, "bf16"), (128, 128, "fp16")))])
def test_circular(L, taps, dtype):
    split(make(5, 2, L, taps, dtype), causal=False)


@pytest.mark.slow
def test_circular_of_millions_of_tokens():
    """The sum of two; what is added is float32."""
    split(make(1, 1, 2**22 - 5, 2**22, "fp16"), causal=False)


@pytest.mark.parametrize("L", [4096, 16384, 262144])
@pytest.mark.parametrize("signal", ["impulses", "constant", "alternating", "range", "tiny", "huge"])
@pytest.mark.sampled(when=lambda signal, L: L == 16384 or signal in ("impulses", "range"))
def test_hard_signals(signal, L):
    small = signal in ("tiny", "huge")
    given = make(5, 2, L, L, "bf16" if small else "fp16")
    u, t = given["u"].detach(), torch.arange(L, device="cuda")
    with torch.no_grad():
        if signal == "impulses":
            u.zero_()
            for b in range(5):
                u[b, :, (0, 1, 64, 1000, L // 2)[b]] = 1 + b
        if signal == "constant":
            u.fill_(3)
            given["k"].fill_(1 / L)
        if signal == "alternating":
            u.copy_(1 - 2.0 * (t % 2).expand_as(u))
        if signal == "range":
            u.mul_(torch.exp2(torch.randint(-10, 3, u.shape, device="cuda").float()))
        if small:  # each sequence of another size, its partner in a transform too
            sizes = (1e-30 if signal == "tiny" else 1e30) * torch.exp2(-3.0 * torch.arange(5, device="cuda"))
            u.mul_(sizes[:, None, None])
    split(given, gradients=not small)


@pytest.mark.parametrize("L", [pytest.param(4096, marks=pytest.mark.slow), 16384, 262144, 2**22])
def test_an_impulse_at_the_end(L):
    """Whose result is nearly all around the circle, where the imaginary part is: of it little is in the real part. Low
    parts end where fp16 does, 2^-24, beside an impulse of 1."""
    given = make(1, 1, L, L, "fp16")
    u, k = given["u"].detach().zero_(), given["k"].detach()
    u[..., L - 1] = 1
    y, size = tkq.fft_conv(u, k, precision="split").double(), 1 / L**0.5
    assert (y[..., L - 1] - k[:, 0]).abs().max() <= 2.0**-8 * k[0, 0].abs() + 1e-4 * size
    assert y[..., :L - 1].abs().max() <= max(1e-4 * size, 2.0**-22)


@pytest.mark.parametrize("L", [8192, 524288, pytest.param(2**21, marks=pytest.mark.slow), 2**22])
def test_the_gradient_of_impulses(L):
    """All frequencies are as large: what they are together, transformed back, is the largest number there can be."""
    given = make(2, 1, L, L, "fp16")
    u, dy = given["u"].detach().zero_(), torch.zeros(2, 1, L, device="cuda", dtype=torch.float16)
    u[:, :, 5], dy[:, :, 77] = 2, 3
    dk, = torch.autograd.grad(tkq.fft_conv(u, given["k"], precision="split"), given["k"], dy)
    want = torch.zeros(1, L, device="cuda")
    want[:, 72] = 12
    assert (dk - want).abs().max() < 12e-5


@pytest.mark.parametrize("L", [4096, 262144])
def test_filters_of_any_size(L):
    given = make(2, 3, L, L)
    with torch.no_grad():
        given["k"].mul_(torch.tensor([1e-30, 1.0, 1e30], device="cuda")[:, None])
    split(given, gradients=False)
    with torch.no_grad():
        given["k"].zero_()
        assert not tkq.fft_conv(given["u"], given["k"], precision="split").any()


def test_filters_of_one_frequency():
    """The spectrum's largest numbers are two threads' alone, not of the first warp; all are divided by that."""
    given, t = make(5, 2, 4096, 4096, "fp16"), torch.arange(4096, device="cuda")
    with torch.no_grad():
        waves = torch.stack([torch.cos(2 * math.pi * n * t / 4096) for n in (100, 48)])
        given["k"].copy_(waves)
        given["u"].add_(waves)
    split(given, causal=False, gradients=False)


@pytest.mark.parametrize("L, causal", [(63, True), (6000, True), (4096, False), (250000, True)])
def test_nan_and_infinities_stay_in_their_sequence(L, causal):
    given = make(5, 2, L, L, "fp16")
    u, k = given["u"].detach(), given["k"].detach()
    clean = tkq.fft_conv(u, k, None, causal, precision="split")
    u[1, 0, L - 1], u[0, 1, 5] = math.nan, math.inf
    y = tkq.fft_conv(u, k, None, causal, precision="split")
    bad = torch.zeros(5, 2, dtype=torch.bool, device="cuda")
    bad[1, 0] = bad[0, 1] = True
    assert y[bad].isnan().all()
    if causal:
        assert torch.equal(y[~bad], clean[~bad])
    else:  # partners in a transform are rounded together, now with zeros
        assert (y[~bad] - clean[~bad]).abs().max() <= 2**-7 * clean.abs().max()


@pytest.mark.parametrize("L, odd", [(4088, 4087), (262136, 262131)])
def test_nan_behind_the_ends(L, odd):
    """Of tokens, of taps, of heads' filters, of sequences; of a length that takes copies, and of one that does not."""
    given = make(2, 2, L, L, "fp16")
    wide = torch.full((3, 3, L + 8), math.nan, device="cuda", dtype=torch.float16)
    taps = torch.full((3, L + 8), math.nan, device="cuda")
    wide[:2, :2, :L], taps[:2, :L] = given["u"].detach(), given["k"].detach()
    for n in (L, odd):
        want = tkq.fft_conv(given["u"].detach()[..., :n].contiguous(), given["k"].detach()[:, :n].contiguous(),
                            precision="split")
        y = tkq.fft_conv(wide[:2, :2, :n], taps[:2, :n], precision="split")
        assert y.isfinite().all() and torch.equal(y, want)


def test_nan_in_a_filter_and_its_gradient():
    given = make(2, 2, 16000, 16000, "fp16")
    with torch.no_grad():
        given["k"][0, 77] = math.nan
    y = tkq.fft_conv(given["u"], given["k"], precision="split")
    assert y[:, 0].isnan().all() and y[:, 1].isfinite().all()
    dy = torch.ones_like(y)
    dy[1, 1, 5] = math.inf
    dk, = torch.autograd.grad(y, given["k"], dy)
    assert dk[0].isfinite().all() and dk[1].isnan().all()


@pytest.mark.parametrize("B, L", [(64, 4096), (5, 8192), (2, 262144), (1, 2**22)])
def test_the_same_bits(B, L):
    given = make(B, 3, L, L, "fp16")
    run = lambda: torch.autograd.grad(tkq.fft_conv(given["u"], given["k"], precision="split"),
                                      (given["u"], given["k"]), given["u"].detach())
    assert all(torch.equal(a, b) for a, b in zip(run(), run(), strict=True))


def test_tiles_in_turn():
    """More tiles than blocks: each has several, whose operands it loads ahead."""
    g = torch.Generator("cuda").manual_seed(0)
    u = torch.randn(3, 13, 262144, device="cuda", generator=g).half()
    k, dy = torch.randn(13, 262144, device="cuda", generator=g) / 512, u.flip(0)
    conv = lambda x, f: tkq.fft_conv(x, f, precision="split")
    leaves, alone = ([x.detach().requires_grad_() for x in of] for of in ((u, k), (u[:, 12:], k[12:])))
    y, y0 = conv(*leaves), conv(*alone)
    assert torch.equal(y[:, 12:], y0) and y.isfinite().all()
    found, apart = torch.autograd.grad(y, leaves, dy), torch.autograd.grad(y0, alone, dy[:, 12:])
    assert torch.equal(found[0][:, 12:], apart[0]) and torch.equal(found[1][12:], apart[1])


def test_the_op_and_the_layer():
    """Through the dispatcher, and of a layer with the option."""
    given = make(9, 3, 640, 640, "fp16")
    u, k = given["u"].detach(), given["k"].detach()
    y = tkq.fft_conv(u, k, precision="split")
    assert torch.equal(y, torch.ops.tkq.fft_conv(u, k, None, True, None, None, "split"))
    assert not torch.equal(y, tkq.fft_conv(u, k))
    layer = tkq.nn.HyenaFilterConv(3, 640, device="cuda", precision="split")
    assert torch.equal(layer(u), tkq.fft_conv(u, layer.filter(640), layer.d, precision="split"))
