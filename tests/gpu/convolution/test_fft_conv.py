"""fft_conv on the GPU: numerics by the 2x rule, hard signals, ends, gates, the same bits in every run."""
import math

import pytest
import torch

import tkq
from tests.helpers.fft_conv import NOTHING, SUMS, ULPS, WHOLE, check, filters_close, make, sequences_close
from tests.helpers.sanitizer.nan_fill import poisoned
from tkq.convolution.fft.whole import launch as whole_launch
from tkq.reference import long_convolution as reference


@pytest.fixture(autouse=True)
def _poisoned():
    with poisoned():
        yield


@pytest.mark.parametrize("B, L, taps", [
    (5, 4096, 4096), (64, 4096, 777), (5, 3080, 5000), (5, 2056, 1), (19, 1024, 1000)])
def test_numerics(B, L, taps):
    check(make(B, 3, L, taps))


@pytest.mark.parametrize("L", [8192, 4104])
def test_blocks(L):
    check(make(5, 2, L, L))


@pytest.mark.parametrize("L, taps", [(16384, 16384), (12400, 20000), (8200, 3)])
def test_four_blocks(L, taps):
    check(make(3, 2, L, taps), gradients=False)


def test_eight_blocks():
    """Of fp16; in bf16 a sequence is whole in a thread block. Forward, and mirrored."""
    given = make(3, 2, 20000, 50000, "fp16")
    y = check(given, gradients=False)
    dy = y.detach().flip(0)
    du, = torch.autograd.grad(y, given["u"], dy)
    k, zeros = given["k"].detach(), torch.zeros_like(dy)
    truth, peer = (reference.fft_conv_backward(to(dy), to(zeros), to(k))[0] for to in (torch.Tensor.double,
                                                                                     torch.Tensor.float))
    sequences_close(du, truth, peer, {"ulps": ULPS["fp16"]}, "du")


@pytest.mark.parametrize("L, taps", [(32768, 32768), (20000, 50000)])
def test_whole_sequences(L, taps):
    check(make(3, 2, L, taps))


def test_whole_sequences_with_gates_and_odd_lengths():
    check(make(2, 2, 20001, 333, gates="pre post", d=True), gradients=False)


@pytest.mark.slow  # gates and mirrored filters are whole sequences' each by itself
def test_whole_sequences_gradients_with_gates():
    check(make(2, 2, 32760, 333, gates="pre post", d=True))


def test_one_tap_of_whole_sequences():
    """Which one warp alone has."""
    u, k = make(3, 2, 32768, 1)["u"].detach(), torch.zeros(2, 32768, device="cuda")
    k[:, 1000] = 2.0
    y = tkq.fft_conv(u, k)
    assert not y[..., :1000].float().abs().max() > 2**-6
    torch.testing.assert_close(y[..., 1000:], 2 * u[..., :-1000], rtol=2**-6, atol=2**-6)


def test_nan_behind_the_ends_of_whole_sequences():
    """Of tokens, of heads' filters, of sequences."""
    given, n = make(3, 3, 20000, 20000), 20000
    wide = torch.full((4, 4, 32768), math.nan, device="cuda", dtype=torch.bfloat16)
    taps = torch.full((4, 32768), math.nan, device="cuda")
    wide[:3, :3, :n], taps[:3, :n] = given["u"].detach(), given["k"].detach()
    want = tkq.fft_conv(given["u"].detach(), given["k"].detach())
    y = tkq.fft_conv(wide[:3, :3, :n], taps[:3, :n])
    assert y.isfinite().all() and torch.equal(y, want)


@pytest.mark.parametrize("B, L, taps", [(3, 262144, 262144), (1, 262136, 3), (2, 150001, 200000)])
def test_several_passes(B, L, taps):
    check(make(B, 2, L, taps))


def test_a_million_tokens():
    check(make(1, 2, 2**20, 2**20))


@pytest.mark.parametrize("L, taps", [(2**22, 2**22), (3000000, 5000000), *(
    pytest.param(*each, marks=pytest.mark.slow) for each in ((2**21, 2**21), (2**21 - 5, 3)))])
def test_millions_of_tokens(L, taps):
    check(make(1, 2, L, taps))


