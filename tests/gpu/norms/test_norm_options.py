"""The norms' options on the GPU: residuals, types of their own, weights of heads."""
import pytest
import torch

import tkq
from tests.helpers.norms.options import (  # noqa: F401  a fixture
    DTYPES,
    E4M3,
    EPS,
    HARD,
    KINDS,
    harden,
    make,
    poison,
    torch_norm,
)
from tkq.norms import launch
from tkq.norms.launch import Call
from tkq.runtime.call import ops
from tkq.testing import assert_2x


@pytest.mark.parametrize("kind", KINDS)
def test_the_poison_bites(monkeypatch, kind):
    """With a kernel that writes nothing every result is NaN: in the first call, and in those that know it."""
    monkeypatch.setattr(launch, "compiled", lambda spec, device: lambda *given: None)
    for name in ("_launch_cache", "_launchers", "_seen"):
        monkeypatch.setattr(launch, name, ops.LaunchCache(), raising=False)
    x, extra = make((5, 256), "bf16", weight="bf16", residual="bf16")
    for call in (Call(kind, EPS), Call(kind, EPS, total=torch.float32, stats=True),
                 Call(kind, EPS, out=E4M3, scale="row"), Call(kind, EPS, out=E4M3, scale="1x128")):
        for _ in range(3):
            made = [t for t in launch.norm(call, x, extra["weight"], None, extra["residual"]) if t is not None]
            assert made and all(t.float().isnan().all() for t in made), call
    for _ in range(2):
        assert getattr(tkq, kind)(x, extra["weight"]).isnan().all()


def check(kind, x, extra, what="", **options):
    """y and h of a prenorm call by the rule."""
    y, h = getattr(tkq, kind)(x, **extra, eps=EPS, prenorm=True, **options)
    offset = options.get("weight_offset", 0.0)
    truth, _ = torch_norm(kind, x.double(), **{n: t.double() for n, t in extra.items()}, offset=offset)
    same, same_total = torch_norm(kind, x.float(), **{n: t.float() for n, t in extra.items()}, offset=offset)
    assert y.is_contiguous()
    assert_2x(y, truth, same.to(y.dtype), ulps=1, what=what)
    assert torch.equal(h, same_total.to(h.dtype)), f"{what}: the sum is rounded once"
    return y, h


# ---- residuals and types ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("x, residual, out, total", [
    ("bf16", "bf16", None, None), ("bf16", "fp32", None, None), ("fp32", "bf16", "bf16", "fp32"),
    ("fp16", "fp32", "fp32", "bf16"), ("fp32", "fp32", None, None), ("bf16", None, "fp32", "fp16")])
@pytest.mark.sampled(each_value=True)
def test_mixes_of_types(kind, x, residual, out, total):
    for M in (1, 37):
        inputs, extra = make((M, 1000), x, weight="fp32", **({"residual": residual} if residual else {}))
        y, h = check(kind, inputs, extra, out_dtype=out and DTYPES[out], residual_dtype=total and DTYPES[total])
        assert y.dtype == DTYPES[out or x] and h.dtype == DTYPES[total or residual]


@pytest.mark.parametrize("kind, N", [("layernorm", N) for N in (7, 1001, 16384, 131072)] + [
    ("rmsnorm", N) for N in (1, 64, 1001, 4096, 16384, 65536, 262144)] + [
    pytest.param("rmsnorm", N, marks=pytest.mark.slow) for N in (7, 8192, 32768, 131072)])
def test_rows_of_each_length_with_a_residual(kind, N):
    vectors = dict(weight="bf16") if kind == "rmsnorm" else dict(weight="fp32", bias="fp32")
    for M, how in ((1, None), (19, None), *((7, how) for how in HARD)):
        x, extra = make((M, N), "bf16", residual="bf16", **vectors)
        if how is not None:
            harden(how, x, extra["residual"])
        y, _ = check(kind, x, extra, what=f"M {M} {how}")
        assert torch.equal(getattr(tkq, kind)(x, **extra, eps=EPS), y), "without the sum"


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("N", [16384, 262144])
@pytest.mark.sampled(each_value=True)
def test_long_float32_rows_with_a_residual(kind, N):
    for how in (None, *HARD):
        x, extra = make((5, N), "fp32", residual="fp32", weight="fp32", bias="fp32")
        if how is not None:
            harden(how, x, extra["residual"])
        check(kind, x, extra, what=how)


