"""fp8_gemm without a GPU: the reference path, what it refuses, its fake."""
import pytest
import torch

import tkq
from tests.helpers.gemm.fp8_cases import E4M3, E5M2, KINDS, exact, operands, scale_shapes
from tkq.gemm.fp8 import ops
from tkq.granularity import PRODUCTS

M, N, K = 5, 136, 272


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("types", ((E4M3, E4M3), (E4M3, E5M2), (E5M2, E5M2)))
def test_means_what_it_says(kind, types):
    args = operands(M, N, K, kind, *types)
    c = tkq.fp8_gemm(*args, out_dtype=torch.float32)
    a, b, sa, sb = args
    to_a = sa.expand(M, -1).repeat_interleave(128, 1)[:, :K] if "128" in kind else sa
    to_b = sb.repeat_interleave(128, 0)[:K] if "128" in kind else sb
    to_b = to_b.repeat_interleave(128, 1)[:, :N] if kind == "1x128_128x128" else to_b
    torch.testing.assert_close(c, (a.float() * to_a) @ (b.float() * to_b), rtol=1e-5, atol=1e-4)
    assert c.is_contiguous()


@pytest.mark.parametrize("out_dtype", (torch.bfloat16, torch.float16, torch.float32))
def test_rounds_once(out_dtype):
    args = operands(M, N, K, "row", whole=True, powers=True)
    assert torch.equal(tkq.fp8_gemm(*args, out_dtype=out_dtype), exact(args, out_dtype))


