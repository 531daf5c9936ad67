"""softmax and log_softmax on the GPU, forward and backward: numerics by the 2x rule, every memory layout."""
import pytest
import torch

import tkq
from tests.helpers.process.streams import on_a_side_stream
from tkq.softmax import ops
from tkq.testing import assert_2x

DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}
TORCH = {False: torch.softmax, True: torch.log_softmax}
OPS = {False: tkq.softmax, True: tkq.log_softmax}
LOGS = pytest.mark.parametrize("log", [False, True])
# fp32: ex2.approx is good to 2 ulp and used twice, rcp.approx to 1; rounded to 16 bits nothing of it is left. The log
# of the sum goes into all of a row, in rows alike with the same rounding
ULPS = {torch.bfloat16: 1, torch.float16: 1, torch.float32: 4}
BIAS = {torch.bfloat16: 0.25, torch.float16: 0.25, torch.float32: 1}


def make(shape, dtype, scale=1.0, seed=0):
    g = torch.Generator("cuda").manual_seed(seed)
    return (torch.randn(shape, device="cuda", generator=g) * scale).to(DTYPES[dtype])


def nans(like):
    return torch.full(like.shape, float("nan"), dtype=like.dtype, device=like.device)


def forward(x, log=False, scale=1.0):
    """Into an output that is NaN before."""
    out = nans(x)
    y = ops._carefully(x, scale, log, out)
    assert y is out
    return y


def check_forward(x, log=False, scale=1.0, what=""):
    y = forward(x, log, scale)
    truth, peer = TORCH[log](x.double() * scale, -1), TORCH[log](x.float() * scale, -1).to(x.dtype)
    assert_2x(y, truth, peer, ulps=ULPS[x.dtype], what=f"{what} forward", bias_ulps=BIAS[x.dtype])
    if not log:
        relative(y, truth, what)
    return y


def relative(y, truth, what):
    """Small probabilities keep their digits: within an ulp of themselves, or of the smallest normal number."""
    info, finite = torch.finfo(y.dtype), torch.isfinite(truth)
    # |x| rounding errors of x, of at most 150 below the largest, in fp32
    allowed = truth[finite] * (info.eps + 2e-5) + info.tiny
    worst = ((y.double() - truth)[finite].abs() - allowed).max().item() if finite.any() else 0
    assert worst <= 0, f"{what}: {worst:.3e} beyond a relative error of {info.eps:.1e}"


def check_backward(x, log=False, scale=1.0, dy=None, what=""):
    y = TORCH[log](x.float() * scale, -1).to(x.dtype)
    dy = make(x.shape, "fp32", seed=5).to(x.dtype) if dy is None else dy
    dx = nans(x)
    assert ops._backward_carefully(y, dy, scale, log, dx) is dx

    def formula(y, g):
        total = (g if log else g * y).sum(-1, keepdim=True)
        return scale * (g - y.exp() * total if log else y * (g - total))

    truth, peer = formula(y.double(), dy.double()), formula(y.float(), dy.float()).to(x.dtype)
    assert_2x(dx, truth, peer, ulps=ULPS[x.dtype], what=f"{what} backward", bias_ulps=BIAS[x.dtype])


def check(x, log=False, scale=1.0, what=""):
    check_forward(x, log, scale, what)
    check_backward(x, log, scale, what=what)


@LOGS
@pytest.mark.parametrize("x", DTYPES)
@pytest.mark.sampled(when=lambda log, x: log == (x == "fp16") or x == "bf16")
def test_types(log, x):
    for shape in ((37, 1024), (5, 1000), (9, 32768)):
        check(make(shape, x, 2.0), log, 0.7, f"{shape}")


@pytest.mark.parametrize("N", [1, 2, 3, 7, 8, 9, 31, 64, 65, 127, 128, 130, 257, 1000, 1023, 2048, 3072, 3073, 4096,
                               4100, 6144, 8192, 8200, 10001, 16384])
@pytest.mark.sampled(when=lambda N: N in (1, 3, 7, 64, 128, 1000, 1023, 3073, 4100, 8192, 16384))
def test_short_rows(N):
    for M in (1, 3, 129):
        check(make((M, N), "bf16", 3.0), what=f"M {M}")