@pytest.mark.parametrize("kind", KINDS)
def test_hard_data(kind):
    """One kernel; large, small and cancelling values, means far from 0, constant rows, one huge element in a row."""
    for scale, mean in ((1e4, 0.0), (1e-4, 0.0), (1.0, 100.0), (30.0, -300.0), (0.0, 3.0), (0.0, 0.0)):
        x, extra = make((9, 1000), "fp32", scale, mean, residual="fp32", weight="fp32")
        check(kind, x, extra, what=f"scale {scale} mean {mean}")
        extra["residual"] *= scale
        check(kind, x, extra, what=f"residual of scale {scale} mean {mean}")
    x, extra = make((9, 1000), "fp32", residual="fp32", weight="fp32")
    extra["residual"][torch.arange(9, device="cuda"), torch.arange(9, device="cuda") * 110 + 3] = 1e4
    check(kind, x, extra, what="one huge element")
    extra["residual"] = -x.clone()
    y, h = getattr(tkq, kind)(x, **extra, eps=EPS, prenorm=True)
    assert (h == 0).all() and (y == 0).all(), "x and residual cancel"


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("where", ["x", "residual"])
@pytest.mark.sampled(each_value=True)
def test_nan_and_inf_stay_in_their_row(kind, where):
    for N in (1000, 65536):
        x, extra = make((6, N), "bf16", residual="bf16", weight="bf16")
        clean = getattr(tkq, kind)(x, **extra, eps=EPS)
        t = x if where == "x" else extra["residual"]
        t[2, N - 1], t[4, N // 2] = float("nan"), float("inf")
        y, h = getattr(tkq, kind)(x, **extra, eps=EPS, prenorm=True)
        truth, total = torch_norm(kind, x.float(), **{n: t.float() for n, t in extra.items()})
        assert torch.isnan(y[2]).all() and torch.equal(torch.isnan(y[4]), torch.isnan(truth[4]))
        assert torch.equal(torch.isnan(h), torch.isnan(total)) and torch.equal(torch.isinf(h), torch.isinf(total))
        assert torch.equal(y[[0, 1, 3, 5]], clean[[0, 1, 3, 5]])


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("x", ["bf16", "fp32"])
def test_weight_offset(kind, x):
    inputs, extra = make((33, 1000), x, weight="bf16")
    check(kind, inputs, extra, weight_offset=1.0)
    check(kind, inputs, extra, weight_offset=-0.37)  # no other kernel


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("room, first", [(1008, 8), (1002, 1), (1004, 4)])
@pytest.mark.sampled(each_value=True)
def test_rows_with_strides_of_their_own(kind, room, first):
    """x and residual lie differently, with NaN around both; the results are contiguous."""
    x, extra = make((21, 1000), "bf16", residual="bf16", weight="bf16")
    around = torch.full((2, 21, room + 8), float("nan"), device="cuda", dtype=torch.bfloat16)
    view = around[0, :, first:first + 1000].copy_(x) if first + 1000 <= room + 8 else None
    residual = around[1, :, :1000].copy_(extra["residual"])
    check(kind, view, dict(extra, residual=residual))


@pytest.mark.parametrize("kind", KINDS)
def test_leading_dimensions(kind):
    op = getattr(tkq, kind)
    x, r = (torch.randn(3, 6, 4, 256, device="cuda", dtype=torch.bfloat16) for _ in range(2))
    want = op(x.reshape(-1, 256), residual=r.reshape(-1, 256), prenorm=True)
    for t, w in zip(op(x, residual=r, prenorm=True), want, strict=True):
        assert t.shape == x.shape and t.is_contiguous() and torch.equal(t.view(-1, 256), w)
    for at in ((slice(None), slice(1, 5)), (slice(None), slice(None), slice(1, 3)), (1,), (1, 2, 3)):
        for t, w in zip(op(x[at], residual=r[at], prenorm=True), want, strict=True):
            assert t.is_contiguous() and torch.equal(t, w.view(x.shape)[at])
    moved = op(x.transpose(0, 2), residual=r.transpose(0, 2))
    assert moved.is_contiguous() and torch.equal(moved, want[0].view(x.shape).transpose(0, 2))


@pytest.mark.parametrize("kind", KINDS)
def test_a_residual_of_as_many_rows_in_another_shape_is_refused_after_a_call_that_was_right(kind):
    x, given = make((2, 3, 256), "bf16", weight="bf16", residual="bf16")
    weight, residual, norm = given["weight"], given["residual"], getattr(tkq, kind)
    for _ in range(2):
        norm(x, weight, residual=residual, prenorm=True)
    for other in (residual.view(3, 2, 256), residual.view(6, 256)):
        with pytest.raises(ValueError, match="residual"):
            norm(x, weight, residual=other, prenorm=True)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("shape", [(0, 128), (2, 0, 128)])
def test_no_rows(kind, shape):
    x = torch.zeros(shape, device="cuda", dtype=torch.bfloat16)
    y, h = getattr(tkq, kind)(x, residual=x, prenorm=True, residual_dtype=torch.float32)
    assert y.shape == h.shape == shape and h.dtype == torch.float32
    for granularity in ("row", "1x128"):
        q, scale = getattr(tkq, kind + "_quant")(x, granularity=granularity)
        assert q.shape == shape and scale.shape == (0, 1)


@pytest.mark.parametrize("kind", KINDS)
def test_the_same_bits_every_time(kind):
    x, extra = make((77, 65536), "bf16", residual="fp32", weight="bf16")
    once = getattr(tkq, kind)(x, **extra, prenorm=True)
    for _ in range(10):
        assert all(torch.equal(a, b) for a, b in zip(once, getattr(tkq, kind)(x, **extra, prenorm=True)))


@pytest.mark.parametrize("kind", KINDS)
def test_in_a_cuda_graph(kind):
    x, extra = make((64, 4096), "bf16", residual="bf16", weight="bf16")
    want = getattr(tkq, kind)(x, **extra, prenorm=True)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        found = getattr(tkq, kind)(x, **extra, prenorm=True)
    graph.replay()
    assert all(torch.equal(a, b) for a, b in zip(found, want))


@pytest.mark.slow
@pytest.mark.alone
@pytest.mark.parametrize("kind", KINDS)
def test_more_than_2_31_elements(kind):
    M, N = (1 << 31) // 4096 + 5, 4096
    x, r = (torch.ones(M, N, device="cuda", dtype=torch.bfloat16) for _ in range(2))
    rows = torch.tensor([0, (1 << 30) // N, M // 2 + 1, M - 2, M - 1], device="cuda")
    sample, extra = make((len(rows), N), "bf16", residual="bf16", weight="bf16")
    for i, row in enumerate(rows.tolist()):
        x[row], r[row] = sample[i], extra["residual"][i]
    y, h = getattr(tkq, kind)(x, extra["weight"], residual=r, eps=EPS, prenorm=True)
    want, total = check(kind, sample, extra)
    assert torch.equal(y[rows], want) and torch.equal(h[rows], total)
    assert torch.isfinite(y[:: M // 1000]).all() and torch.isfinite(y[-100:]).all()


# ---- weights of heads ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind, D", [pytest.param(k, D, marks=[pytest.mark.slow] * (D > 33 and (k == "rmsnorm") == (
    D == 128))) for k in KINDS for D in (64, 128, 256, 33)])
