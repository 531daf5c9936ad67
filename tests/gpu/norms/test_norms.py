"""rmsnorm and layernorm on the GPU: numerics by the 2x rule, every memory layout, streams and graphs."""
import pytest
import torch
import torch.nn.functional as F

import tkq
from tests.helpers.process.streams import on_a_side_stream
from tkq.norms import launch, ops
from tkq.testing import assert_2x

DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}
KINDS = ["rmsnorm", "layernorm"]
EPS = 1e-5


def torch_norm(kind, x, weight=None, bias=None):
    """PyTorch's own: float64 inputs give the truth, ours give its error at this precision."""
    if kind == "layernorm":
        return F.layer_norm(x, x.shape[-1:], weight, bias, EPS)
    y = F.rms_norm(x, x.shape[-1:], weight, EPS)
    return y if bias is None else y + bias


def same_precision(kind, x, weight, bias):
    """PyTorch with float32 inside and one rounding, in x's type: what a good kernel at this precision gives."""
    wide = [None if t is None else t.float() for t in (x, weight, bias)]
    return torch_norm(kind, *wide).to(x.dtype)


def into(out, kind, x, weight, bias):
    return launch.norm(launch.Call(kind, EPS), x, weight, bias, None, (out, None, None, None, None))[0]


def check(kind, x, weight=None, bias=None, what=""):
    """Into an output that is NaN before."""
    out = torch.full(x.shape, float("nan"), dtype=x.dtype, device=x.device)
    y = into(out, kind, x, weight, bias)
    assert y is out
    wide = [None if t is None else t.double() for t in (x, weight, bias)]
    assert_2x(y, torch_norm(kind, *wide), same_precision(kind, x, weight, bias), ulps=1, what=what)
    return y


def make(shape, dtype, weight=None, bias=None, scale=1.0, mean=0.0, seed=0):
    g = torch.Generator("cuda").manual_seed(seed)

    def randn(shape, dtype):
        return torch.randn(shape, device="cuda", generator=g).to(dtype)

    x = (torch.randn(shape, device="cuda", generator=g) * scale + mean).to(DTYPES[dtype])
    return x, *(None if d is None else randn(shape[-1:], DTYPES[d]) for d in (weight, bias))


# Every mix of x and weight with a bias in two types, every pair of two at both sizes; and a bias in the third type.
MIXES = [(x, weight, bias, ((37, 1024), (5, 1000))[(i + j + k) % 2]) for i, x in enumerate(DTYPES)
         for j, weight in enumerate([None, *DTYPES]) for k, bias in enumerate([None, "bf16", "fp32"])]
# Of these, all pairs of two types: every third, another third for each norm.
PLACES = {(x, weight, bias): i + j + k for i, x in enumerate(DTYPES) for j, weight in enumerate([None, *DTYPES])
          for k, bias in enumerate([None, "bf16", "fp32"])}
MIXES += [("bf16", "fp32", "fp16", (37, 1024)), ("fp16", "bf16", "fp16", (5, 1000)),
          ("fp32", "fp16", "fp16", (37, 1024))]


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("x, weight, bias, shape", MIXES)
@pytest.mark.sampled(when=lambda kind, x, weight, bias: bias == "fp16" or (
    PLACES[x, weight, bias] % 6 == 3 * KINDS.index(kind)))
def test_every_mix_of_types(kind, x, weight, bias, shape):
    check(kind, *make(shape, x, weight, bias))


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("N", [1, 2, 3, 7, 8, 9, 31, 64, 65, 127, 128, 130, 257, 1000, 1023, 2048, 3072, 3073, 4096,
                               4100, 6144, 8192, 8200, 10001, 16384])
@pytest.mark.sampled(when=lambda kind, N: N in (1000, 4096) or (
    (kind == "rmsnorm") == (N in (1, 2, 9, 64, 2048, 3072, 8192, 16384))
    and N not in (3, 8, 31, 65, 127, 257, 3073, 6144, 8200)))
def test_short_rows(kind, N):
    for M in (1, 3, 129):
        check(kind, *make((M, N), "bf16", "bf16", "bf16"), what=f"M {M}")


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("x, N", [("bf16", 16392), ("bf16", 32768), ("bf16", 40000), ("bf16", 65535), ("bf16", 65536),
                                  ("bf16", 100008), ("bf16", 131072), ("bf16", 262143), ("bf16", 262144),
                                  ("fp32", 32768), ("fp32", 65540), ("fp32", 262143), ("fp32", 262144)])
@pytest.mark.sampled(when=lambda kind, N: N in (65536, 262144) or (
    (kind == "rmsnorm") == (N % 8 == 0) and N not in (16392, 65535, 65540, 100008)))
