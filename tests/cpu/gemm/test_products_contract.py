"""What calls of products hand to their kernels, of whatever strides and addresses, is what those are compiled for:
sizes, strides and addresses of tensors against the fake ones of each kernel's builder. CPU tensors pose as a GPU's."""
import functools
import random

import pytest
import torch

import tkq
from tests.helpers.emulation import fake_gpu
from tests.helpers.emulation.contract import misfit
from tests.helpers.gemm.fp8_cases import E4M3, scale_shapes
from tkq.gemm.dense import launch
from tkq.gemm.fp8 import ops
from tkq.gemm.grouped import ops as grouped_ops
from tkq.quantize import ops as quantize
from tkq.runtime.compile import build
from tkq.runtime.device import arch

BF16, F32 = torch.bfloat16, torch.float32
MEMORY = {dtype: torch.zeros(1 << 20, dtype=dtype) for dtype in (BF16, F32, E4M3)}


@pytest.fixture
def launched(monkeypatch):
    """[(recipe, arguments)] of what is launched."""
    seen = []
    for name, value in (("require_hopper", lambda device: None), ("num_sms", lambda device: 132),
                        ("_index", lambda device: 0), ("model", lambda device: "a GPU")):
        monkeypatch.setattr(arch, name, value)
    for module in (launch, ops, grouped_ops, quantize):
        monkeypatch.setattr(module, "function", lambda recipe: lambda *args: seen.append((recipe, args)))
    _forget()
    monkeypatch.setattr(torch.Tensor, "is_cuda", property(lambda self: True))
    with torch.no_grad():
        yield seen
    _forget()


def _forget():
    launch.clear()
    for cached in (ops._launcher, grouped_ops._launcher, quantize._runs):
        cached.cache_clear()


FAKES = {}  # recipe -> the fake arguments


def check(launched):
    """Every argument of every launch."""
    assert launched
    for recipe, args in launched:
        if recipe not in FAKES:
            FAKES[recipe] = build._made(recipe)[1]
        sizes = {}
        for fake, given in zip(FAKES[recipe], args, strict=True):
            assert (fake is None) == (given is None), recipe
            if isinstance(given, torch.Tensor):
                wrong = misfit(fake, given, sizes)
                assert not wrong, f"{recipe}: {wrong}"
    launched.clear()


