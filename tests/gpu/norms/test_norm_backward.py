"""norm_backward on the GPU: numerics by the 2x rule, every memory layout, column sums to the bit, streams."""
import pytest
import torch

from tests.helpers.norms.backward import DTYPES, EPS, KINDS, NAN, check, judge, make, statistics
from tkq.norms.backward import catalog, ops
from tkq.norms.backward.kernel import RMSNormBackward
from tkq.norms.backward.ops import norm_backward
from tkq.reference import norms_backward
from tkq.rows.persistent import launch
from tkq.rows.persistent.plan import plan
from tkq.rows.persistent.variants import variants

MIXES = [("bf16", "bf16", "bf16"), ("bf16", "bf16", "fp32"), ("fp16", "fp16", "fp16"), ("fp32", "fp32", "fp32"),
         ("bf16", "fp32", "bf16"), ("fp32", "bf16", "fp16"), ("fp16", "bf16", None)]


@pytest.mark.parametrize("kind, dy, x, weight", [(KINDS[i % 2], *mix) for i, mix in enumerate(MIXES)])
def test_mixed_types(kind, dy, x, weight):
    for M in (37, 1111):
        check(kind, *make(M, 1024, dy, x, weight))


@pytest.mark.slow
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("N", [4096, 1001])
@pytest.mark.parametrize("dy", DTYPES)
@pytest.mark.parametrize("x", DTYPES)
@pytest.mark.parametrize("weight", [None, *DTYPES])
def test_every_mix_of_types(kind, N, dy, x, weight):
    check(kind, *make(67, N, dy, x, weight))


@pytest.mark.parametrize("kind, N", [("rmsnorm", N) for N in (1, 8, 128, 1000, 4096, 8192)] + [
    ("layernorm", N) for N in (7, 64, 1001, 2048, 4096, 4100)])
def test_short_rows(kind, N):
    for M in (1, 3, 129, 1500):
        check(kind, *make(M, N))


@pytest.mark.slow
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("N", [1, 2, 3, 5, 7, 8, 9, 16, 24, 31, 32, 40, 63, 64, 65, 72, 96, 127, 128, 129, 130, 200,
                               256, 257, 264, 512, 1000, 1016, 1023, 1024, 1032, 1500, 2000, 2048, 2056, 3072, 3073,
                               4088, 4096, 4100, 4104, 6144, 8184, 8192, 8200, 10001, 12288])
def test_many_short_rows(kind, N):
    for M in (1, 2, 131, 700):
        check(kind, *make(M, N))


@pytest.mark.parametrize("kind, N", [("rmsnorm", N) for N in (16384, 65537, 131072, 262144)] + [
    ("layernorm", N) for N in (20008, 32768, 65536, 131072)])
def test_long_rows(kind, N):
    for M in (1, 11, 301 if N <= 65536 else 67):
        check(kind, *make(M, N, weight="bf16" if kind == "rmsnorm" else "fp32"))


@pytest.mark.slow
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("dtype", ["bf16", "fp32"])
@pytest.mark.parametrize("N", [16384, 16392, 24576, 32768, 40000, 50001, 65528, 65536, 65544, 100008, 131064, 131072,
                               131080, 200008, 262136, 262143, 262144])
def test_many_long_rows(kind, dtype, N):
    for M in (3, 35):
        check(kind, *make(M, N, dtype, dtype, dtype))


@pytest.mark.parametrize("kind", KINDS)
def test_moderate_and_large_M(kind):
    for M in (4096, 32768):
        check(kind, *make(M, 1024))


@pytest.mark.parametrize("kind", ["layernorm", pytest.param("rmsnorm", marks=pytest.mark.slow)])
def test_residual_gradients(kind):
    """dresidual_out is added; dx and dresidual come in their own types, one tensor where those are equal."""
    for N, given, x_type, dx_type, residual_type in ((1024, "fp32", "fp32", "bf16", "fp32"),
                                                     (1024, "bf16", "bf16", None, "bf16"),
                                                     (4096, "bf16", "bf16", "bf16", "fp32"),
                                                     (1001, "fp32", "bf16", None, "fp16")):
        dy, x, weight = make(77, N, "bf16", x_type)
        more = torch.randn(77, N, device="cuda").to(DTYPES[given])
        got = check(kind, dy, x, weight, dresidual_out=more, dresidual_dtype=DTYPES[residual_type],
                    dx_dtype=dx_type and DTYPES[dx_type])
        assert got[0].dtype == DTYPES[dx_type or x_type] and got[3].dtype == DTYPES[residual_type]
        assert (got[3] is got[0]) == (got[0].dtype == got[3].dtype)