def test_long_rows(kind, x, N):
    check(kind, *make((11, N), x, "fp32", None))


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("x, N", [("bf16", 32768), ("bf16", 131072), ("bf16", 131080), ("bf16", 200008),
                                  ("bf16", 262136), ("bf16", 262144), ("fp16", 262144), ("fp32", 131072)])
@pytest.mark.sampled(when=lambda kind, x, N: (kind == "rmsnorm") == (
    N % 32768 > 0 or N == 131072 or x == "fp16"))
def test_long_rows_with_a_weight_of_their_type(kind, x, N):
    """They have plans of their own: above 256 KB x in shared memory, the weight in registers, the stores last."""
    check(kind, *make((11, N), x, x, None))


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("N", [pytest.param(1024, marks=pytest.mark.slow), 4096,
                               pytest.param(32768, marks=pytest.mark.slow), 131072])
@pytest.mark.sampled(when=lambda kind, N: (kind == "rmsnorm") == (N == 4096))
def test_the_variants_that_tuning_may_choose(kind, N):
    """A sample of the configs beside the planned one: every path, cluster and count of rows; M a multiple of none. Of
    short rows and of long ones: what other sizes have is the same again."""
    from tkq import runtime
    from tkq.norms.plan import variants
    from tkq.norms.spec import NormSpec

    spec = NormSpec(kind, N, "bf16", "fp32", "bf16", 8)
    x, w, b = make((13, N), "bf16", "fp32", "bf16")
    truth, peer = torch_norm(kind, *(t.double() for t in (x, w, b))), same_precision(kind, x, w, b)
    seen = {}
    for config in variants(spec):
        seen.setdefault((config.load, config.prefetch_weight, config.rows_per_thread, min(config.cluster, 2)), config)
    assert len(seen) >= 4
    for config in seen.values():
        out = torch.full_like(x, float("nan"))
        runtime.function(ops.recipe(spec, config))(x, w, b, out, EPS)
        assert_2x(out, truth, peer, ulps=1, what=str(config))


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("x", DTYPES)
@pytest.mark.parametrize("scale, mean", [(1e4, 0.0), (1e-4, 0.0), (1.0, 100.0), (30.0, -300.0), (0.0, 3.0), (0.0, 0.0)])
@pytest.mark.sampled(when=lambda kind, x: x == "bf16" or (kind == "rmsnorm") == (x == "fp16"))
@pytest.mark.sampled(each_value=True)
def test_hard_data(kind, x, scale, mean):
    """Large and small values, a mean far from 0, constant rows."""
    for N in (1024, 1001, 32768):
        check(kind, *make((9, N), x, "fp32", "fp32", scale, mean), what=f"N {N}")


@pytest.mark.parametrize("x", ["bf16", "fp32"])
def test_a_small_variance_on_a_big_mean_keeps_its_digits(x):
    """E[x^2] - mean^2 would lose all of them: mean 4096, standard deviation 1 (fp32) or what bf16 resolves."""
    for N in (96, 4096, 65536, 262144):
        check("layernorm", *make((7, N), x, "fp32", None, 1.0 if x == "fp32" else 64.0, 4096.0), what=f"N {N}")


@pytest.mark.parametrize("kind", KINDS)
def test_one_outlier_in_each_place(kind):
    """A value 10^4 times the others, once in every part of the row that a thread, warp or block could hold."""
    N = 65536
    x, w, _ = make((64, N), "fp32", "fp32")
    x[torch.arange(64, device="cuda"), torch.arange(64, device="cuda") * 1024 + 517] = 1e4
    check(kind, x, w)