def test_bias_activation_and_float8_out():
    args, bias, s = operands(M, N, K, "row", whole=True, powers=True), torch.arange(N) % 17 - 8.0, torch.tensor(0.25)
    y = exact(args, torch.float32) + bias  # to the bit: sums of whole numbers times powers of two
    q = tkq.fp8_gemm(*args, bias=bias, activation="relu", out_dtype=E4M3, out_scale=s).float()
    assert torch.equal(q, (y.relu() / 0.25).clamp(-448, 448).to(E4M3).float())
    assert ((q > 0) & (q < 448)).float().mean() > 0.1
    for name, f in (("silu", torch.nn.functional.silu), ("gelu", torch.nn.functional.gelu)):
        torch.testing.assert_close(tkq.fp8_gemm(*args, bias=bias, activation=name, out_dtype=torch.float32), f(y),
                                   rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("m, n, k", ((0, 16, 32), (16, 0, 32), (3, 4, 0), (0, 0, 0)))
@pytest.mark.parametrize("kind", KINDS)
def test_empty(m, n, k, kind):
    bias = torch.ones(n)
    c = tkq.fp8_gemm(*operands(m, n, k, kind), bias=bias)
    assert c.shape == (m, n) and torch.equal(c.float(), torch.ones(m, n))


def test_the_oracle_has_products_and_quantising_under_one_name():
    from tkq import reference
    from tkq.reference import fp8, grouped
    assert reference.fp8_gemm is fp8.fp8_gemm and reference.quantize_fp8 is fp8.quantize_fp8
    assert reference.grouped_gemm is grouped.grouped_gemm
    with pytest.raises(AttributeError, match="no attribute 'fp4_gemm'"):
        reference.fp4_gemm  # noqa: B018


def test_the_granularity_is_seen_from_the_shapes():
    from tkq.gemm.fp8.spec import granularity
    for kind in KINDS:
        assert granularity(300, 500, 1024, *scale_shapes(kind, 300, 500, 1024)) == PRODUCTS[kind]
    assert granularity(300, 500, 1024, (1, 1), (1,)) == PRODUCTS["tensor"]
    assert granularity(300, 500, 128, (300, 1), (1, 4)) == ("1x128", "128x128")
    assert granularity(300, 500, 128, (300, 1), (1, 500)) == ("row", "row")  # what "1x128" of both would mean, too


def change(**kw):
    def f(args):
        return args, kw
    return f


def replace(i, f):
    def g(args):
        args = list(args)
        args[i] = f(args[i])
        return args, {}
    return g


BAD = (
    (replace(0, lambda a: a.float()), TypeError, ("a", "float32", "float8_e4m3fn")),
    (replace(1, lambda b: b.to(torch.bfloat16)), TypeError, ("b", "bfloat16")),
    (replace(0, lambda a: [1]), TypeError, ("a", "list")),
    (replace(2, lambda s: s.double()), TypeError, ("scale_a", "float64")),
    (replace(3, lambda s: None), TypeError, ("scale_b", "NoneType")),
    (replace(0, lambda a: a[None]), ValueError, ("a", "3")),
    (replace(1, lambda b: b[:16]), ValueError, ("(5, 272)", "(16, 136)")),
    (replace(1, lambda b: b.t()), ValueError, ("(5, 272)", "(136, 272)", "pass b.t()")),
    (replace(1, lambda b: b.contiguous()), ValueError, ("b", "stride 136 along K", ".t()")),
    (replace(0, lambda a: a.t().contiguous().t()), ValueError, ("a", "stride 5 along K", ".contiguous()")),
    (replace(0, lambda a: torch.zeros(5, 280, dtype=E4M3)[:, :272].as_strided((5, 272), (280, 1))), ValueError,
     ("a", "280 bytes apart", "16")),
    (replace(0, lambda a: torch.zeros(5 * 272 + 1).to(E4M3)[1:].view(5, 272)), ValueError, ("a: begins", "16 bytes")),
    (replace(2, lambda s: s[:3]), ValueError, ("scale_a", "(3, 1)", "(5, 1) with (1, 136)", "(5, 3) with (3, 2)")),
    (replace(2, lambda s: torch.ones(())), ValueError, ("one element each",)),
    (change(bias=torch.ones(3)), ValueError, ("bias", "(3,)", "(136,)")),
    (change(bias=torch.ones(136, dtype=torch.int32)), TypeError, ("bias", "int32")),
    (change(activation="swish"), NotImplementedError, ("swish", "silu")),
    (change(out_dtype=torch.int8), TypeError, ("out_dtype", "int8")),
    (change(out_dtype=E4M3), ValueError, ("out_scale", "None")),
    (change(out_scale=torch.ones(1)), ValueError, ("out_scale", "bfloat16")),
    (change(out_dtype=E4M3, out_scale=torch.ones(2)), ValueError, ("out_scale", "(2,)")),
    (change(accumulate="fp16"), ValueError, ("accumulate", "fp16", "'fast'")),
    (change(bias=torch.ones(136, device="meta")), ValueError, ("bias", "meta")),
)


@pytest.mark.parametrize("make, error, words", BAD)
def test_bad_input_is_named(make, error, words):
    args, kw = make(operands(M, N, K, "row"))
    with pytest.raises(error) as caught:
        tkq.fp8_gemm(*args, **kw)
    assert all(w in str(caught.value) for w in words), str(caught.value)


def test_k_is_a_multiple_of_16():
    with pytest.raises(ValueError, match="K is 24, allowed are multiples of 16"):
        tkq.fp8_gemm(*operands(4, 4, 24))


@pytest.mark.parametrize("kind", ("1x128_128x128", "1x128_1x128"))
def test_scales_along_k_are_added_up_in_float32(kind):
    args = operands(M, N, K, kind)
    with pytest.raises(ValueError, match="accumulate: got 'fast'"):
        tkq.fp8_gemm(*args, accumulate="fast")
    assert torch.equal(tkq.fp8_gemm(*args, accumulate="fp32"), tkq.fp8_gemm(*args))


def test_a_gradient_is_refused():
    args = operands(M, N, K, "row")
    with pytest.raises(NotImplementedError, match="scale_a"):
        tkq.fp8_gemm(args[0], args[1], args[2].requires_grad_(), args[3])
    with pytest.raises(NotImplementedError, match="out_scale"):
        tkq.fp8_gemm(args[0], args[1], args[2].detach(), args[3], out_dtype=E4M3,
                     out_scale=torch.ones(1, requires_grad=True))


def test_what_a_launch_refuses_is_named():
    a, b, sa, sb = operands(M, N, K, "row")
    with pytest.raises(TypeError, match="scale_a"):
        ops._cuda(a, b, sa.double(), sb, None, None, torch.bfloat16, None, None)
    with pytest.raises(ValueError, match="device: got cpu"):  # an error that is not the caller's comes through
        ops._cuda(a, b, sa, sb, None, None, torch.bfloat16, None, None)


def test_compiles_and_traces():
    args = operands(M, N, K, "1x128_128x128")
    f = torch.compile(lambda *x: tkq.fp8_gemm(*x), fullgraph=True, backend="eager")
    assert torch.equal(f(*args), tkq.fp8_gemm(*args))
    torch.library.opcheck(ops._op, (*args, None, None, torch.bfloat16, None, None),
                          test_utils=("test_faketensor",))


def test_biases_that_are_refused():
    a, b = torch.zeros(16, 32).to(E4M3), torch.zeros(16, 32).to(E4M3).t()
    scales = torch.ones(16, 1), torch.ones(1, 16)
    with pytest.raises(ValueError, match="bias"):
        tkq.fp8_gemm(a, b, *scales, bias=torch.zeros(32)[::2])
    with pytest.raises(NotImplementedError, match="fp8_gemm: bias requires a gradient"):
        tkq.fp8_gemm(a, b, *scales, bias=torch.zeros(16, requires_grad=True))


@pytest.mark.parametrize("lines", (1, 2, 3))
def test_the_distance_of_lines_counts_from_two_on(lines):
    few, whole, one = torch.zeros(lines, 24).to(torch.float8_e4m3fn)[:, :16], torch.zeros(16, 16), torch.ones(1)
    whole = whole.to(torch.float8_e4m3fn)
    for words, a, b in (("a: its rows", few, whole.t()), ("b: its columns", whole, few.t())):
        if lines == 1:
            tkq.fp8_gemm(a, b, one, one)
        else:
            with pytest.raises(ValueError, match=f"{words} lie 24 bytes apart"):
                tkq.fp8_gemm(a, b, one, one)