@pytest.mark.parametrize("kind", KINDS)
def test_the_residuals_gradient_without_one_of_its_own(kind):
    dy, x, weight = make(40, 1024, x="fp32")
    dx, _, _, dresidual = check(kind, dy, x, weight, dx_dtype=torch.bfloat16, dresidual_dtype=torch.float32)
    assert torch.equal(dresidual.bfloat16(), dx)
    only = check(kind, dy, x, weight, needs=(False, True, False), dresidual_dtype=torch.float32)
    assert only[0] is None and only[2] is None and only[3].dtype == torch.float32


@pytest.mark.parametrize("kind", KINDS)
def test_weight_offset(kind):
    dy, x, weight = make(50, 1024)
    check(kind, dy, x, weight, weight_offset=1.0)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("needs", [(True, False, False), (False, True, False), (False, True, True), (True, True, True)])
@pytest.mark.sampled(each_value=True)
def test_what_is_not_needed_is_left_out(kind, needs):
    got = check(kind, *make(300, 1024), needs=needs)
    assert [t is not None for t in got] == [*needs, False]


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("dtype", ["bf16", "fp32"])
@pytest.mark.parametrize("scale, mean", [(1e4, 0.0), (1e-4, 0.0), (30.0, -300.0), (0.0, 3.0), (0.0, 0.0)])
def test_hard_data(kind, dtype, scale, mean):
    """Large and small values, a mean far from 0, constant rows."""
    check(kind, *make(200, 1024, dtype, dtype, dtype, scale, mean))


@pytest.mark.parametrize("N", [1024, 65536])
def test_a_small_variance_on_a_big_mean_keeps_its_digits(N):
    """sum(g * x) - mean * sum(g) would lose all of them."""
    check("layernorm", *make(70, N, "fp32", "fp32", "fp32", 1.0, 4096.0))


@pytest.mark.parametrize("kind", KINDS)
def test_one_huge_element_a_row(kind):
    dy, x, weight = make(256, 1024, "fp32", "fp32", "fp32")
    x[torch.arange(256, device="cuda"), torch.arange(256, device="cuda") * 4 + 1] = 1e4
    check(kind, dy, x, weight)


@pytest.mark.parametrize("kind", KINDS)
def test_nan_and_inf_stay_where_they_belong(kind):
    for N in (1024, 65536):
        dy, x, weight = make(300, N)
        rstd, mean = statistics(kind, x)
        clean = norm_backward(kind, dy, x, weight, rstd, mean, needs=(True, True, True))
        dy[7, N - 1], dy[131, 5] = NAN, float("inf")
        x[200, 3] = NAN
        rstd, mean = statistics(kind, x)
        got = norm_backward(kind, dy, x, weight, rstd, mean, needs=(True, True, True))
        bad = torch.tensor([7, 131, 200], device="cuda")
        rest = torch.ones(300, dtype=torch.bool, device="cuda")
        rest[bad] = False
        assert torch.equal(got[0][rest], clean[0][rest])
        truth = norms_backward.norm_backward(kind, dy.double(), x.double(), weight.double(), rstd, mean)
        assert torch.equal(torch.isnan(got[0]), torch.isnan(truth[0]))
        assert torch.equal(torch.isnan(got[1]), torch.isnan(truth[1]))
        assert torch.equal(torch.isnan(got[2]), torch.isnan(truth[2])) and got[2][5] == float("inf")


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("N, room, first", [(1024, 1032, 0), (1024, 1032, 8), (1024, 1028, 4), (1024, 1025, 1),
                                            (20008, 20024, 16)])