class Draw(random.Random):
    """Matrices anywhere in memory."""

    def view(self, rows, cols, dtype=BF16, batch=0, turned=False, unit=1):
        """(rows, cols), in a batch, or where ``turned`` lying as its transpose; addresses, pitches and distances are
        multiples of that number of elements (and often of 16 bytes)."""
        lines, length = (cols, rows) if turned else (rows, cols)
        nice = 16 // dtype.itemsize

        def some():
            return self.choice((0, 0, nice, 2 * nice, unit, 3 * unit))

        def whole(n):
            return -(-n // unit) * unit

        pitch = whole(self.choice((length, -(-length // nice) * nice)) + some())
        strides, shape = (pitch, 1), (lines, length)
        if batch:
            strides, shape = (whole(self.choice((0, pitch * lines)) + some()), *strides), (batch, *shape)
        x = MEMORY[dtype].as_strided(shape, strides, some())
        return x.mT if turned else x


def test_gemm(launched):
    draw, ways = Draw(0), set()
    for _ in range(200):
        M, N, K = draw.choice((1, 2, 40, 128, 130)), draw.choice((1, 2, 8, 16, 24, 33, 48)), draw.choice((8, 24, 64))
        batch, gated = draw.choice((0, 0, 1, 3)), N % 2 == 0 and draw.random() < 0.3
        activation = draw.choice(("swiglu", "geglu_interleaved")) if gated else draw.choice((None, "silu"))
        out = draw.choice((BF16, F32))
        a = draw.view(M, K, batch=batch, turned=draw.random() < 0.3)
        b = draw.view(K, N, batch=batch, turned=draw.random() < 0.5)
        kw = dict(activation=activation, alpha=draw.choice((1.0, 2.0)), out_dtype=out,
                  bias=draw.choice((None, MEMORY[BF16][1:N + 1], MEMORY[F32][:N])))
        if not gated and draw.random() < 0.4:
            c = draw.view(M, N, out, batch)
            kw |= dict(c=c, beta=draw.choice((1.0, 0.5)))
        for _ in range(2):  # the second by the short way
            tkq.gemm(a, b, **kw)
        ways |= {(getattr(r.args[0], "load", ""), getattr(r.args[0], "store", "")) for r, _ in launched}
        check(launched)
    assert ways == {("tma", "tma"), ("tma", "rows"), ("tma", "direct"), ("direct", "direct")}


def test_gemm_into_out(launched):
    """Results between others, in memory of their own."""
    draw = Draw(1)
    for _ in range(60):
        M, N, K = draw.choice((1, 2, 130)), draw.choice((1, 8, 24, 33)), draw.choice((8, 64))
        dtype = draw.choice((BF16, F32))
        pitch = N + draw.choice((0, 1, 8, 16))
        out = torch.zeros((M + 1) * pitch, dtype=dtype)[draw.choice((0, 1, 8)):].as_strided((M, N), (pitch, 1))
        a, b = draw.view(M, K), draw.view(K, N, turned=draw.random() < 0.5)
        for _ in range(2):
            assert tkq.gemm(a, b, out=out) is out
        check(launched)


def test_fp8_gemm(launched):
    draw = Draw(2)
    for _ in range(80):
        M, N, K = draw.choice((1, 40, 130)), draw.choice((1, 8, 16, 33, 144)), draw.choice((16, 144, 400))
        kind, out = draw.choice(("tensor", "row", "1x128_128x128", "1x128_1x128")), draw.choice((BF16, F32, E4M3))
        scales = [torch.ones(shape) for shape in scale_shapes(kind, M, N, K)]
        a, b = draw.view(M, K, E4M3, unit=16), draw.view(K, N, E4M3, turned=True, unit=16)
        tkq.fp8_gemm(a, b, *scales, out_dtype=out, out_scale=torch.ones(1) if out == E4M3 else None,
                     bias=draw.choice((None, MEMORY[BF16][1:N + 1])))
        check(launched)


def test_grouped_gemm(launched):
    draw = Draw(3)
    for _ in range(60):
        M, N, K, groups = draw.choice((1, 40, 200)), draw.choice((8, 24, 264)), draw.choice((16, 400)), 3
        offsets, kind = torch.zeros(groups, dtype=torch.int32), draw.choice(("none", "row", "1x128_128x128"))
        if kind == "none":
            a, b = draw.view(M, K, unit=8), draw.view(K, N, batch=groups, turned=draw.random() < 0.5, unit=8)
            tkq.grouped_gemm(a, b, offsets, out_dtype=draw.choice((None, F32)))
            tkq.grouped_gemm(draw.view(M, 8 * M, unit=8).t(), draw.view(M, N, unit=8), offsets)
        else:
            steps = -(-K // 128)
            shapes = (M, 1), (groups, 1, N)
            shapes = ((M, steps), (groups, steps, -(-N // 128))) if kind == "1x128_128x128" else shapes
            a, b = draw.view(M, K, E4M3, unit=16), draw.view(K, N, E4M3, groups, True, unit=16)
            tkq.grouped_gemm(a, b, offsets, scale_a=torch.ones(shapes[0]), scale_b=torch.ones(shapes[1]))
        check(launched)


def test_quantize_fp8(launched):
    draw = Draw(4)
    for _ in range(80):
        M, N, dtype = draw.choice((1, 40, 133)), draw.choice((1, 8, 24, 33, 264)), draw.choice((BF16, F32))
        granularity = draw.choice(("tensor", "row", "1x128", "128x128"))
        tkq.quantize_fp8(draw.view(M, N, dtype), granularity, transpose=draw.random() < 0.5)
        check(launched)


def test_scales_come_with_their_strides(launched):
    """Of rows, or columns, and of steps of K; of groups in front."""
    M, N, K = 40, 272, 400
    a, b = MEMORY[E4M3][:M * K].view(M, K), MEMORY[E4M3][:N * K].view(N, K).t()
    rows, columns = torch.ones(M, 8)[:, ::2], torch.ones(4, 3 * N)[:, ::3]
    for scale_b, of_b in ((columns, (3, 3 * N)), (torch.ones(4, 5)[:, :3], (1, 5))):
        tkq.fp8_gemm(a, b, rows, scale_b)
        (_, args), = launched
        assert args[3:5] == ((rows.data_ptr(), 8, 2), (scale_b.data_ptr(), *of_b))
        launched.clear()
    offsets, b = torch.zeros(2, dtype=torch.int32), b.expand(2, K, N)
    for scale_a, scale_b, of_a, of_b in ((rows, torch.ones(2, 4, 7)[..., :3], (0, 8, 2), (28, 1, 7)),
                                         (torch.ones(M, 3)[:, :1], torch.ones(2, 1, N), (0, 3, 1), (N, 1, N))):
        tkq.grouped_gemm(a, b, offsets, scale_a=scale_a, scale_b=scale_b)
        (_, args), = launched
        assert args[4:6] == ((scale_a.data_ptr(), *of_a), (scale_b.data_ptr(), *of_b))
        launched.clear()


def test_blocks_of_groups_are_whole_clusters(launched, monkeypatch):
    monkeypatch.setattr(arch, "num_sms", lambda device: 133)
    a, b = MEMORY[BF16][:4096 * 64].view(4096, 64), MEMORY[BF16][:64 * 2048].view(1, 64, 2048).expand(4, 64, 2048)
    tkq.grouped_gemm(a, b, torch.zeros(4, dtype=torch.int32))
    (recipe, args), = launched
    assert recipe.args[1].cluster == 2 and args[-1] == 132


def test_results_in_a_batch_that_lie_anywhere(launched):
    a, b = MEMORY[BF16][:3 * 40 * 64].view(3, 40, 64), MEMORY[BF16][:3 * 64 * 24].view(3, 64, 24)
    for apart in (40 * 24, 40 * 24 + 2):
        tkq.gemm(a, b, out=torch.zeros(3 * apart, dtype=BF16).as_strided((3, 40, 24), (apart, 24, 1)))
        check(launched)


def test_calls_that_differ_in_one_thing_are_launched_apart():
    a, b = MEMORY[BF16][:300 * 64].view(300, 64), MEMORY[BF16][:64 * 256].view(64, 256)
    c = torch.zeros(300, 256, dtype=BF16)
    given = [dict(), dict(out_dtype=F32), dict(activation="silu"), dict(activation="swiglu"), dict(alpha=2.0),
             dict(bias=b[0]), dict(bias=torch.zeros(256)), dict(c=c, beta=1.0), dict(c=c, beta=0.5),
             dict(c=torch.zeros(300, 257, dtype=BF16)[:, 1:], beta=1.0)]
    calls = [functools.partial(tkq.gemm, a, b, **more) for more in given]
    calls += [functools.partial(tkq.gemm, a, x) for x in (b[:, :128], b.view(256, 64).t(), MEMORY[BF16][1:][:64 * 256]
                                                          .view(64, 256))]
    with torch.no_grad():
        assert fake_gpu.apart(*calls)
        kinds = "tensor", "row", "1x128", "128x128"
        x = MEMORY[BF16][:384 * 400].view(384, 400)
        assert fake_gpu.apart(*(functools.partial(tkq.quantize_fp8, y, kind, transpose=transpose) for kind in kinds
                                for transpose in (False, True) for y in (x, x[:1], x[:133], x[:, 1:], x[:, :200])))


def test_c_without_beta_is_not_launched(launched):
    a, b, c = (MEMORY[BF16][:64 * 64].view(64, 64) for _ in range(3))
    for more in (dict(c=c), dict(beta=1.0)):
        with pytest.raises(ValueError, match="and beta is"):
            tkq.gemm(a, b, **more)
    assert not launched


def test_out_over_c_with_other_rows_in_a_call_like_those_before(launched):
    a, b = MEMORY[BF16][:40 * 64].view(40, 64), MEMORY[BF16][:64 * 32].view(64, 32)
    memory = torch.zeros(6000, dtype=BF16)
    out, c = memory[:1600].view(40, 40)[:, :32], memory[3200:3200 + 1280].view(40, 32)
    for _ in range(2):
        tkq.gemm(a, b, c=c, beta=1.0, out=out)
    with pytest.raises(ValueError, match="out shares memory with c; allowed is c itself"):
        tkq.gemm(a, b, c=memory[:1280].view(40, 32), beta=1.0, out=out)
    assert len(launched) == 2


def test_each_way_to_out_changes_its_version(launched):
    """A backward that saved it raises then."""
    a, b, out = MEMORY[BF16][:40 * 64].view(40, 64), MEMORY[BF16][:64 * 32].view(64, 32), torch.zeros(40, 32).to(BF16)
    before = out._version
    for n in range(1, 4):
        tkq.gemm(a, b, out=out)
        assert out._version == before + n and len(launched) == n
