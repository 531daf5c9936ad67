"""Long convolutions on a CPU: the reference tap by tap, plans, the filter's parts, how transforms go into tiles."""
import math

import numpy as np
import pytest
import torch

import tkq
from tkq.convolution.fft import launch
from tkq.convolution.fft.plan import blocks_of, has_transform, plan, splits_of, tiles_of, transform_rows
from tkq.convolution.fft.radix import Radix
from tkq.convolution.fft.spec import BLOCKS, COLUMN_SCALE, TRANSFORM_ROWS, FftSpec, row_scale
from tkq.convolution.fft.tables import Tables, halved_place, halved_row, series, token_of
from tkq.reference import long_convolution as reference

WIDE = torch.float64


def randn(*shape):
    return torch.randn(*shape, dtype=WIDE)


@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize("taps", [3, 7, 12])
def test_reference(causal, taps):
    torch.manual_seed(0)
    given = [t.requires_grad_() for t in (randn(2, 3, 7), randn(3, taps), randn(3), randn(2, 3, 7), randn(2, 3, 7))]
    u, k, d, pre, post = given
    v, want = u * pre, 0
    for j in range(taps):
        moved = torch.nn.functional.pad(v, (j, 0))[..., :7] if causal else v.roll(j, 2)
        want = want + k[:, j, None] * moved
    want = (want + d[:, None] * v) * post
    dy = randn(2, 3, 7)
    call = [t.detach() for t in given]
    torch.testing.assert_close(reference.fft_conv(*call[:3], causal, *call[3:]), want.detach())
    wanted = torch.autograd.grad(want, given, dy)
    found = reference.fft_conv_backward(dy, *call[:3], causal, *call[3:])
    for ours, right in zip(found, wanted, strict=True):
        torch.testing.assert_close(ours, right)


def test_the_op_and_its_gradients_on_a_cpu():
    u, k = torch.randn(2, 3, 7).bfloat16().requires_grad_(), torch.randn(3, 4, requires_grad=True)
    y = tkq.fft_conv(u, k)
    y.sum().backward()
    assert y.dtype == u.grad.dtype == torch.bfloat16 and k.grad.dtype == torch.float32 and k.grad.shape == k.shape


@pytest.mark.parametrize("causal", [True, False])
def test_every_length_has_a_plan(causal):
    for L in (1, 2, 63, 64, 65, 1000, 1024, 2048, 2049, 4096, 4097, 8192, 8193, 16384, 16385, 32768, 32769):
        rows = transform_rows(L, causal)
        most = 32768 if causal else 16384
        if most < L:
            assert rows is None
            continue
        direct = causal or has_transform(L)
        tokens, causal_ = (L, causal) if direct else (2 * L, True)
        spec = FftSpec("bf16", rows, causal_, blocks=blocks_of(tokens, causal_))
        assert spec.blocks * spec.points >= tokens and (causal_ or spec.points == L)
        assert spec.blocks == 1 or rows == 64
        for batch in (1, 2, 3, 64, 1000):
            config = plan(spec, batch)
            assert 1 <= config.warpgroups <= (4 if spec.whole else 3)
            assert (tiles_of(spec, batch) - 1) * spec.sequences < batch <= tiles_of(spec, batch) * spec.sequences
            for heads in (1, 7, 768):
                assert splits_of(spec, config, batch, heads) <= max(1, tiles_of(spec, batch))