@pytest.mark.sampled(when=lambda kind, room: (kind == "rmsnorm") == (room in (1032, 1025)))
def test_rows_with_a_stride_are_read_in_place(kind, N, room, first):
    """Around the views there is NaN: a read too far shows."""
    dy, x, weight = make(143, N)
    whole = check(kind, dy, x, weight)
    views = []
    for t in (dy, x):
        wide = torch.full((143, room), NAN, device="cuda", dtype=t.dtype)
        wide[:, first:first + N] = t
        views.append(wide[:, first:first + N])
    got = check(kind, *views, weight)
    if first % 8 == 0 and room % 8 == 0:
        assert all(torch.equal(a, b) for a, b in zip(got[:2], whole[:2])), "the same kernel, the same bits"


@pytest.mark.parametrize("kind", KINDS)
def test_expanded_and_single_rows(kind):
    dy, x, weight = make(90, 1024)
    check(kind, dy[:1].expand(90, 1024), x, weight)
    check(kind, dy[5:6, :], x[7:8], weight)
    check(kind, dy[::3], x[::3], weight)


@pytest.mark.parametrize("offset", [1, 2, 4])
def test_weight_at_any_address(offset):
    dy, x, weight = make(33, 1024, weight="fp32")
    away = torch.empty(1032, device="cuda")[offset:offset + 1024].copy_(weight)
    check("rmsnorm", dy, x, away)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("N", [64, 1001, 65536])
@pytest.mark.sampled(each_value=True)
def test_no_rows(kind, N):
    dy, x, weight = make(0, N)
    rstd, mean = statistics(kind, x)
    dx, dweight, dbias, dresidual = norm_backward(kind, dy, x, weight, rstd, mean, needs=(True, True, True))
    assert dx.shape == (0, N) and dresidual is None
    assert dweight.shape == dbias.shape == (N,) and not dweight.any() and not dbias.any()


@pytest.mark.parametrize("kind, N", [("rmsnorm", 1024), ("layernorm", 1024), ("rmsnorm", 8192), ("layernorm", 4096),
                                     ("rmsnorm", 131072), ("layernorm", 1001)])
def test_the_same_bits_every_time(kind, N):
    dy, x, weight = make(3001 if N <= 8192 else 131, N)
    rstd, mean = statistics(kind, x)
    once = norm_backward(kind, dy, x, weight, rstd, mean, needs=(True, True, True))
    for _ in range(20):
        again = norm_backward(kind, dy, x, weight, rstd, mean, needs=(True, True, True))
        assert all(torch.equal(a, b) for a, b in zip(once[:3], again[:3]))


def test_nothing_is_written_outside_the_output():
    for N in (1024, 1001, 65536):
        dy, x, weight = make(35, N)
        rstd, _ = statistics("rmsnorm", x)
        whole = torch.full((39, N), NAN, device="cuda", dtype=x.dtype)
        columns = torch.full((N + 16,), NAN, device="cuda", dtype=weight.dtype)
        RMSNormBackward.launch(dy=dy, x=x, weight=weight, rstd=rstd, dx=whole[2:37], dweight=columns[8:N + 8])
        assert torch.isfinite(whole[2:37]).all() and torch.isfinite(columns[8:N + 8]).all()
        assert torch.isnan(whole[:2]).all() and torch.isnan(whole[37:]).all()
        assert torch.isnan(columns[:8]).all() and torch.isnan(columns[N + 8:]).all()


def _other_plans(N, few):
    s = catalog.spec("rmsnorm", N)
    found = variants(s.shape)
    return s, {k: v for k, v in found.items() if not few or k in few}


FEW = ("early=False", "evict_first=True", "streaming=True", "finish=tail", "cooperative=False", "warps=4", "warps=16",
       "vectors=packed", "vectors=late", "pdl=False", "two blocks of 8", "halves three blocks of 4")


def _check_plan(s, name, p, M):
    N = s.N
    dy, x, weight = make(M, N)
    rstd, _ = statistics("rmsnorm", x)
    dx, dweight = torch.full_like(x, NAN), torch.full_like(weight, NAN)
    RMSNormBackward.launch(plan=p, dy=dy, x=x, weight=weight, rstd=rstd, dx=dx, dweight=dweight)
    judge("rmsnorm", dy, x, weight, rstd, None, (dx, dweight, None, None), what=f"N {N} {name}")


