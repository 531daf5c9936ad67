"""grouped_gemm without a GPU: what it means, what it refuses, its gradient; and how its tiles are planned."""
import contextlib

import pytest
import torch
from torch.nn import functional as F
from torch.utils.flop_counter import FlopCounterMode

import tkq
from tests.helpers.gemm.fp8_cases import E4M3, matrix, scale
from tkq.gemm.dense.config import SHARED_BYTES
from tkq.gemm.grouped.catalog import shipped
from tkq.gemm.grouped.plan import FAST, PROMOTED, plan, shared_bytes
from tkq.gemm.grouped.spec import GroupedSpec

SIZES = (3, 0, 5, 1)
N, K = 24, 32


def ends(sizes=SIZES):
    return torch.tensor(sizes).cumsum(0).int()


def operands(extra=0):
    m = sum(SIZES) + extra
    return torch.randn(m, K).bfloat16(), torch.randn(len(SIZES), K, N).bfloat16(), ends()


def test_rows_meet_their_groups_matrix():
    a, b, offsets = operands(extra=2)
    c = tkq.grouped_gemm(a, b, offsets)
    group = [g for g, size in enumerate(SIZES) for _ in range(size)]
    want = torch.stack([a[i].float() @ b[g].float() for i, g in enumerate(group)])
    torch.testing.assert_close(c[:len(group)].float(), want, rtol=1e-2, atol=1e-2)


def test_the_gradient_of_weights():
    a, b = torch.randn(9, 16).bfloat16(), torch.randn(9, N).bfloat16()
    c = tkq.grouped_gemm(a.t(), b, ends())
    assert c.shape == (4, 16, N) and not c[1].any()
    torch.testing.assert_close(c[0].float(), a[:3].t().float() @ b[:3].float(), rtol=1e-2, atol=1e-2)


@pytest.mark.parametrize("extra", (0, 2))
def test_gradients_are_torchs(extra):
    a, b, offsets = operands(extra)
    a.requires_grad_(), b.requires_grad_()
    x, y = (t.detach().double().requires_grad_() for t in (a, b))
    d = torch.randn(a.shape[0], N)
    d[sum(SIZES):] = 0
    tkq.grouped_gemm(a, b, offsets).backward(d.bfloat16())
    bounds = zip([0, *offsets.tolist()], offsets.tolist())
    sum((x[i:j] @ y[g] * d.bfloat16()[i:j].double()).sum() for g, (i, j) in enumerate(bounds)).backward()
    for got, want in ((a.grad, x.grad), (b.grad, y.grad)):
        torch.testing.assert_close(got.double(), want, rtol=2e-2, atol=2e-2)


def test_no_rows_at_all():
    a, b = torch.zeros(0, K).bfloat16().requires_grad_(), torch.randn(4, K, N).bfloat16().requires_grad_()
    tkq.grouped_gemm(a, b, ends((0, 0, 0, 0))).sum().backward()
    assert a.grad.shape == a.shape and not b.grad.any()
    assert not tkq.grouped_gemm(torch.zeros(5, 0).bfloat16(), torch.zeros(4, 0, N).bfloat16(), ends()).any()


@pytest.mark.parametrize("way", (contextlib.nullcontext, lambda: FlopCounterMode(display=False)), ids=("eager", "op"))
def test_gradients_of_columns_that_are_no_multiple_of_8(way):
    torch.manual_seed(0)
    a, b = torch.randn(9, K).bfloat16().requires_grad_(), torch.randn(4, 12, K).bfloat16().transpose(1, 2)
    b.requires_grad_()

    def f(a, b):
        return tkq.grouped_gemm(a, b, ends(), out_dtype=torch.float32)

    with way():
        y = f(a, b)
        d = torch.randn_like(y)
        got = torch.autograd.grad(y, (a, b), d)
    with torch.no_grad():
        assert y.is_contiguous()
        torch.testing.assert_close(y.detach(), f(a, b), rtol=1e-5, atol=1e-5)
    x, w = (t.detach().double().requires_grad_() for t in (a, b))
    rows = torch.cat([x[i:j] @ w[g] for g, (i, j) in enumerate(((0, 3), (3, 3), (3, 8), (8, 9)))])
    for mine, want in zip(got, torch.autograd.grad(rows, (x, w), d.double())):
        torch.testing.assert_close(mine.double(), want, rtol=2e-2, atol=4e-2)


def test_on_meta():
    a, b, offsets = (x.to("meta") for x in operands())
    assert tkq.grouped_gemm(a, b, offsets).shape == (9, N) and tkq.grouped_gemm(a.t(), a[:, :8], offsets).dim() == 3