@pytest.mark.parametrize("H", [1, 5, 32])
@pytest.mark.sampled(each_value=True)
def test_heads_of_a_packed_qkv_are_read_in_place(kind, D, H):
    norm = getattr(tkq, kind)
    qkv = torch.randn(2, 37, 3, H, D, device="cuda", dtype=torch.bfloat16)
    _, extra = make((1, D), "bf16", weight=((H, D), "bf16"))
    for i in (0, 1):
        x = qkv[:, :, i]
        want = torch_norm(kind, x.double(), extra["weight"].double())[0]
        same = torch_norm(kind, x.float(), extra["weight"].float())[0].bfloat16()
        norm(x, extra["weight"], eps=EPS)
        before = torch.cuda.memory_stats()["allocation.all.allocated"]
        y = norm(x, extra["weight"], eps=EPS)
        assert torch.cuda.memory_stats()["allocation.all.allocated"] - before == 1, "one allocation: the output"
        assert y.is_contiguous()
        assert_2x(y, want, same, ulps=1)
        shared = norm(x, extra["weight"][0], eps=EPS)
        assert torch.equal(shared, norm(x.contiguous(), extra["weight"][0].clone(), eps=EPS))


@pytest.mark.parametrize("kind", KINDS)
def test_heads_with_every_option(kind):
    shape, H, D = (2, 19, 6, 128), 6, 128
    x, extra = make(shape, "bf16", residual="fp32", weight=((H, D), "fp32"), bias=((H, D), "bf16"))
    check(kind, x, extra, weight_offset=1.0, out_dtype=torch.float32)
    wide = torch.full((2, 19, 9, D), float("nan"), device="cuda", dtype=torch.bfloat16)
    wide[:, :, 2:8] = x
    check(kind, wide[:, :, 2:8], extra, weight_offset=1.0, out_dtype=torch.float32)