def test_kernels_that_start_under_the_end_of_each_other_wait_for_it():
    """Each one's dx is the next one's dy, and its column sums take the room of the one before."""
    N, M = 4096, 1500
    s, found = _other_plans(N, ("pdl=False",))
    dy, x, weight = make(M, N)
    rstd, _ = statistics("rmsnorm", x)
    ends = []
    for p in (found["pdl=False"], *[variants(s.shape)["planned"]] * 5):
        results, dys = [], dy
        for _ in range(20):
            dx, dweight = torch.empty_like(x), torch.empty_like(weight)
            RMSNormBackward.launch(plan=p, dy=dys, x=x, weight=weight, rstd=rstd, dx=dx, dweight=dweight)
            results += [dx, dweight]
            dys = dx
        ends.append(results)
    assert all(torch.equal(a, b) for other in ends[1:] for a, b in zip(ends[0], other))


@pytest.mark.parametrize("name", [pytest.param(n, marks=[pytest.mark.slow] * (i % 4 > 0)) for i, n in enumerate(FEW)])
def test_other_plans(name):
    """What tuning may choose instead of the plan."""
    s, found = _other_plans(4096, FEW)
    for M in (1, 1500):
        _check_plan(s, name, found[name], M)


@pytest.mark.slow
@pytest.mark.parametrize("N", [64, 1024, 16384, 65536, 131072])
def test_every_other_plan(N):
    s, found = _other_plans(N, None)
    for name, p in found.items():
        _check_plan(s, name, p, 67)


