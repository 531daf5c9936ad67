"""The norms that quantise, on the GPU: scales and e4m3 from float64, hard data, what is documented, long rows."""
import pytest
import torch

import tkq
from tests.helpers.norms.options import E4M3, EPS, HARD, KINDS, harden, make, poison, torch_norm  # noqa: F401  a fixture


def e4m3(v):
    """v rounded to the nearest number of e4m3, ties to even, in float64. On the CPU: 2^n is not exact on a GPU."""
    v = v.cpu()
    exponent = torch.floor(torch.log2(v.abs().clamp_min(2.0**-6))).clamp(-6, 8)
    step = 2.0 ** (exponent - 3)
    return (torch.round(v / step) * step).clamp(-448, 448)


def check_quantised(kind, x, extra, granularity, what=""):
    """Scales from float64 within float32's rounding; each q is the e4m3 number nearest to y / scale, where that is not
    nearly as near to its neighbour."""
    q, scale, h = getattr(tkq, kind + "_quant")(x, **extra, eps=EPS, prenorm=True, granularity=granularity)
    check_result(kind, x, extra, granularity, (q, scale), what)
    if "residual" in extra:
        assert torch.equal(h, (x.float() + extra["residual"].float()).to(h.dtype)), f"{what}: the sum is rounded once"
    return q, scale