# ---- calls ----------------------------------------------------------------------------------------------------------


def test_the_op_in_fake_mode():
    x, extra = make((9, 256), "bf16", residual="fp32", weight="bf16")
    w, r = extra["weight"], extra["residual"]
    utils = ("test_schema", "test_faketensor")
    for kind in KINDS:
        op = getattr(torch.ops.tkq, kind)
        torch.library.opcheck(op, (x, w, None, EPS, r, 1.0, torch.float32, torch.bfloat16, True), test_utils=utils)
        for granularity in ("row", "1x128"):
            getattr(tkq, kind + "_quant")  # registers the op
            op = getattr(torch.ops.tkq, kind + "_quant")
            torch.library.opcheck(op, (x, w, None, EPS, r, 0.0, torch.bfloat16, granularity), test_utils=utils)


@pytest.mark.parametrize("bad, words", [
    (dict(residual=torch.zeros(8, 128)), "residual: shape is"),
    (dict(residual=torch.zeros(8, 256)), "residual: is on cpu"),
    (dict(out_dtype=torch.int8), "out_dtype"), (dict(residual_dtype=torch.float32), "prenorm")])
def test_what_is_wrong_is_named_after_a_good_call_too(bad, words):
    x, extra = make((8, 256), "bf16", residual="fp32", weight="bf16")
    tkq.rmsnorm(x, **extra)
    if isinstance(bad.get("residual"), torch.Tensor) and bad["residual"].shape != x.shape:
        bad = dict(residual=bad["residual"].cuda())
    with pytest.raises((TypeError, ValueError), match=words):
        tkq.rmsnorm(x, **{**extra, **bad})


@pytest.mark.parametrize("call", [
    lambda x, w, r: tkq.rmsnorm(x, w, residual=r, prenorm=True), lambda x, w, r: tkq.rmsnorm_quant(x, w, residual=r),
    lambda x, w, r: tkq.layernorm_quant(x, w, granularity="1x128")])
def test_an_eager_call_is_one_launch(call):
    from torch.profiler import ProfilerActivity, profile

    x, extra = make((256, 1024), "bf16", residual="bf16", weight="bf16")
    with torch.profiler.profile():  # the first one starts slowly, and would be counted
        pass
    torch.cuda.synchronize()
    call(x, extra["weight"], extra["residual"])
    with profile(activities=[ProfilerActivity.CUDA]) as record:
        call(x, extra["weight"], extra["residual"])
        torch.cuda.synchronize()
    names = [e.name for e in record.events() if e.device_type == torch.autograd.DeviceType.CUDA]
    kernels = [name for name in names if "norms" in name]
    assert len(kernels) == 1 and all("fill" in n.lower() or n in kernels for n in names), names  # the fills are poison