@pytest.mark.parametrize("N", [1024, 4096])
@pytest.mark.parametrize("kind", KINDS)
def test_on_side_streams(kind, N):
    """Each stream has its counter: two grids with a barrier at once, many times, and the right bits from both. Blocks
    of 4096 columns leave no room for another grid's, and a stream's next grid comes before the last one has gone."""
    inputs = [make((1 << 22) // N, N, seed=seed) for seed in (1, 2)]
    numbers = [statistics(kind, x) for _, x, _ in inputs]
    wanted = [norm_backward(kind, *i, *n) for i, n in zip(inputs, numbers)]
    streams = [torch.cuda.Stream() for _ in inputs]
    torch.cuda.synchronize()
    got = [[], []]
    for _ in range(50):
        for k, stream in enumerate(streams):
            with torch.cuda.stream(stream):
                got[k].append(norm_backward(kind, *inputs[k], *numbers[k])[:2])
    torch.cuda.synchronize()
    for k in range(2):
        assert all(torch.equal(dx, wanted[k][0]) and torch.equal(dw, wanted[k][1]) for dx, dw in got[k])


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("N", [1024, 65536])
def test_in_a_cuda_graph(kind, N):
    dy, x, weight = make(200, N)
    rstd, mean = statistics(kind, x)
    norm_backward(kind, dy, x, weight, rstd, mean)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        first = norm_backward(kind, dy, x, weight, rstd, mean)
        second = norm_backward(kind, dy, x, weight, rstd, mean)
    for seed in (1, 2, 3):
        dy.copy_(make(200, N, seed=seed)[0])
        for t in (*first[:2], *second[:2]):
            t.fill_(NAN)
        graph.replay()
        eager = norm_backward(kind, dy, x, weight, rstd, mean)
        assert all(torch.equal(t, e) for pair in (first, second) for t, e in zip(pair[:2], eager[:2]))


def test_an_eager_call_is_one_launch():
    from torch.profiler import ProfilerActivity, profile

    dy, x, weight = make(256, 1024)
    rstd, _ = statistics("rmsnorm", x)
    norm_backward("rmsnorm", dy, x, weight, rstd)
    with profile(activities=[ProfilerActivity.CUDA]) as record:
        norm_backward("rmsnorm", dy, x, weight, rstd)
        torch.cuda.synchronize()
    kernels = [e for e in record.events() if e.device_type == torch.autograd.DeviceType.CUDA]
    assert len(kernels) == 1, [e.name for e in kernels]


@pytest.mark.parametrize("kind", KINDS)
def test_against_autograd(kind):
    """The whole of it, as torch has it in float64."""
    dy, x, weight = make(200, 1024, "fp32", "fp32", "fp32")
    wide = [t.double().requires_grad_() for t in (x, weight, torch.zeros_like(weight))]
    if kind == "layernorm":
        y = torch.nn.functional.layer_norm(wide[0], (1024,), wide[1], wide[2], EPS)
    else:
        y = torch.nn.functional.rms_norm(wide[0], (1024,), wide[1], EPS) + wide[2]
    truth = torch.autograd.grad(y, wide, dy.double())
    got = check(kind, dy, x, weight)
    for ours, want in zip(got[:3 if kind == "layernorm" else 2], truth):
        assert (ours - want).abs().max() <= 2e-6 * want.abs().max() * 8


@pytest.mark.slow
@pytest.mark.alone
@pytest.mark.parametrize("kind", KINDS)
def test_more_than_2_31_elements(kind):
    M, N = (1 << 31) // 4096 + 37, 4096
    dy = torch.zeros(M, N, device="cuda", dtype=torch.bfloat16)
    x = torch.ones(M, N, device="cuda", dtype=torch.bfloat16)
    rows = torch.tensor([0, 1, M // 2 + 1, M - 38, M - 37, M - 2, M - 1], device="cuda")
    sample_dy, sample_x, weight = make(len(rows), N)
    dy[rows], x[rows] = sample_dy, sample_x
    rstd = torch.ones(M, device="cuda")
    mean = torch.zeros(M, device="cuda") if kind == "layernorm" else None
    rstd[rows], means = statistics(kind, sample_x)[0], statistics(kind, sample_x)[1]
    if mean is not None:
        mean[rows] = means
    dx, dweight, dbias, _ = norm_backward(kind, dy, x, weight, rstd, mean, needs=(True, True, True))
    judge(kind, sample_dy, sample_x, weight, rstd[rows], means, (dx[rows], dweight, dbias, None))
    dx[rows] = 0
    assert not dx.any()


def test_bad_input_launches_nothing():
    dy, x, weight = make(4, 64)
    rstd, mean = statistics("layernorm", x)
    cases = [(ValueError, "kind: got", ("batchnorm", dy, x, weight, rstd)),
             (ValueError, "dy: shape is", ("rmsnorm", dy[:3], x, weight, rstd)),
             (TypeError, "x: dtype", ("rmsnorm", dy, x.double(), weight, rstd)),
             (TypeError, "rstd: dtype", ("rmsnorm", dy, x, weight, rstd.bfloat16())),
             (ValueError, "rstd: shape is", ("rmsnorm", dy, x, weight, rstd[:3])),
             (TypeError, "mean: got NoneType", ("layernorm", dy, x, weight, rstd)),
             (ValueError, "rmsnorm has none", ("rmsnorm", dy, x, weight, rstd, mean)),
             (ValueError, "weight: is on cpu", ("rmsnorm", dy, x, weight.cpu(), rstd)),
             (ValueError, "weight: shape is", ("rmsnorm", dy, x, weight[:32], rstd)),
             (ValueError, "x: strides are", ("rmsnorm", dy, x.t().contiguous().t(), weight, rstd))]
    for error, says, args in cases:
        for _ in range(2):  # a refused call leaves nothing behind that would let the next one through
            with pytest.raises(error, match=says):
                norm_backward(*args)


def test_keys_differ_where_the_kernel_does():
    dy, x, weight = make(4, 64)
    rstd, mean = statistics("layernorm", x)
    wide = torch.zeros(4, 72, device="cuda", dtype=x.dtype)
    more = (None, 0.0, (True, True, False), None, None, None)
    calls = [("rmsnorm", dy, x, weight, rstd, None, *more), ("layernorm", dy, x, weight, rstd, mean, *more),
             ("rmsnorm", dy.float(), x, weight, rstd, None, *more), ("rmsnorm", dy, x, None, rstd, None, *more),
             ("rmsnorm", dy, wide[:, 4:68], weight, rstd, None, *more),
             ("rmsnorm", dy, x, weight, rstd, None, x, *more[1:]),
             ("rmsnorm", dy, x, weight, rstd, None, None, 1.0, *more[2:]),
             ("rmsnorm", dy, x, weight, rstd, None, None, 0.0, (True, False, False), *more[3:])]
    assert len({ops._key(*call) for call in calls}) == len(calls)
    assert launch.bulk(64, [wide[:, 8:]]) and not launch.bulk(64, [wide[:, 4:68]])
    assert plan(catalog.spec("rmsnorm", 64).shape).stages