def check_result(kind, x, extra, granularity, found, what=""):
    """The same of what a kernel has found."""
    q, scale = found
    y, total = torch_norm(kind, x.double(), **{n: t.double() for n, t in extra.items()})
    M, N = y.shape
    width = N if granularity == "row" else 128
    amax = torch.stack([part.abs().amax(1) for part in y.split(width, 1)], 1)
    wanted = (amax / 448).clamp_min(2.0**-126)
    assert scale.shape == wanted.shape and q.shape == x.shape and q.is_contiguous() and q.dtype == E4M3
    assert granularity == "row" or scale.stride() == (1, -(-M // 4) * 4)
    shift = of_mean(kind, total, extra)
    assert ((scale.double() - wanted).abs() <= 1e-5 * wanted + shift / 448).all(), what
    each = scale.repeat_interleave(width, 1)[:, :N].double()
    ratio = y / each
    # what the kernel had instead of the ratio: off by float32's rounding, of terms as large as the row's largest
    off = 2e-6 * ratio.abs() + (1e-6 * 448 * (1 if kind == "rmsnorm" else 4) + shift / each)
    low, high = e4m3(ratio - off), e4m3(ratio + off)
    got = q.double().cpu()
    assert ((got == low) | (got == high) | ((got >= low) & (got <= high))).all(), what
    exact = (shift / each <= 0.01).all(1).cpu()
    assert (got == e4m3(ratio))[exact].double().mean() >= 0.99 or N < 100 or not exact.any(), what


def of_mean(kind, total, extra):
    """(M, 1): by how much float32's rounding of the sum and of its mean moves the results of rows that vary by little
    beside their mean."""
    if kind == "rmsnorm":
        return torch.zeros_like(total[:, :1])
    rstd = (total.var(1, correction=0, keepdim=True) + EPS).rsqrt()
    largest = max((t.abs().max().item() for n, t in extra.items() if n == "weight"), default=1.0)
    return 2.0**-22 * total.abs().amax(1, keepdim=True) * rstd * largest


@pytest.mark.parametrize("granularity", ["row", "1x128"])
@pytest.mark.parametrize("N", [1, 100, 128, 1024, 1001, 4096, 16384, 40000, 131072, 262144])
@pytest.mark.sampled(when=lambda granularity, N: N in (128, 131072) or (granularity == "row") == (N in (
    1, 1024, 4096, 40000)))
def test_rmsnorm_quant(granularity, N):
    for M in (1, 35):
        x, extra = make((M, N), "bf16", weight="bf16")
        check_quantised("rmsnorm", x, extra, granularity, f"M {M}")


@pytest.mark.parametrize("granularity", ["row", "1x128"])
@pytest.mark.parametrize("kind, x, residual, N", [
    ("layernorm", "bf16", "bf16", 1000), ("layernorm", "fp32", "fp32", 4096), ("rmsnorm", "bf16", "fp32", 8192),
    ("layernorm", "bf16", "bf16", 65536), ("layernorm", "fp32", "fp32", 262143), ("rmsnorm", "fp16", "bf16", 4098)])
@pytest.mark.sampled(when=lambda granularity, N: (granularity == "row") == (N in (1000, 262143, 4098)))
def test_quantised_with_a_residual(granularity, kind, x, residual, N):
    for how in (None, *HARD):
        if (x, how) != ("fp16", "large"):
            inputs, extra = make((11, N), x, residual=residual, weight="fp32", bias="fp32")
            if how is not None:
                harden(how, inputs, extra["residual"])
            check_quantised(kind, inputs, extra, granularity, how)


@pytest.mark.parametrize("granularity", ["row", "1x128"])
def test_quantised_hard_data(granularity):
    for scale in (1e4, 1e-4):
        x, extra = make((9, 4096), "bf16", scale, weight="bf16")
        check_quantised("rmsnorm", x, extra, granularity, f"scale {scale}")
    x, extra = make((9, 4096), "bf16", weight="bf16")
    x[torch.arange(9, device="cuda"), torch.arange(9, device="cuda") * 455 + 3] = 1e4
    check_quantised("rmsnorm", x, extra, granularity, "one huge element in a row")
    extra["weight"] *= 1e-30
    check_quantised("rmsnorm", x, extra, granularity, "tiny results")


@pytest.mark.parametrize("granularity", ["row", "1x128"])
@pytest.mark.parametrize("N", [300, 1001, 65536])
@pytest.mark.sampled(each_value=True)
def test_zeros_nan_and_infinity_quantise_to_what_is_documented(granularity, N):
    x, extra = make((5, N), "bf16", weight="bf16")
    clean, clean_scale = tkq.rmsnorm_quant(x, **extra, granularity=granularity)
    x[1], x[2, 150], x[3, 150] = 0, float("nan"), float("inf")
    q, scale = tkq.rmsnorm_quant(x, **extra, granularity=granularity)
    want, want_scale = tkq.rmsnorm_quant(x.cpu(), extra["weight"].cpu(), granularity=granularity)
    assert (scale[1] == 2.0**-126).all() and (q[1].float() == 0).all()
    for row in (2, 3):
        assert torch.equal(torch.isnan(scale[row]).cpu(), torch.isnan(want_scale[row]))
        assert torch.equal(torch.isnan(q[row].float()).cpu(), torch.isnan(want[row].float()))
    assert torch.isnan(scale[2]).all() and torch.isnan(q[2].float()).all()
    for row in (0, 4):
        assert torch.equal(q[row].view(torch.uint8), clean[row].view(torch.uint8))
        assert torch.equal(scale[row], clean_scale[row])
    extra["weight"][7] = float("inf")
    q, scale = tkq.rmsnorm_quant(x[:1], **extra, granularity=granularity)
    assert torch.isinf(scale[0, 0]) and torch.isnan(q[0, 7].float()) and (q[0, 8:128].float() == 0).all()


@pytest.mark.parametrize("kind", KINDS)
def test_quantised_heads(kind):
    qkv = torch.randn(2, 37, 3, 8, 128, device="cuda", dtype=torch.bfloat16)
    w = torch.randn(8, 128, device="cuda", dtype=torch.bfloat16)
    q, scale = getattr(tkq, kind + "_quant")(qkv[:, :, 1], w, eps=EPS)
    y = torch_norm(kind, qkv[:, :, 1].double(), w.double())[0]
    assert q.shape == y.shape and scale.shape == (2 * 37 * 8, 1)
    back = q.double() * scale.double().view(2, 37, 8, 1)
    assert ((back - y).abs() <= 2.0**-4 * y.abs() + scale.double().view(2, 37, 8, 1) * 2.0**-10 * 1.01).all()


# ---- long rows -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("N", [131072, 262144])
@pytest.mark.parametrize("vectors", [dict(weight="bf16"), dict(weight="fp32", bias="fp32")], ids=["light", "heavy"])
@pytest.mark.sampled(each_value=True)
def test_long_rows_of_layernorm(N, vectors):
    """In registers (`fp8_output.Fp8Output`), or by blocks that stay (`tkq.norms.forward.fp8_persistent`); hard ones;
    what is not a number."""
    for M in (1, 2, 7):
        x, extra = make((M, N), "bf16", **vectors)
        q, scale = check_quantised("layernorm", x, extra, "row", f"M {M}")
        for _ in range(2):
            again = tkq.layernorm_quant(x, **extra, eps=EPS)
            assert torch.equal(again[0].view(torch.uint8), q.view(torch.uint8)) and torch.equal(again[1], scale)
    outlier = x.clone()
    outlier[torch.arange(7), torch.arange(7) * 7001] = 1e4
    for t in (x * 1e4, x * 1e-4, outlier):
        check_quantised("layernorm", t, extra, "row", "hard rows")
    x[1], x[2, 150], x[3, N - 1] = 3.0, float("nan"), float("inf")
    found, found_scale = tkq.layernorm_quant(x, **extra, eps=EPS)
    for row in (2, 3):
        assert found_scale[row].isnan().all() and found[row].float().isnan().all()
    if "bias" not in extra:
        assert (found_scale[1] == 2.0**-126).all() and (found[1].float() == 0).all()
    others = [0, 4, 5, 6]
    assert torch.equal(found[others].view(torch.uint8), q[others].view(torch.uint8))
    assert torch.equal(found_scale[others], scale[others])


@pytest.mark.parametrize("N, granularity, x, vectors", [
    (65544, "row", "bf16", dict(weight="bf16")),  # whole blocks of a cluster without a column
    (131064, "row", "bf16", dict(weight="bf16")),  # one vector short of whole blocks
    (200008, "row", "bf16", dict(weight="fp32", bias="fp32")),
    (131072, "1x128", "bf16", dict(weight="bf16")),
    (262144, "1x128", "bf16", dict(weight="fp32", bias="fp32")),
    (262144, "row", "bf16", dict(weight="bf16", residual="bf16")),
    (131072, "row", "fp16", dict(weight="fp16"))])
def test_other_long_rows_of_layernorm(N, granularity, x, vectors):
    for M in (1, 5):
        rows, extra = make((M, N), x, **vectors)
        check_quantised("layernorm", rows, extra, granularity, f"M {M}")
    rows[torch.arange(5), torch.arange(5) * 11003] = 1e4
    check_quantised("layernorm", rows, extra, granularity, "an outlier a row")