@pytest.mark.parametrize("kind", ("row", "1x128_128x128"))
def test_float8(kind):
    m, n, k = sum(SIZES), 136, 272
    a, b = matrix(m, k), torch.stack([matrix(n, k, seed=i).view(torch.uint8) for i in range(4)]).view(E4M3)
    shapes = {"row": ((m, 1), (4, 1, n)), "1x128_128x128": ((m, 3), (4, 3, 2))}[kind]
    sa, sb = scale(shapes[0]), scale(shapes[1], seed=1)
    c = tkq.grouped_gemm(a, b.transpose(1, 2), ends(), scale_a=sa, scale_b=sb, out_dtype=torch.float32)
    for g, (i, j) in enumerate(((0, 3), (3, 3), (3, 8), (8, 9))):
        want = tkq.fp8_gemm(a[i:j], b[g].t(), sa[i:j], sb[g], out_dtype=torch.float32)
        torch.testing.assert_close(c[i:j], want, rtol=1e-5, atol=1e-4)


@pytest.mark.parametrize("kind", ("row", "row of groups", "1x128_1x128"))
def test_float8_along_k(kind):
    """Groups of tokens that begin anywhere, also inside a block of 128 that has one scale."""
    sizes = (130, 0, 100, 58)
    m, n, k = 40, 24, sum(sizes)
    a, b = matrix(m, k), matrix(n, k, seed=1).t()
    shapes = {"row": ((m, 1), (1, n)), "row of groups": ((4, m, 1), (4, 1, n)), "1x128_1x128": ((m, 3), (3, n))}[kind]
    sa, sb = scale(shapes[0]), scale(shapes[1], seed=1)
    c = tkq.grouped_gemm(a, b, ends(sizes), scale_a=sa, scale_b=sb, out_dtype=torch.float32)
    assert c.shape == (4, m, n) and not c[1].any()
    for g, (i, j) in enumerate(((0, 130), (130, 130), (130, 230), (230, 288))):
        block = torch.arange(i, j) // 128
        x = a[:, i:j].float() * (sa[:, block] if kind == "1x128_1x128" else sa[g] if sa.dim() == 3 else sa)
        y = b[i:j].float() * (sb[block] if kind == "1x128_1x128" else sb[g] if sb.dim() == 3 else sb)
        torch.testing.assert_close(c[g], x @ y, rtol=1e-4, atol=1e-3)


def test_what_the_quantiser_makes_of_tokens_goes_in():
    x, y, offsets = torch.randn(144, 256).bfloat16(), torch.randn(144, 128).bfloat16(), ends((100, 40, 0, 4))
    _, _, xt, scale_x = tkq.quantize_fp8(x, "1x128", transpose=True)
    _, _, yt, scale_y = tkq.quantize_fp8(y, "1x128", transpose=True)
    c = tkq.grouped_gemm(xt, yt.t(), offsets, scale_a=scale_x, scale_b=scale_y.t())
    want = tkq.grouped_gemm(x.t(), y, offsets)
    assert (c.float() - want.float()).norm() < 0.05 * want.float().norm()


def test_offsets_that_make_no_sense_do_no_harm():
    a, b, _ = operands()
    for offsets in ((5, 3, 9, 9), (-4, 2, 100, 200)):
        assert tkq.grouped_gemm(a, b, torch.tensor(offsets, dtype=torch.int32)).shape == (9, N)