@pytest.mark.parametrize("kind", KINDS)
def test_nan_and_inf_stay_in_their_row(kind):
    for N in (64, 1000, 4096, 65536):
        x, w, _ = make((6, N), "bf16", "bf16")
        clean = tkq.rmsnorm(x, w) if kind == "rmsnorm" else tkq.layernorm(x, w)
        x[2, N - 1], x[4, N // 2] = float("nan"), float("inf")
        y = tkq.rmsnorm(x, w) if kind == "rmsnorm" else tkq.layernorm(x, w)
        assert torch.isnan(y[2]).all()
        assert torch.equal(torch.isnan(y[4]), torch.isnan(torch_norm(kind, x[4].float(), w.float())))
        rest = [0, 1, 3, 5]
        assert torch.equal(y[rest], clean[rest])


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("x", ["bf16", "fp32"])
@pytest.mark.parametrize("N, room, first", [
    (1024, 1024 + 8, 0), (1024, 1032, 8), (1024, 1025, 0), (1024, 1026, 1), (1000, 1024, 4), (1001, 1009, 3),
    (16384, 16384 + 24, 16), (40000, 40003, 3), (7, 16, 1), (1, 3, 1)])
@pytest.mark.sampled(when=lambda kind, x: (x == "bf16") == (kind == "rmsnorm"))
@pytest.mark.sampled(each_value=True)
def test_rows_with_a_stride_are_read_in_place(kind, x, N, room, first):
    """Around the view there is NaN: a read too far shows."""
    wide = torch.full((21, room), float("nan"), device="cuda", dtype=DTYPES[x])
    view = wide[:, first:first + N]
    view.copy_(make((21, N), x)[0])
    before = torch.cuda.memory_stats()["allocation.all.allocated"]
    y = tkq.rmsnorm(view) if kind == "rmsnorm" else tkq.layernorm(view)
    assert torch.cuda.memory_stats()["allocation.all.allocated"] - before == 1, "one allocation: the output"
    assert y.is_contiguous()
    w = make((1, N), x)[0][0]
    check(kind, view, w, w)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("M, N, rows_before", [(5, 4096, 3), (130, 100, 1), (3, 65536, 2), (9, 7, 4)])
@pytest.mark.sampled(each_value=True)
def test_nothing_is_written_outside_the_output(kind, M, N, rows_before):
    whole = torch.full((M + 2 * rows_before, N), float("nan"), device="cuda", dtype=torch.bfloat16)
    out = whole[rows_before:rows_before + M]
    x, w, b = make((M, N), "bf16", "bf16", "bf16")
    into(out, kind, x, w, b)
    assert torch.isfinite(out).all()
    assert torch.isnan(whole[:rows_before]).all() and torch.isnan(whole[rows_before + M:]).all()


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("offset", [1, 2, 3, 4])
@pytest.mark.sampled(each_value=True)
def test_weight_and_bias_at_any_address(kind, offset):
    x, w, b = make((33, 1024), "bf16", "bf16", "fp32")
    away_w, away_b = torch.empty(1032, device="cuda", dtype=w.dtype), torch.empty(1032, device="cuda", dtype=b.dtype)
    w_, b_ = away_w[offset:offset + 1024].copy_(w), away_b[offset:offset + 1024].copy_(b)
    check(kind, x, w_, b_)  # by the rule, not by its bits: narrower accesses add in another order


@pytest.mark.parametrize("kind", KINDS)
def test_leading_dimensions(kind):
    op = getattr(tkq, kind)
    x = torch.randn(3, 5, 2, 256, device="cuda", dtype=torch.bfloat16)
    want = op(x.reshape(-1, 256)).view(x.shape)
    assert torch.equal(op(x), want) and op(x).is_contiguous()
    assert torch.equal(op(x[0, 0, 0]), want[0, 0, 0])
    permuted = x.permute(2, 0, 1, 3)  # no single row stride
    assert torch.equal(op(permuted), want.permute(2, 0, 1, 3)) and op(permuted).is_contiguous()
    assert torch.equal(op(x[:, 1:3, :, :128]), op(x[:, 1:3, :, :128].contiguous()))
    assert torch.equal(op(x[:1].expand(4, 5, 2, 256)), want[:1].expand(4, 5, 2, 256))
    assert torch.equal(op(x[0, 0, :1].expand(7, 256)), want[0, 0, :1].expand(7, 256))


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("shape", [(0, 128), (2, 0, 128), (0, 5, 7)])
def test_no_rows(kind, shape):
    x = torch.empty(shape, device="cuda", dtype=torch.bfloat16)
    y = getattr(tkq, kind)(x, torch.ones(shape[-1], device="cuda"))
    assert y.shape == x.shape and y.dtype == x.dtype


@pytest.mark.parametrize("kind", KINDS)
def test_more_than_2_31_elements(kind):
    M, N = (1 << 31) // 4096 + 5, 4096
    x = torch.empty(M, N, device="cuda", dtype=torch.bfloat16)
    rows = torch.tensor([0, 1, (1 << 30) // N, M // 2 + 1, M - 6, M - 5, M - 2, M - 1], device="cuda")
    x.view(torch.int16).fill_(0x3F80)  # ones everywhere, but in the rows that are looked at
    sample, w, _ = make((len(rows), N), "bf16", "bf16")
    x[rows] = sample
    y = torch.full_like(x, float("nan"))
    into(y, kind, x, w, None)
    assert torch.equal(y[rows], check(kind, sample, w))
    ones = check(kind, torch.ones_like(sample[:1]), w)
    assert torch.equal(y[rows[3] + 1], ones[0])
    assert not torch.isnan(y[:: M // 1000]).any() and not torch.isnan(y[-100:]).any()


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("N", [512, 16384, 65536])
def test_the_same_bits_every_time(kind, N):
    x, w, b = make((77, N), "bf16", "fp32", "fp32")
    once = getattr(tkq, kind)(x, w, bias=b)
    for _ in range(20):
        assert torch.equal(getattr(tkq, kind)(x, w, bias=b), once)


def test_a_row_does_not_depend_on_its_neighbours():
    x, w, _ = make((300, 1000), "bf16", "bf16")
    whole = tkq.rmsnorm(x, w)
    for first, last in ((0, 1), (5, 6), (17, 250), (299, 300)):
        assert torch.equal(tkq.rmsnorm(x[first:last], w), whole[first:last])


@pytest.mark.parametrize("kind", KINDS)
def test_on_a_side_stream(kind):
    op = getattr(tkq, kind)
    x, w, _ = make((4096, 4096), "bf16", "bf16")
    want = op(x, w)
    assert torch.equal(on_a_side_stream(lambda late: op(late, w), x), want)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("N", [1000, 65536])
def test_in_a_cuda_graph(kind, N):
    op = getattr(tkq, kind)
    x, w, _ = make((64, N), "bf16", "fp32")
    op(x, w)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        y = op(x, w)
    for seed in (1, 2):
        x.copy_(make((64, N), "bf16", seed=seed)[0])
        y.fill_(float("nan"))
        graph.replay()
        assert torch.equal(y, op(x, w))


@pytest.mark.slow  # test_every_op.py compiles each function every day
@pytest.mark.parametrize("kind", KINDS)
def test_the_torch_op(kind):
    op = getattr(torch.ops.tkq, kind)
    x, w, b = make((9, 256), "bf16", "bf16", "fp32")
    args = x, w, b, EPS, None, 0.0, None, None, False
    torch.library.opcheck(op, args, test_utils=("test_schema", "test_faketensor"))
    compiled = torch.compile(lambda x, w, b: getattr(tkq, kind)(x + 1, w, bias=b, eps=EPS), fullgraph=True)
    assert torch.equal(compiled(x, w, b), getattr(tkq, kind)(x + 1, w, bias=b, eps=EPS))


@pytest.mark.parametrize("kind", KINDS)
def test_bad_input_launches_nothing(kind):
    op = getattr(tkq, kind)
    x, w, _ = make((4, 64), "bf16", "bf16")
    cases = [(ValueError, "weight: is on cpu", (x, w.cpu())),
             (TypeError, "x: dtype is torch.float64", (x.double(), None)),
             (ValueError, "weight: shape is", (x, w[:32])), (ValueError, "x: strides are", (x.t(), None))]
    for error, says, args in cases:
        for _ in range(2):  # a refused call leaves nothing behind that would let the next one through
            with pytest.raises(error, match=says):
                op(*args)


@pytest.mark.parametrize("kind", KINDS)
def test_an_eager_call_is_one_launch(kind):
    from torch.profiler import ProfilerActivity, profile

    x, w, b = make((256, 1024), "bf16", "bf16", "bf16")
    op = getattr(tkq, kind)
    op(x, w, bias=b)
    with profile(activities=[ProfilerActivity.CUDA]) as record:
        op(x, w, bias=b)
        torch.cuda.synchronize()
    kernels = [e for e in record.events() if e.device_type == torch.autograd.DeviceType.CUDA]
    assert len(kernels) == 1, [e.name for e in kernels]


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("eps", (-5.0, float("nan"), "a"))
def test_bad_eps_is_named_after_a_good_call_too(kind, eps):
    x, w = make((8, 256), "bf16", "bf16")[:2]
    for weight in (w, w.requires_grad_()):
        getattr(tkq, kind)(x, weight)
        with pytest.raises((TypeError, ValueError), match="eps: got"):
            getattr(tkq, kind)(x, weight, eps=eps)


@pytest.mark.parametrize("bad, words", [
    (lambda x, w: (x, w[:128]), "weight"), (lambda x, w: (x, w.expand(2, 256).t().flatten()[::2]), "weight"),
    (lambda x, w: (x, w.cpu()), "weight"), (lambda x, w: (x.repeat(1, 2)[:, ::2], w), "contiguous"),
    (lambda x, w: (x, w[None]), "weight")])
def test_what_is_wrong_is_named_after_a_good_call_too(bad, words):
    """The look-up of a kernel does not see it: the compiled function does."""
    x, w = make((8, 256), "bf16", "bf16")[:2]
    tkq.rmsnorm(x, w)
    with pytest.raises((TypeError, ValueError), match=words):
        tkq.rmsnorm(*bad(x, w))