@pytest.mark.parametrize("x, N, log", [
    ("bf16", 16392, False), ("bf16", 40000, True), ("bf16", 50257, False), ("bf16", 65536, False),
    ("bf16", 262143, False), ("bf16", 262144, True), ("fp32", 262144, False), *(
        pytest.param(*each, marks=pytest.mark.slow) for each in (
            ("bf16", 128256, False), ("bf16", 131072, False), ("bf16", 262144, False), ("fp32", 65540, True),
            ("fp32", 262143, False)))])
def test_long_rows(x, N, log):
    check(make((11, N), x, 3.0), log)


@pytest.mark.parametrize("N", [1024, pytest.param(16384, marks=pytest.mark.slow), 131072,
                               pytest.param(262144, marks=pytest.mark.slow)])
def test_the_variants_that_tuning_may_choose(N):
    """A sample of the configs beside the planned one; M a multiple of none."""
    from tkq import runtime
    from tkq.softmax.plan import variants
    from tkq.softmax.spec import SoftmaxSpec

    x = make((13, N), "bf16", 3.0)
    truth, peer = torch.softmax(x.double(), -1), torch.softmax(x.float(), -1).bfloat16()
    seen = {}
    spec = SoftmaxSpec(N, "bf16", 8)
    for config in variants(spec):
        seen.setdefault((config.load, min(config.cluster, 2), config.threads_per_row < config.threads), config)
    assert len(seen) >= 2
    for config in seen.values():
        out = nans(x)
        runtime.function(ops.recipe(spec, config))(x, out, 1.0)
        assert_2x(out, truth, peer, ulps=1, what=str(config))


@LOGS
@pytest.mark.parametrize("x", ["bf16", "fp32"])
@pytest.mark.parametrize("size", [1e4, 1e-4, 0.0])
@pytest.mark.sampled(each_value=True)
def test_hard_sizes(log, x, size):
    for N in (1024, 1001, 32768):
        check(make((9, N), x, size), log, what=f"N {N}")