BAD = (
    (lambda a, b, o: ((a.float(), b, o), {}), TypeError, ("a", "float32")),
    (lambda a, b, o: ((a, b.half(), o), {}), TypeError, ("b", "float16", "bf16")),
    (lambda a, b, o: ((a, b, o.long()), {}), TypeError, ("offsets", "int64")),
    (lambda a, b, o: ((a, b, [1]), {}), TypeError, ("offsets", "list")),
    (lambda a, b, o: ((a, b, o[:2]), {}), ValueError, ("offsets (2,)", "(G, K, N)")),
    (lambda a, b, o: ((a[None], b, o), {}), ValueError, ("a", "3 dimensions")),
    (lambda a, b, o: ((F.pad(a, (0, 4))[:, :K], b, o), {}), ValueError, ("a", "a multiple of 16 bytes")),
    (lambda a, b, o: ((a.t().contiguous().t(), b, o), {}), ValueError, ("a", "row-major")),
    (lambda a, b, o: ((torch.zeros(9 * K + 1).to(a.dtype)[1:].view(9, K), b, o), {}), ValueError,
     ("a: begins", "16 bytes")),
    (lambda a, b, o: ((a, b[:, :, :20], o), {}), NotImplementedError, ("N is 20", "8")),
    (lambda a, b, o: ((a, b.repeat(1, 1, 2)[:, :, ::2], o), {}), ValueError, ("b", "strides")),
    (lambda a, b, o: ((a, b, o), {"out_dtype": torch.int8}), TypeError, ("out_dtype", "int8")),
    (lambda a, b, o: ((a, b, o), {"scale_a": torch.ones(9, 1)}), ValueError, ("scale_a, scale_b", "None")),
    (lambda a, b, o: ((a, b, o), {"scale_a": torch.ones(9, 1), "scale_b": torch.ones(4, 1, N)}), ValueError,
     ("16 bits",)),
    (lambda a, b, o: ((matrix(N, 16), matrix(N, 16).t(), o), dict(scale_a=torch.ones(N, 1), scale_b=torch.ones(N, 1))),
     ValueError, ("(24, 1) with (1, 24)", "(4, 24, 1) with (4, 1, 24)")),
    (lambda a, b, o: ((matrix(N, 16), matrix(16, N), o), dict(scale_a=torch.ones(N, 1), scale_b=torch.ones(1, N))),
     ValueError, ("b: strides", "column-major")),
    (lambda a, b, o: ((matrix(16, N).t(), matrix(N, 16).t(), o), dict(scale_a=torch.ones(N, 1),
                                                                      scale_b=torch.ones(1, N))),
     ValueError, ("a: strides", "row-major")),
    (lambda a, b, o: ((matrix(9, K), matrix(N * 4, K).view(4, N, K).transpose(1, 2), o), {}), ValueError,
     ("scale_a, scale_b", "None")),
)


@pytest.mark.parametrize("make, error, words", BAD)
def test_bad_input_is_named(make, error, words):
    args, kw = make(*operands())
    with pytest.raises(error) as caught:
        tkq.grouped_gemm(*args, **kw)
    assert all(w in str(caught.value) for w in words), str(caught.value)


def test_traces():
    args = operands()
    f = torch.compile(lambda *x: tkq.grouped_gemm(*x), fullgraph=True, backend="eager")
    assert torch.equal(f(*args), tkq.grouped_gemm(*args))


@pytest.mark.parametrize("along, a, scale_a, scale_b, allowed", [
    ("m", "bf16", "row", "row", "none with none"), ("m", "e4m3", "none", "none", "row with row, 1x128 with 128x128"),
    ("m", "e4m3", "tensor", "tensor", "row with row, 1x128 with 128x128"),
    ("m", "e4m3", "1x128", "1x128", "row with row, 1x128 with 128x128"),
    ("k", "e4m3", "1x128", "128x128", "row with row, 1x128 with 1x128")])
def test_scales_that_no_kernel_takes_are_refused(along, a, scale_a, scale_b, allowed):
    words = (f"scale_a is '{scale_a}' and scale_b '{scale_b}', supported with a in {a} along {along} are {allowed}$")
    with pytest.raises(NotImplementedError, match=words):
        GroupedSpec(along, a, a, "bf16", scale_a, scale_b, "k" if along == "m" or a != "bf16" else "n")


@pytest.mark.parametrize("spec", (GroupedSpec(), GroupedSpec("k", b_major="n"),
                                  GroupedSpec("k", "e4m3", "e4m3", "bf16", "row", "row"),
                                  GroupedSpec("k", "e5m2", "e4m3", "fp32", "1x128", "1x128"),
                                  GroupedSpec("m", "e4m3", "e4m3", "bf16", "row", "row"),
                                  GroupedSpec("m", "e4m3", "e4m3", "bf16", "1x128", "128x128")))
def test_plans_fit(spec):
    for m in (1, 64, 500, 8192, 65536):
        for n in (16, 512, 4096, 28672):
            for groups in (1, 16, 256):
                config = plan(spec, m, n, groups, 132)
                assert shared_bytes(config, spec) <= SHARED_BYTES
                assert config.n in {c.n for c in (*FAST, *PROMOTED)}


def test_names_are_unique():
    names = [kernel.name for kernel in shipped()]
    assert len(set(names)) == len(names)


def test_gradients_of_groups_whose_offsets_fall():
    a, b = torch.randn(16, 32).bfloat16().requires_grad_(), torch.randn(2, 32, 16).bfloat16()
    tkq.grouped_gemm(a, b, torch.tensor([12, 4]).int())[:12].float().sum().backward()
    assert a.grad[:12].any(1).all() and not a.grad[12:].any()