@pytest.mark.slow  # gates are multiplied in shorter ones as well, by `test_several_passes_with_gates`
def test_millions_of_tokens_with_gates_and_circular():
    check(make(1, 2, 3000001, 70001, gates="pre post", d=True))
    check(make(1, 1, 2**21, 2**21 + 7, "fp16"), causal=False, gradients=False)


@pytest.mark.parametrize("signal", ["impulses", "constant", "alternating", "range"])
def test_hard_signals_of_millions_of_tokens(signal):
    L = 2**22
    given = make(2, 1, L, L)
    u = given["u"].detach()
    with torch.no_grad():
        if signal == "impulses":
            u.zero_()
            u[0, :, 64], u[1, :, L // 2] = 1, 2
        if signal == "constant":
            u.fill_(3)
            given["k"].fill_(1 / L)
        if signal == "alternating":
            u.copy_(1 - 2.0 * (torch.arange(L, device="cuda") % 2).expand_as(u))
        if signal == "range":
            u.mul_(torch.exp2(torch.randint(-30, 3, u.shape, device="cuda").float()))
    check(given, gradients=signal in ("impulses", "range"))


def test_nan_behind_the_ends_of_millions_of_tokens():
    L = 2**22 - 8
    given = make(1, 1, L, L)
    wide = torch.full((2, 2, L + 8), math.nan, device="cuda", dtype=torch.bfloat16)
    taps = torch.full((2, L + 8), math.nan, device="cuda")
    wide[:1, :1, :L], taps[:1, :L] = given["u"].detach(), given["k"].detach()
    want = tkq.fft_conv(given["u"].detach(), given["k"].detach())
    y = tkq.fft_conv(wide[:1, :1, :L], taps[:1, :L])
    assert y.isfinite().all() and torch.equal(y, want)


def test_more_than_2_31_elements():
    """Of tokens, and of what lies between passes: offsets of 64 bits."""
    B, L = 520, 2**22
    u = torch.empty(B, 1, L, device="cuda", dtype=torch.bfloat16)
    torch.manual_seed(0)
    for b in (0, 1, 511, 512, B - 1):
        u[b].normal_()
    u[2:511], u[513:B - 1] = u[1], u[0]
    k = torch.randn(1, 777, device="cuda") / 28
    y = tkq.fft_conv(u, k)
    for b in (0, 1, 511, 512, B - 1):
        assert torch.equal(y[b:b + 1], tkq.fft_conv(u[b:b + 1].clone(), k)), b
    assert torch.equal(y[B - 2], y[0])


@pytest.mark.alone
@pytest.mark.parametrize("precision", ["half", pytest.param("split", marks=pytest.mark.slow)])
def test_spectra_of_more_than_2_31_numbers(precision):
    """Offsets of 64 bits, of many heads' filters."""
    H, L = 2**18 + 3, 4096
    u, k = torch.randn(1, 1, L, device="cuda").bfloat16(), torch.randn(H, 1, device="cuda")
    y = tkq.fft_conv(u.expand(1, H, L), k, precision=precision)
    for h in (0, 1, 2**17, 2**18 - 1, 2**18, H - 1):
        assert (y[0, h] - k[h] * u[0, 0]).abs().max() <= 2**-6 * (k[h] * u[0, 0]).abs().max(), h


def test_tiles_in_turn():
    """More tiles than warpgroups: each has several, whose operands it loads ahead."""
    g = torch.Generator("cuda").manual_seed(0)
    u = torch.randn(2, 13, 262144, device="cuda", generator=g).bfloat16()
    k, dy = torch.randn(13, 262144, device="cuda", generator=g) / 512, u.flip(0)
    y, y0 = (tkq.fft_conv(x, k[h]) for x, h in ((u, slice(0, 13)), (u[:, 12:], slice(12, 13))))
    assert torch.equal(y[:, 12:], y0) and y.isfinite().all()
    leaves = [x.requires_grad_() for x in (u, k)]
    found = torch.autograd.grad(tkq.fft_conv(*leaves), leaves, dy)
    alone = [x.detach().requires_grad_() for x in (u[:, 12:], k[12:])]
    apart = torch.autograd.grad(tkq.fft_conv(*alone), alone, dy[:, 12:])
    assert torch.equal(found[0][:, 12:], apart[0]) and torch.equal(found[1][12:], apart[1])


@pytest.mark.parametrize("B, L, causal", [(9, 4096, True), (7, 8192, True), (130, 1024, False), (3, 20000, True)])
def test_tiles_and_heads_in_turn(B, L, causal):
    """More heads than SMs and more tiles than warpgroups: each has several of both, the next one loaded ahead."""
    g = torch.Generator("cuda").manual_seed(0)
    u, k = (torch.randn(*shape, L, device="cuda", generator=g) for shape in ((B, 140), (140,)))
    u = u.bfloat16()
    leaves = [x.requires_grad_() for x in (u, k)]
    y = tkq.fft_conv(*leaves, None, causal)
    du, dk = torch.autograd.grad(y, leaves, u.detach().flip(0))
    for h in (0, 7, 131, 132, 139):
        alone = [x.detach().requires_grad_() for x in (u[:, h:h + 1], k[h:h + 1])]
        y0 = tkq.fft_conv(*alone, None, causal)
        du0, dk0 = torch.autograd.grad(y0, alone, u.detach().flip(0)[:, h:h + 1])
        assert torch.equal(y[:, h:h + 1], y0) and torch.equal(du[:, h:h + 1], du0), h
        assert (dk[h] - dk0[0]).norm() <= 1e-5 * dk0.norm(), h  # of sums in another order
    for h in range(140):  # each begins at another place of a block's tiles
        assert torch.equal(y[:, h:h + 1], tkq.fft_conv(u[:, h:h + 1].detach(), k[h:h + 1].detach(), None, causal)), h
    assert y.isfinite().all()


def test_gradients_of_whole_sequences_some_heads_at_a_time(monkeypatch):
    """As many as a workspace has room for the spectra of; and of the filter alone."""
    given = make(3, 5, 20000, 20000)
    leaves, dy = (given["u"], given["k"]), given["u"].detach().flip(0)
    run = lambda of: torch.autograd.grad(tkq.fft_conv(*leaves), of, dy)
    du, dk = run(leaves)
    monkeypatch.setattr(whole_launch, "WORKSPACE", 2 * 3 * 2 * whole_launch.SPECTRUM)  # two heads
    du2, dk2 = run(leaves)
    assert torch.equal(du, du2) and torch.equal(dk, dk2) and torch.equal(dk, run(leaves[1:])[0])


def test_several_passes_with_gates():
    check(make(2, 2, 140000, 70001, gates="pre post", d=True))


def test_several_passes_of_fp16_and_of_circular_ones():
    check(make(2, 1, 262144, 1000, "fp16"), gradients=False)
    check(make(2, 1, 100000, 150000), causal=False)


def test_gates_and_odd_lengths():
    check(make(5, 2, 333, 400, gates="pre post", d=True))


def test_short():
    for L in (1, 3, 63):
        check(make(3, 2, L, 70), gradients=False, what=str(L))
    u, d = make(3, 2, 63, 1)["u"].detach(), torch.tensor([0.5, 2.0], device="cuda")
    y = tkq.fft_conv(u, torch.zeros(2, 0, device="cuda"), d)  # no taps
    assert torch.allclose(y.float(), u.float() * d[:, None], rtol=2**-7, atol=2**-7)


def test_fp16_and_strides():
    given = make(9, 3, 640, 640, "fp16", d=True)
    given["u"] = torch.randn(3, 9, 1280, device="cuda").half().transpose(0, 1)[..., 8:648]
    check(given, gradients=False)


@pytest.mark.parametrize("L, taps", [(4096, 100), (4096, 4096), (4096, 6000), (1024, 1024), (128, 200)])
def test_circular(L, taps):
    check(make(5, 3, L, taps), causal=False)


def test_circular_of_any_length():
    check(make(7, 2, 1100, 1500), causal=False)


@pytest.mark.parametrize("L", [4096, 32768, 262144])
@pytest.mark.parametrize("signal", ["impulses", "constant", "alternating", "range", "tiny", "huge"])
def test_hard_signals(signal, L):
    given = make(5, 3 if L == 4096 else 1, L, L)
    u, t = given["u"].detach(), torch.arange(L, device="cuda")
    with torch.no_grad():
        if signal == "impulses":
            u.zero_()
            for b in range(5):
                u[b, :, (0, 1, 64, 1000, L - 1)[b]] = 1 + b
        if signal == "constant":
            u.fill_(3)
            given["k"].fill_(1 / L)
        if signal == "alternating":
            u.copy_(1 - 2.0 * (t % 2).expand_as(u))
        if signal == "range":
            u.mul_(torch.exp2(torch.randint(-30, 3, u.shape, device="cuda").float()))
        if signal in ("tiny", "huge"):  # each sequence of another size, its partner in a transform too
            sizes = (1e-30 if signal == "tiny" else 1e30) * torch.exp2(-3.0 * torch.arange(5, device="cuda"))
            u.mul_(sizes[:, None, None])
    check(given, gradients=signal not in ("tiny", "huge"), more=WHOLE if L == 32768 else NOTHING)


@pytest.mark.parametrize("L", [4096, 32768, 262144])
def test_filters_of_any_size(L):
    given = make(5, 3, L, L)
    with torch.no_grad():
        given["k"].mul_(torch.tensor([1e-30, 1.0, 1e30], device="cuda")[:, None])
    check(given, gradients=False)
    with torch.no_grad():
        given["k"].zero_()
        assert not tkq.fft_conv(given["u"], given["k"]).any()


def test_whole_filters_whose_spectra_no_float32_has():
    """Results that are finite: of a filter of 2e35 throughout, and of one tap of 3e38."""
    u = 2 * torch.rand(2, 2, 32768, device="cuda", generator=torch.Generator("cuda").manual_seed(0)).bfloat16() - 1
    u[1] = 0.01
    k = torch.full((2, 32768), 2e35, device="cuda")
    k[1] = 0
    k[1, 5] = 3e38
    y, truth = tkq.fft_conv(u, k).double(), reference.fft_conv(u.double(), k.double())
    assert ((y - truth).norm(dim=-1) <= SUMS * truth.norm(dim=-1)).all()


def test_filters_of_one_frequency():
    """The spectrum's largest number is one that a single thread has; all are divided by that."""
    given, t = make(5, 2, 4096, 4096), torch.arange(4096, device="cuda")
    with torch.no_grad():
        waves = torch.stack([torch.cos(2 * math.pi * n * t / 4096) for n in (100, 2248)])
        given["k"].copy_(waves)
        given["u"].add_(waves)
    check(given, causal=False, gradients=False)


def test_filters_of_any_size_in_turn():
    """A block goes through several heads, each with a scale of its own."""
    sizes = torch.exp2(torch.arange(270, device="cuda") % 7 * 10 - 30.0)
    given = make(1, 270, 256, 256)
    with torch.no_grad():
        given["k"].mul_(sizes[:, None])
    check(given, gradients=False)


@pytest.mark.parametrize("L, causal, precision", [
    (63, True, "half"), (6000, True, "half"), (4096, False, "half"), (4096, False, "split"), (9000, True, "half"),
    (20000, True, "half"), (250000, True, "half")])
def test_nan_and_infinities_stay_in_their_sequence(L, causal, precision):
    """Of a small filter: of a larger one the factor of such a sequence's results, which are zeros before, would be
    infinite, and they NaN without being made so."""
    given = make(5, 2, L, L)
    u, k = given["u"].detach(), given["k"].detach() * 2**-10
    clean = tkq.fft_conv(u, k, None, causal, precision=precision)
    u[1, 0, L - 1], u[0, 1, 5] = math.nan, math.inf
    y = tkq.fft_conv(u, k, None, causal, precision=precision)
    bad = torch.zeros(5, 2, dtype=torch.bool, device="cuda")
    bad[1, 0] = bad[0, 1] = True
    assert y[bad].isnan().all()
    if causal:
        assert torch.equal(y[~bad], clean[~bad])
    else:  # partners in a transform are rounded together, now with zeros
        assert (y[~bad] - clean[~bad]).abs().max() <= 2**-6 * clean.abs().max()


def test_nan_behind_the_ends():
    """Of tokens, of heads' filters, of sequences."""
    given = make(5, 3, 4088, 4088)
    wide = torch.full((6, 4, 4096), math.nan, device="cuda", dtype=torch.bfloat16)
    taps = torch.full((4, 4096), math.nan, device="cuda")
    wide[:5, :3, :4088], taps[:3, :4088] = given["u"].detach(), given["k"].detach()
    for n in (4088, 4087):
        u, k = (given[name].detach()[..., :n].contiguous() for name in "uk")
        for precision in ("half", "split"):
            want = tkq.fft_conv(u, k, precision=precision)
            y = tkq.fft_conv(wide[:5, :3, :n], taps[:3, :n], precision=precision)
            assert y.isfinite().all() and torch.equal(y, want), (n, precision)


def test_nan_behind_the_ends_of_several_passes():
    """And of taps; of a length that takes copies, and of one that does not."""
    given = make(2, 2, 262136, 262136)
    wide = torch.full((3, 3, 262144), math.nan, device="cuda", dtype=torch.bfloat16)
    taps = torch.full((3, 262144), math.nan, device="cuda")
    wide[:2, :2, :262136], taps[:2, :262136] = given["u"].detach(), given["k"].detach()
    for n in (262136, 262131):
        want = tkq.fft_conv(given["u"].detach()[..., :n].contiguous(), given["k"].detach()[:, :n].contiguous())
        y = tkq.fft_conv(wide[:2, :2, :n], taps[:2, :n])
        assert y.isfinite().all() and torch.equal(y, want)


@pytest.mark.parametrize("L", [32768, 262144])
def test_nan_in_a_filter_and_its_gradient(L):
    given = make(2, 2, L, L)
    with torch.no_grad():
        given["k"][0, 77] = math.nan
    y = tkq.fft_conv(given["u"], given["k"])
    assert y[:, 0].isnan().all() and y[:, 1].isfinite().all()
    dy = torch.ones_like(y)
    dy[1, 1, 5] = math.inf
    dk, = torch.autograd.grad(y, given["k"], dy)
    assert dk[0].isfinite().all() and dk[1].isnan().all()


@pytest.mark.parametrize("B, L", [(64, 4096), (5, 8192), (50, 32768), (2, 262144)])
def test_the_same_bits(B, L):
    given = make(B, 3, L, L)
    run = lambda: torch.autograd.grad(tkq.fft_conv(given["u"], given["k"]), (given["u"], given["k"]),
                                      given["u"].detach())
    assert all(torch.equal(a, b) for a, b in zip(run(), run(), strict=True))


def test_sequences_do_not_reach_each_other():
    """A sequence's result is the same with a partner a millionth and a million times as large."""
    given = make(5, 2, 4096, 4096)
    u, k = given["u"].detach(), given["k"].detach()
    y = tkq.fft_conv(u, k, None, False)
    scaled = torch.tensor([1.0, 2.0**20, 2.0**-20, 1.0, 1.0], device="cuda")[:, None, None]
    assert torch.equal(tkq.fft_conv((u * scaled).bfloat16(), k, None, False), (y * scaled).bfloat16())


def test_partners_of_any_size():
    """Of a circular convolution's gradients, where two sequences are one transform."""
    given = make(5, 2, 4096, 4096)
    with torch.no_grad():
        given["u"].mul_(torch.tensor([1.0, 2.0**14, 2.0**-14, 1.0, 1.0], device="cuda")[:, None, None])
    check(given, causal=False)


@pytest.mark.parametrize("L, causal, size", [(4096, True, -60), (8192, True, -60), (1024, False, -60),
                                             (32768, True, -60), (32768, True, 52), (262144, True, -64)])
def test_a_filters_gradient_of_numbers_of_any_size(L, causal, size):
    """What both spectra were divided by is together less than an fp32 has as a normal number; or gradients of up to
    2^122 are sums of 32768 numbers, which an fp32 has no more where they are divided after."""
    given = make(3, 2, L, L)
    with torch.no_grad():
        given["u"].copy_((1 + torch.rand(3, 2, L, device="cuda")) * 2.0**size)
    u, k = given["u"].detach(), given["k"]
    dy = u.flip(0)
    dk, = torch.autograd.grad(tkq.fft_conv(u, k, None, causal), k, dy)
    truth = reference.fft_conv_backward(dy.double(), u.double(), k.detach().double(), None, causal)[1]
    filters_close(dk, truth, "dk", SUMS)