@LOGS
@pytest.mark.parametrize("N", [7, 1000, 1024, 4096, 32768, 262144])
@pytest.mark.sampled(each_value=True)
def test_infinities_and_nan_are_torchs(log, N):
    """All -inf but one, all -inf, one +inf, one NaN, half -inf, all the lowest finite value, one huge element."""
    x = make((9, N), "bf16")
    inf, low = float("inf"), torch.finfo(torch.bfloat16).min
    x[0], x[1], x[5] = -inf, -inf, low
    x[0, N // 2] = 3.0
    x[2, N - 1], x[3, 0], x[4, ::2] = inf, float("nan"), -inf
    x[6, N // 3] = 1e30
    x[7, 1:] = low
    truth, peer = TORCH[log](x.double(), -1), TORCH[log](x.float(), -1).bfloat16()
    y = forward(x, log)
    assert torch.equal(y.isnan(), peer.isnan())
    whole = ~peer.isnan().any(-1)
    assert_2x(y[whole], truth[whole], peer[whole], ulps=1)
    assert torch.equal(y[8], forward(x[8:9], log)[0]), "a row does not depend on its neighbours"
    dy = make(x.shape, "bf16", seed=3)
    wanted = torch.ops.aten._log_softmax_backward_data if log else torch.ops.aten._softmax_backward_data
    wanted = wanted(dy.float(), y.float(), -1, torch.float32)
    dx = ops._launch_backward(y, dy, 1.0, log)
    assert torch.equal(dx.isnan(), wanted.isnan())
    whole = ~wanted.isnan().any(-1)
    assert torch.allclose(dx[whole].float(), wanted[whole], rtol=2**-7, atol=2**-7 * wanted[whole].abs().max().item())


@LOGS
def test_a_scale_below_zero(log):
    for N in (7, 1001, 4096):
        check(make((5, N), "fp32"), log, -2.5)


@LOGS
@pytest.mark.parametrize("x", ["bf16", "fp32"])
@pytest.mark.parametrize("N, room, first", [
    (1024, 1024 + 8, 0), (1024, 1032, 8), (1024, 1025, 0), (1024, 1026, 1), (1000, 1024, 4), (1001, 1009, 3),
    (1001, 1001, 0), (40000, 40003, 3), (7, 16, 1), (1, 3, 1)])
@pytest.mark.sampled(when=lambda log, x, N, room: (log == (x == "fp32") and (x == "bf16" or N > 1024)) or (
    (N, room) in ((1024, 1026), (1001, 1009)) and (x == "bf16" or log)))
def test_rows_that_begin_anywhere(log, x, N, room, first):
    """Around the view there is NaN: a read too far shows. Around the results, too: a write too far shows."""
    wide = torch.full((21, room), float("nan"), device="cuda", dtype=DTYPES[x])
    view = wide[:, first:first + N]
    view.copy_(make((21, N), x))
    want = check_forward(view.contiguous(), log)
    assert_close(OPS[log](view), want)
    around = torch.full((23, N), float("nan"), device="cuda", dtype=DTYPES[x])
    ops._run(view, (view, around[1:-1]), 1.0, log, False)
    assert_close(around[1:-1], want)
    assert torch.isnan(around[0]).all() and torch.isnan(around[-1]).all()
    same = torch.full_like(wide, float("nan"))  # results that lie as the rows do
    ops._run(view, (view, same[:, first:first + N]), 1.0, log, False)
    assert_close(same[:, first:first + N], want)
    assert torch.isnan(same[:, :first]).all() and torch.isnan(same[:, first + N:]).all()
    dy = make((21, N), x, seed=2)
    dx = ops._launch_backward(want, dy, 1.0, log)
    same.fill_(float("nan"))
    grads = same[:, first:first + N]
    wide.fill_(float("nan"))
    y = wide[:, first:first + N].copy_(want)
    held = torch.full_like(wide, float("nan"))[:, first:first + N].copy_(dy)
    ops._run(y, (y, held, grads), 1.0, log, True)
    assert_close(grads, dx)
    assert torch.isnan(same[:, :first]).all() and torch.isnan(same[:, first + N:]).all()


def assert_close(a, b):
    """Equal but for the order of additions."""
    eps = torch.finfo(a.dtype).eps
    assert torch.allclose(a.float(), b.float(), rtol=4 * eps, atol=4 * eps * b.float().abs().max().item() + 1e-30)


@LOGS
def test_autograd_is_torchs(log):
    for shape, dim in (((5, 1000), -1), ((3, 4, 65), 1), ((6, 7), 0), ((2, 3, 4, 32), -1)):
        x = make(shape, "fp32").requires_grad_()
        g = make(shape, "fp32", seed=1)
        mine, = torch.autograd.grad(OPS[log](x, dim=dim, scale=0.5), x, g)
        wanted, = torch.autograd.grad(TORCH[log](0.5 * x, dim), x, g)
        assert torch.allclose(mine, wanted, rtol=1e-4, atol=1e-6), shape
    x = make((5, 1000), "bf16").requires_grad_()
    mine, = torch.autograd.grad(OPS[log](x).sum(), x)  # an expanded gradient
    y = OPS[log](x).detach()
    assert torch.equal(mine, ops._launch_backward(y, torch.ones_like(y), 1.0, log))
    mine, = torch.autograd.grad(OPS[log](x).t().contiguous().square().sum(), x)
    wanted, = torch.autograd.grad(TORCH[log](x, -1).square().sum(), x)
    assert torch.allclose(mine.float(), wanted.float(), rtol=0.02, atol=0.02 * wanted.abs().max().item())


@LOGS
@pytest.mark.parametrize("shape", [(0, 128), (2, 0, 128), (0, 5, 7)])
def test_no_rows(log, shape):
    x = torch.empty(shape, device="cuda", dtype=torch.bfloat16, requires_grad=True)
    y = OPS[log](x)
    assert y.shape == x.shape
    assert torch.autograd.grad(y.sum(), x)[0].shape == x.shape


@LOGS
@pytest.mark.parametrize("N", [512, 16384, 50257])
@pytest.mark.sampled(each_value=True)
def test_the_same_bits_every_time(log, N):
    x = make((77, N), "bf16").requires_grad_()
    once, g = OPS[log](x), make((77, N), "bf16", seed=1)
    grad, = torch.autograd.grad(once, x, g, retain_graph=True)
    for _ in range(10):
        assert torch.equal(OPS[log](x), once)
        assert torch.equal(torch.autograd.grad(once, x, g, retain_graph=True)[0], grad)


def test_on_a_side_stream():
    x = make((4096, 4096), "bf16")
    want = tkq.softmax(x)
    assert torch.equal(on_a_side_stream(tkq.softmax, x), want)


@pytest.mark.parametrize("N", [1000, 65536])
def test_in_a_cuda_graph(N):
    x, g = make((64, N), "bf16"), make((64, N), "bf16", seed=9)
    ops._launch_backward(tkq.softmax(x), g, 1.0, False)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        y = tkq.softmax(x)
        dx = ops._launch_backward(y, g, 1.0, False)
    for seed in (1, 2):
        x.copy_(make((64, N), "bf16", seed=seed))
        y.fill_(float("nan"))
        graph.replay()
        assert torch.equal(y, tkq.softmax(x)) and torch.equal(dx, ops._launch_backward(y, g, 1.0, False))


@LOGS
def test_the_torch_op(log):
    x = make((9, 256), "bf16").requires_grad_()
    torch.library.opcheck(torch.ops.tkq.softmax, (x, 0.5, log))
    compiled = torch.compile(lambda x: OPS[log](x + 1, scale=0.5), fullgraph=True)
    assert torch.equal(compiled(x), OPS[log](x + 1, scale=0.5))
    mine, = torch.autograd.grad(compiled(x).float().square().sum(), x)
    wanted, = torch.autograd.grad(OPS[log](x + 1, scale=0.5).float().square().sum(), x)
    assert torch.allclose(mine, wanted, rtol=0.02, atol=1e-4)


def test_bad_input_launches_nothing():
    x = make((4, 64), "bf16")
    for error, says, call in (
            (TypeError, "x: dtype is torch.float64", lambda: tkq.softmax(x.double())),
            (TypeError, "scale: got str", lambda: tkq.softmax(x[:, :40].contiguous(), scale="a")),
            (NotImplementedError, "N = 262145", lambda: tkq.softmax(torch.empty(1, 262145, device="cuda"))),
            (ValueError, "dy: is", lambda: ops._launch_backward(x, x.float(), 1.0, False))):
        for _ in range(2):
            with pytest.raises(error, match=says):
                call()


@LOGS
def test_a_call_is_one_launch_each_way(log):
    from torch.profiler import ProfilerActivity, profile

    x = make((256, 1024), "bf16").requires_grad_()
    g = make((256, 1024), "bf16")
    torch.autograd.grad(OPS[log](x), x, g)
    with profile(activities=[ProfilerActivity.CUDA]) as record:
        torch.autograd.grad(OPS[log](x), x, g)
        torch.cuda.synchronize()
    found = [e.name for e in record.events() if e.device_type == torch.autograd.DeviceType.CUDA]
    assert len(found) == 2, found


@pytest.mark.slow
@pytest.mark.alone
@LOGS
def test_more_than_2_31_elements(log):
    M, N = (1 << 31) // 4096 + 5, 4096
    x = torch.zeros(M, N, device="cuda", dtype=torch.bfloat16)
    rows = torch.tensor([0, 1, (1 << 30) // N, M // 2 + 1, M - 6, M - 5, M - 2, M - 1], device="cuda")
    sample = make((len(rows), N), "bf16", 3.0)
    x[rows] = sample
    y = torch.full_like(x, float("nan"))
    ops._carefully(x, 1.0, log, y)
    assert torch.equal(y[rows], check_forward(sample, log))
    assert not torch.isnan(y[:: M // 1000]).any() and not torch.isnan(y[-100:]).any()
    g = torch.ones_like(x)
    ops._backward_carefully(y, g, 1.0, log, x)
    assert torch.equal(x[rows], ops._launch_backward(y[rows], g[rows], 1.0, log))