def test_split_ones_have_a_plan():
    for L in (1, 64, 1000, 2049, 4096, 4097, 32769):
        rows = transform_rows(L, True, True)
        assert (rows is None) == (L > 4096) and (rows is None or 64 * rows >= L)
        assert transform_rows(L, False, True) == (L // 64 if has_transform(L) else transform_rows(2 * L, True, True))
    for batch in (1, 2, 1000):
        assert plan(FftSpec("fp16", 64, split=True), batch).warpgroups == min(2, batch)


def test_roots_are_those_of_fp32():
    """Of an eighth of a turn, in float64: what the series leaves off."""
    for i in range(-64, 65):
        x = i / 64 * math.pi / 4
        c, s = series(x)
        assert max(abs(c - math.cos(x)), abs(s - math.sin(x))) < 2.0**-28


class RoomOfOneThread:
    """`radix.Room` of all threads' numbers at once."""

    def __init__(self, points):
        self.numbers = torch.full((points + points // 8,), math.nan, dtype=torch.complex128)

    def put(self, i, x):
        self.numbers[i + i // 8] = torch.complex(*x)

    def get(self, i):
        found = self.numbers[i + i // 8]
        return found.real.clone(), found.imag.clone()

    def meet(self):
        pass


@pytest.mark.parametrize("inverse", [False, True])
@pytest.mark.parametrize("points", [128, 256, 512, 1024, 2048, 4096])
def test_transforms_of_filters(points, inverse):
    """The kernels' steps, of all threads at once, in float64."""
    torch.manual_seed(0)

    def root(i, n):
        angle = 2 * math.pi * i.to(WIDE) / n
        return angle.cos(), angle.sin()

    radix, x = Radix(points, inverse, root), torch.randn(points, dtype=torch.complex128)
    me = torch.arange(radix.threads)
    found = radix.run([(v.real, v.imag) for v in x.view(8, -1)], RoomOfOneThread(points), me)
    want = torch.fft.ifft(x) * points if inverse else torch.fft.fft(x)
    torch.testing.assert_close(torch.stack([torch.complex(*v) for v in found]).view(-1), want)


@pytest.mark.parametrize("L, taps", [(6000, 9000), (8192, 1), (13000, 12900), (32768, 32768)])
def test_parts_of_the_filter(L, taps):
    """Blocks with the parts' spectra, forth and mirrored."""
    torch.manual_seed(0)
    u, k, d = randn(1, 2, L), torch.randn(2, taps), torch.randn(2)
    given = launch.Given(u.half(), k, d, True, None, None)
    spec, blocks = launch.spec_of((given.u,), given), -(-L // 4096)
    assert not spec.in_registers
    parts = torch.view_as_complex(launch.spectrum(given, spec)).to(torch.complex128)
    moved = launch.quarter(4096, torch.device("cpu")).to(torch.complex128)
    of_u = torch.fft.fft(torch.nn.functional.pad(u[0], (0, blocks * 4096 - L)).view(2, blocks, 4096) * moved)

    def by_blocks(order, parts):
        found = [None] * blocks
        for j, block in enumerate(order):
            total = sum(of_u[:, order[i]] * parts[:, j - i] for i in range(j + 1))
            found[block] = (torch.fft.ifft(total) * moved.conj()).real
        return torch.cat(found, 1)[None, :, :L]

    order = list(range(blocks))
    want = reference.fft_conv(u, k.double(), d.double())
    mirrored = reference.fft_conv_backward(u, u, k.double(), d.double())[0]
    torch.testing.assert_close(by_blocks(order, parts), want, rtol=1e-3, atol=1e-3)
    torch.testing.assert_close(by_blocks(order[::-1], parts.conj()), mirrored, rtol=1e-3, atol=1e-3)


@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize("rows", [2, 16, 64])
def test_transforms_in_tiles(rows, causal):
    """The kernel's steps in float64: which sequence a row belongs to, factors from the left, what comes back."""
    torch.manual_seed(0)
    spec = FftSpec("bf16", rows, causal)
    m, k = torch.arange(64)[:, None], torch.arange(64)[None]
    r = (m % rows).to(WIDE) - 0.25 * causal
    angle = 2 * math.pi * r * (k % rows) / rows
    here = m // rows == k // rows
    c, s = angle.cos() * row_scale(rows) * here, angle.sin() * row_scale(rows) * here
    left = [(c, -s), (s, c)][:spec.tiles]
    root = lambda i, n: torch.polar(torch.ones(i.shape, dtype=WIDE), -2 * math.pi * i.to(WIDE) / n)
    right, between = root(m * k, 64) * COLUMN_SCALE, root(r * k, spec.points)
    u, taps = randn(spec.sequences, spec.points), torch.randn(1, spec.points)
    given = launch.Given(u[None].bfloat16(), taps, None, causal, None, None)
    filtered = torch.view_as_complex(launch.spectrum(given, spec))[0, 0].to(torch.complex128)[m % rows + rows * k]
    place = [[(int(spec.sequence(tile, row)), row % rows) for row in range(64)] for tile in range(spec.tiles)]
    tiles = [torch.stack([u[b].view(-1, 64)[n] for b, n in of]) for of in place]
    z = sum(torch.complex(p @ x, q @ x) for (p, q), x in zip(left, tiles, strict=True)) * between @ right
    back = ((z * filtered).conj() @ right * between).conj()
    want = reference.fft_conv(u[None], taps.double().expand(spec.sequences, -1), causal=causal)[0]
    for (p, q), of in zip(left, place, strict=True):
        found = (p.T @ back.real + q.T @ back.imag) / (row_scale(rows) * COLUMN_SCALE) ** 2 / spec.points
        right_ones = torch.stack([want[b].view(-1, 64)[n] for b, n in of])
        torch.testing.assert_close(found, right_ones, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize("rows", [2, 16, 64])
def test_transforms_by_halves(rows, causal):
    """The kernel's steps in float64: the tokens' order, sums and differences, the order of frequencies, back again."""
    torch.manual_seed(0)
    spec = FftSpec("bf16", rows, causal)
    tables = Tables(spec, 128, halves=True)
    m, col = torch.arange(64)[:, None], torch.arange(64)
    tokens = torch.tensor([token_of(int(n)) for n in col])
    frequencies = torch.cat((2 * col[:32], 2 * col[:32] + 1))
    assert sorted(tokens.tolist()) == col.tolist() and tables.halves
    root = lambda i, n: torch.polar(torch.ones(i.shape, dtype=WIDE), -2 * math.pi * i.to(WIDE) / n)
    r = (m % rows).to(WIDE) - 0.25 * causal
    left = root(r * (col % rows), rows) * (m // rows == col // rows)
    between = root(r * tokens, spec.points)
    halves = [root(tokens[:32, None] * (2 * col[:32] + odd), 64) for odd in range(2)]
    u, taps = randn(spec.sequences, spec.points), torch.randn(1, spec.points)
    given = launch.Given(u[None].bfloat16(), taps, None, causal, None, None)
    filtered = torch.view_as_complex(launch.spectrum(given, spec))[0, 0].to(torch.complex128)[
        m % rows + rows * frequencies]
    place = [[(int(spec.sequence(tile, row)), row % rows) for row in range(64)] for tile in range(spec.tiles)]
    tiles = [torch.stack([u[b].view(-1, 64)[n][tokens] for b, n in of]) for of in place]
    x = tiles[0] + 0j if causal else torch.complex(*tiles)
    z = left @ x * between
    z = torch.cat([(z[:, :32] + sign * z[:, 32:]) @ of for sign, of in zip((1, -1), halves, strict=True)], 1)
    z = z * filtered
    even, odd = (z[:, 32 * i:32 * i + 32] @ of.mH for i, of in enumerate(halves))
    back = left.mH @ (torch.cat((even + odd, even - odd), 1) * between.conj()) / spec.points
    want = reference.fft_conv(u[None], taps.double().expand(spec.sequences, -1), causal=causal)[0]
    for found, of in zip((back.real, back.imag), place):
        right_ones = torch.stack([want[b].view(-1, 64)[n][tokens] for b, n in of])
        torch.testing.assert_close(found, right_ones, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("rows", [2, 8, 16, 32, 64])
def test_transforms_by_halves_of_rows(rows):
    """The kernel's steps from the left in float64, of circular ones: sums and differences of rows half a transform
    apart, real and imaginary parts in rows 8 apart, frequencies in pairs; and back."""
    torch.manual_seed(0)
    spec = FftSpec("bf16", rows, False)
    assert spec.halved_rows and not FftSpec("bf16", rows).halved_rows
    of, place, half = (torch.tensor(x) for x in zip(*(halved_row(m, rows) for m in range(64)), strict=True))
    assert len({(int(t), int(p), int(h)) for t, p, h in zip(of, place, half, strict=True)}) == 64
    assert torch.equal(halved_place(of, place, half, rows), torch.arange(64))
    u = torch.complex(randn(64 // rows, rows, 3), randn(64 // rows, rows, 3))
    near = u[of, place + rows // 2 * half].view(4, 2, 8, 3)  # a thread's two rows: (warp, half, g, column)
    halves, factors = [], []
    for odd, found in enumerate((near[:, 0] + near[:, 1], near[:, 0] - near[:, 1])):
        stacked = torch.stack((found.real, found.imag), 1).reshape(64, 3)
        angle = 2 * math.pi / rows * (place[None] * (2 * place[:, None] + odd)).to(WIDE)
        c, s = angle.cos(), angle.sin()
        m, k = half[:, None], half[None]
        factors.append(torch.where(m == k, c, torch.where(m == 0, s, -s)) * (of[:, None] == of[None]))
        halves.append((factors[-1] @ stacked).view(4, 2, 8, 3))
    spectrum = torch.stack([torch.complex(x[:, 0], x[:, 1]) for x in halves], 1).reshape(64, 3)
    torch.testing.assert_close(spectrum, torch.fft.fft(u, dim=1)[of, 2 * place + half])
    table, spec_rows = Tables(spec, 128, halves=True), torch.arange(64)
    assert torch.equal(table.row_frequency(spec_rows), 2 * place + half)
    e, o = ((f.T @ x.reshape(64, 3)).view(4, 2, 8, 3) for f, x in zip(factors, halves, strict=True))
    e, o = (torch.complex(x[:, 0], x[:, 1]) for x in (e, o))
    torch.testing.assert_close(torch.stack((e + o, e - o), 1).reshape(64, 3) / rows, near.reshape(64, 3))


@pytest.mark.parametrize("error, words, changed", [
    (ValueError, "k: shape", dict(k=torch.zeros(2, 4))), (ValueError, "u: has 2 dim", dict(u=torch.zeros(3, 7).half())),
    (TypeError, "pre_gate is torch.float16", dict(pre_gate=torch.zeros(2, 3, 7).half())),
    (TypeError, "k: dtype is torch.bfloat16", dict(k=torch.zeros(3, 4).bfloat16())),
    (ValueError, "d: shape", dict(d=torch.zeros(1))),
    (NotImplementedError, "u: has 4194305 tokens, supported are up to 4194304", dict(
        u=torch.zeros(1, 3, 1).bfloat16().expand(1, 3, 2**22 + 1))),
    (NotImplementedError, "u: has 4194305 tokens, supported are up to 4194304", dict(
        u=torch.zeros(1, 3, 1).bfloat16().expand(1, 3, 2**22 + 1), causal=False)),
    (ValueError, "precision: got 'fp32', allowed are 'half', 'split'", dict(precision="fp32")),
    (TypeError, "precision: got 1, allowed", dict(precision=1))])
def test_refused(error, words, changed):
    with pytest.raises(error, match=f"fft_conv: {words}"):
        tkq.fft_conv(**dict(u=torch.zeros(2, 3, 7).bfloat16(), k=torch.zeros(3, 4)) | changed)


@pytest.mark.parametrize("words, changed", [
    ("rows is 3", dict(rows=3)), ("blocks is 2", dict(blocks=2, causal=False)), ("dtype is 'fp32'", dict(dtype="fp32")),
    ("blocks is 3", dict(blocks=3)), ("blocks is 2, allowed is 1 where", dict(blocks=2, split=True)),
    ("vector is 4", dict(vector=4))])
def test_specs_refuse_by_name(words, changed):
    assert BLOCKS[-1] == 8 and TRANSFORM_ROWS[-1] == 64
    with pytest.raises(ValueError, match=words):
        FftSpec(**dict(dtype="bf16", rows=64) | changed)


def test_the_layer():
    torch.manual_seed(0)
    layer = tkq.nn.HyenaFilterConv(3, 40)
    u, gates = torch.randn(2, 3, 24).bfloat16().requires_grad_(), [torch.randn(2, 3, 24).bfloat16() for _ in range(2)]
    k = layer.filter(24)
    assert k.shape == (3, 24) and torch.allclose(k, layer.filter(40)[:, :24], atol=1e-6)
    y = layer(u, *gates)
    assert torch.equal(y, tkq.fft_conv(u, k, layer.d, True, *gates))
    y.float().square().sum().backward()
    assert all(p.grad is not None and p.grad.any() for p in layer.parameters()) and u.grad.any()
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert torch.equal(layer.filter(24), k)
    for words, call in (("u: has 41 tokens, allowed are up to max_tokens, 40", lambda: layer(torch.zeros(1, 3, 41))),
                        ("u: shape", lambda: layer(torch.zeros(1, 4, 8))),
                        ("heads is 0", lambda: tkq.nn.HyenaFilterConv(0, 8))):
        with pytest.raises(ValueError, match=f"HyenaFilterConv: {words}"):
            call()
    compiled = torch.compile(layer, backend="eager", fullgraph=True)
    for on in (False, True):
        with torch.autocast("cpu", dtype=torch.bfloat16, enabled=on):
            assert torch.equal(compiled(u.detach()), layer(u.detach()))
    with pytest.raises(TypeError, match=r"HyenaFilterConv: parameters are torch\.bfloat16, allowed is float32"):
        layer.bfloat16()(u)
    meta = tkq.nn.HyenaFilterConv(3, 40, fast=np.float32(4), device="meta")
    assert meta(torch.empty(2, 3, 24, device="meta", dtype=torch.bfloat16)).shape == (2, 3, 24)


@pytest.mark.parametrize("option, error, words", [
    (dict(slow=None), TypeError, "slow: got NoneType"), (dict(fast=math.nan), ValueError, "fast: got nan"),
    (dict(precision="xyz"), ValueError, "precision: got 'xyz', allowed are 'half', 'split'")])
def test_what_the_layer_does_not_take(option, error, words):
    with pytest.raises(error, match=f"HyenaFilterConv: {words}"):
        tkq.nn.HyenaFilterConv(3, 40, **option)
