"""cross_entropy on the GPU: numerics by the 2x rule, hard data, every memory layout, streams and graphs."""
import pytest
import torch
import torch.nn.functional as F

import tkq
from tests.helpers.losses.cases import DTYPES, EVERYTHING, OPTIONS, check, check_both, class_weights, incoming, make
from tests.helpers.process.streams import on_a_side_stream
from tests.helpers.sanitizer.nan_fill import poisoned
from tkq.losses import launch, ops
from tkq.losses.plan import SINGLE_LAUNCH_ROWS, variants
from tkq.losses.spec import CrossEntropySpec
from tkq.reference.losses import Terms
from tkq.runtime.call import debug


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("V", [1000, 4096])
@pytest.mark.parametrize("options", [{}, EVERYTHING], ids=["plain", "everything"])
@pytest.mark.sampled(when=lambda dtype, V, options: ((V == 1000) == (dtype != "bf16")) == (not options) and (
    dtype != "fp16" or not options))
def test_types(dtype, V, options):
    logits, target = make((37, V), dtype, 3.0)
    check(logits, target, **options)
    check(logits, target.int(), weight=class_weights(V, "bf16"), **options)


@pytest.mark.parametrize("options", OPTIONS, ids=str)
@pytest.mark.parametrize("weighted", [False, True])
@pytest.mark.parametrize("V", [1000, 40000])
@pytest.mark.sampled(when=lambda options, weighted, V: weighted == (V == 1000) ^ OPTIONS.index(options) % 2 and (
    V == 1000 or weighted))
@pytest.mark.sampled(each_value=True)
def test_each_option(options, weighted, V):
    logits, target = make((37, V), "bf16", 3.0)
    if "ignore_index" in options:
        target[target < 0] = 3
    for reduction in ("none", "mean"):
        check(logits, target, weight=class_weights(V) if weighted else None, reduction=reduction, **options)


@pytest.mark.parametrize("V", [1, 2, 3, 7, 8, 31, 64, 100, 257, 1000, 1023, 1024, 1536, 2048, 3073, 4100, 8192, 10001,
                               16384, 16392])
@pytest.mark.sampled(when=lambda V: V in (1, 100, 1000, 1024, 16392))
def test_few_classes(V):
    for M in (1, 3, 130):
        logits, target = make((M, V), "bf16", 2.0)
        check(logits, target, what=f"M {M}")
    check_both(logits, target)


@pytest.mark.parametrize("dtype, V", [("bf16", 32001), ("bf16", 32768), ("bf16", 50257), ("bf16", 65536),
                                      ("bf16", 128256), ("bf16", 151936), ("bf16", 262144), ("bf16", 262208),
                                      ("bf16", 524288), ("fp32", 50257), ("fp32", 262144), ("fp32", 524287)])
@pytest.mark.sampled(when=lambda dtype, V: (dtype, V) in (("bf16", 50257), ("bf16", 524288), ("fp32", 50257)))
def test_many_classes(dtype, V):
    logits, target = make((11, V), dtype, 2.0)
    check(logits, target)
    check_both(logits, target)


@pytest.mark.parametrize("kind, V", [
    ("backward", 1024),
    *[pytest.param(kind, V, marks=pytest.mark.slow)  # 16384 has all ways of the forward, 1024 and 131072 the other's
      for kind, V in (("forward", 16384), ("forward", 1024), ("forward", 131072), ("backward", 16384),
                      ("backward", 131072))]])
def test_the_variants_that_tuning_may_choose(kind, V):
    """A sample of the configs beside the planned one; M a multiple of none."""
    from tkq import runtime

    logits, target = make((13, V), "bf16", 3.0)
    terms, dloss = Terms(reduction="none"), torch.ones(13, device="cuda")
    loss, saved = launch.forward(logits, target, terms)
    wanted = loss if kind == "forward" else launch.backward(logits, target, dloss, saved, terms)
    spec, seen = CrossEntropySpec(kind, V, "bf16", vector=8), {}
    for config in variants(spec):
        streams = hasattr(config, "stages")
        seen.setdefault((streams, config.load, config.cluster, config.threads_per_row < config.threads), config)
    assert len(seen) >= 2
    for config in seen.values():
        out = torch.full_like(wanted, float("nan"))
        given = (out, torch.empty_like(saved), None, None) if kind == "forward" else (dloss, saved, None, out)
        runtime.function(launch.recipe(spec, config))(logits, target, None, *given, -100, 0.0, 0.0, 0.0)
        assert torch.allclose(out.float(), wanted.float(), rtol=1e-5, atol=1e-6), config


# ---- hard data ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", ["bf16", pytest.param("fp32", marks=pytest.mark.slow)])
@pytest.mark.parametrize("size", [1e4, 1e-4, 0.0])
def test_hard_sizes(dtype, size):
    for V in (1000, 1001, 40000):
        logits, target = make((21, V), dtype, size)
        check(logits, target, what=f"V {V}")
        check(logits, target, what=f"V {V}", label_smoothing=0.1)
        check_both(logits, target, what=f"V {V}")


@pytest.mark.parametrize("V", [7, 1000, 4096, 50257, 131072])
def test_infinities_and_nan_are_torchs(V):
    """All -inf but one (the target, another), all -inf, +inf, NaN, the lowest finite value everywhere, one huge."""
    inf, nan, low = float("inf"), float("nan"), torch.finfo(torch.bfloat16).min
    logits, target = make((10, V))
    target[:] = torch.arange(10, device="cuda") % V
    logits[0:3] = -inf
    logits[0, target[0]], logits[1, (target[1] + 1) % V] = 2.0, 2.0
    logits[3, V - 1], logits[4, 0], logits[5] = inf, nan, low
    logits[6, V // 3], logits[7, target[7]] = 1e30, -inf
    logits[8] = nan
    target[8] = -100  # ignored, whatever it holds
    wide = logits.float().requires_grad_()
    wanted = F.cross_entropy(wide, target, reduction="none")
    ours = logits.clone().requires_grad_()
    loss = tkq.cross_entropy(ours, target, reduction="none")
    assert torch.equal(loss.isnan(), wanted.isnan()) and torch.equal(loss.isinf(), wanted.isinf())
    fine = wanted.isfinite()
    assert torch.allclose(loss[fine], wanted[fine], rtol=1e-6, atol=1e-5) and loss[8] == 0
    mine, = torch.autograd.grad(loss, ours, torch.ones_like(loss))
    theirs, = torch.autograd.grad(wanted, wide, torch.ones_like(wanted))
    assert not mine[8].any(), "an ignored row has no gradient"
    rest = torch.arange(10, device="cuda") != 8
    assert torch.equal(mine[rest].isnan(), theirs[rest].isnan())
    assert torch.allclose(mine[rest].float(), theirs[rest], rtol=2**-7, atol=1e-6, equal_nan=True)
    check_both(logits, target)


@pytest.mark.parametrize("dtype", ["bf16", "fp32"])
def test_small_gradients_keep_their_digits(dtype):
    """With 128256 classes nearly every gradient is 1e-5 of the largest: each is compared with itself."""
    logits, target = make((9, 128256), dtype, 2.0)
    target.clamp_min_(0)
    terms = Terms(reduction="mean")
    _, saved = launch.forward(logits, target, terms)
    gradient = launch.backward(logits, target, torch.ones((), device="cuda"), saved, terms).double()
    truth = torch.softmax(logits.double(), -1) / 9
    truth[torch.arange(9, device="cuda"), target] -= 1 / 9
    limit = torch.finfo(DTYPES[dtype]).eps + 1e-5
    assert ((gradient - truth).abs() <= limit * truth.abs()).all()


# ---- reductions over rows -------------------------------------------------------------------------------------------


@pytest.mark.parametrize("reduction", ["mean", pytest.param("sum", marks=pytest.mark.slow)])
@pytest.mark.parametrize("M", [1, 2, 37, 4095, 4096, 4097, 100_000])
def test_every_row_counts_once(reduction, M):
    logits, target = make((M, 24), "bf16", 2.0)
    for weight in (None, class_weights(24)):
        check(logits, target, weight=weight, reduction=reduction, what=f"M {M}")
    check_both(logits, target, reduction=reduction)


@pytest.mark.parametrize("reduction, value", [("mean", float("nan")), ("sum", 0.0)])
def test_all_ignored_and_no_rows(reduction, value):
    logits, target = make((9, 1000))
    logits.requires_grad_()
    ignored = torch.full_like(target, -100)
    loss = tkq.cross_entropy(logits, ignored, reduction=reduction)
    assert torch.equal(loss.cpu(), torch.tensor(value)) or (value != value and loss.isnan())
    assert not torch.autograd.grad(loss, logits)[0].any()
    _, gradient = ops.cross_entropy_and_gradient(logits.detach(), ignored, reduction=reduction)
    assert not gradient.any()
    for x in (logits[:0], logits.detach()[:0]):
        empty = tkq.cross_entropy(x, target[:0], reduction=reduction)
        assert empty.shape == () and (empty.isnan() if value != value else empty == value)
    assert tkq.cross_entropy(logits[:0], target[:0], reduction="none").shape == (0,)
    assert torch.autograd.grad(tkq.cross_entropy(logits[:0], target[:0], reduction="sum"), logits)[0].shape == (9, 1000)


@pytest.mark.parametrize("V", [1000, 50257, 131072])
def test_the_same_bits_every_time(V):
    logits, target = make((300, V))
    logits.requires_grad_()

    def run():
        loss = tkq.cross_entropy(logits, target, label_smoothing=0.1, weight=weight)
        return loss.detach(), torch.autograd.grad(loss, logits)[0]

    weight = class_weights(V)
    first = run()
    for _ in range(10):
        assert all(torch.equal(a, b) for a, b in zip(first, run()))


def test_a_target_out_of_range_is_nan_in_its_row_or_an_error_when_asked_for():
    for V in (1000, 50257):
        logits, target = make((9, V))
        target[4], target[6], target[7] = V, -1, 2**40
        loss = tkq.cross_entropy(logits.requires_grad_(), target, reduction="none")
        bad = torch.tensor([0, 0, 0, 0, 1, 0, 1, 1, 0], dtype=torch.bool, device="cuda")
        assert torch.equal(loss.isnan(), bad)
        gradient, = torch.autograd.grad(loss.nansum(), logits)
        assert torch.equal(gradient.isnan().all(-1), bad) and torch.equal(gradient.isnan().any(-1), bad)
        for weight in (None, class_weights(V)):
            assert tkq.cross_entropy(logits, target, weight=weight).isnan()
        with debug.checks(), pytest.raises(IndexError, match=rf"target: {V} at \(4,\)"):
            tkq.cross_entropy(logits, target)


# ---- memory ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", ["bf16", "fp32"])
@pytest.mark.parametrize("V, room, first", [
    (1024, 1032, 0), (1024, 1032, 8), (1024, 1025, 0), (1024, 1026, 1), (1000, 1024, 4), (1001, 1009, 3),
    (1001, 1001, 0), (50257, 50304, 0), (40000, 40003, 3), (7, 16, 1), (1, 3, 1)])
@pytest.mark.sampled(when=lambda dtype, room: dtype == "bf16" or room == 40003)
def test_rows_that_begin_anywhere(dtype, V, room, first):
    """Around the view there is NaN: a read too far shows; and so it stays: a write too far shows."""
    wide = torch.full((21, room), float("nan"), device="cuda", dtype=DTYPES[dtype])
    view = wide[:, first:first + V]
    logits, target = make((21, V), dtype)
    view.copy_(logits)
    loss, gradient = check(view, target)
    assert torch.allclose(loss, check(logits, target)[0], rtol=1e-5)
    check_both(view, target)
    loss, saved = launch.forward(view, target, Terms(reduction="none"))
    over = launch.backward(view, target, incoming(target), saved, Terms(reduction="none"), True)
    assert over.data_ptr() == view.data_ptr() and over.shape == view.shape
    eps = torch.finfo(view.dtype).eps
    assert torch.allclose(over.float(), gradient.float(), rtol=2 * eps, atol=1e-6)
    assert torch.isnan(wide[:, :first]).all() and torch.isnan(wide[:, first + V:]).all()


def test_leading_dimensions_and_dloss_of_any_stride():
    logits, target = make((24, 1000), "fp32")
    logits.requires_grad_()
    flat = tkq.cross_entropy(logits, target, reduction="none")
    for shape in ((4, 6), (2, 3, 4)):
        loss = tkq.cross_entropy(logits.view(*shape, -1), target.view(shape), reduction="none")
        assert torch.equal(loss, flat.view(shape))
    wide = torch.randn(24, 3, device="cuda")
    for dloss in (torch.ones((), device="cuda").expand(24), wide[:, 1], wide.t()[2]):
        mine, = torch.autograd.grad(flat, logits, dloss, retain_graph=True)
        theirs, = torch.autograd.grad(F.cross_entropy(logits, target, reduction="none"), logits, dloss)
        assert torch.allclose(mine, theirs, rtol=1e-4, atol=1e-7)
    permuted = logits.view(4, 6, -1).transpose(0, 1)
    assert torch.allclose(tkq.cross_entropy(permuted, target.view(4, 6).t()), tkq.cross_entropy(logits, target))
    assert tkq.cross_entropy(logits[0], target[0], reduction="none").shape == ()


# ---- streams, graphs, torch -----------------------------------------------------------------------------------------


def test_on_a_side_stream():
    logits, target = make((4096, 4096))
    want = tkq.cross_entropy(logits, target)
    assert torch.equal(on_a_side_stream(lambda late: tkq.cross_entropy(late, target), logits), want)


def test_calls_one_after_the_other_do_not_overtake_each_other():
    """The sum over rows starts early and waits: each call has to find its own rows' losses."""
    cases = [make((5000, 64), "bf16", 2.0, seed) for seed in range(20)]
    wanted = [F.cross_entropy(x.float(), t) for x, t in cases]
    torch.cuda.synchronize()
    torch.cuda._sleep(10_000_000)
    found = [tkq.cross_entropy(x, t) for x, t in cases]
    assert torch.allclose(torch.stack(found), torch.stack(wanted), rtol=1e-5)


@pytest.mark.parametrize("V", [1000, 65536])
def test_in_a_cuda_graph(V):
    logits, target = make((64, V))
    logits.requires_grad_()

    def run():
        loss = tkq.cross_entropy(logits, target)
        return loss, *torch.autograd.grad(loss, logits)

    run()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = run()
    for seed in (1, 2):
        with torch.no_grad():
            logits.copy_(make((64, V), seed=seed)[0])
        for t in captured:
            t.detach().fill_(float("nan"))
        graph.replay()
        assert all(torch.equal(a, b) for a, b in zip(captured, run()))


@pytest.mark.parametrize("smoothing", [0.0, 0.1])
@pytest.mark.parametrize("reduction", ["none", "sum", "mean"])
def test_the_op_that_is_traced(reduction, smoothing):
    """Its results have no number that was not written, and its gradient is that of an eager call."""
    logits, target = make((37, 1000), size=3.0)
    terms = class_weights(1000), -100, reduction, smoothing, 0.0
    with poisoned():
        for saved in (torch.ops.tkq.cross_entropy(logits, target, *terms, 0.0, False)[1] for _ in range(2)):
            assert saved.isfinite().all()
    names = "weight", "ignore_index", "reduction", "label_smoothing", "z_loss"
    found, wanted = (incoming_gradient(call, logits, target) for call in (
        lambda x: torch.ops.tkq.cross_entropy(x, target, *terms, 0.0, False)[0],
        lambda x: tkq.cross_entropy(x, target, **dict(zip(names, terms)))))
    assert torch.equal(found, wanted)


def incoming_gradient(call, logits, target):
    x = logits.detach().requires_grad_()
    loss = call(x)
    return torch.autograd.grad(loss, x, incoming(target) if loss.dim() else None)[0]


@pytest.mark.slow  # test_every_op.py compiles each function every day
def test_the_torch_op():
    logits, target = make((9, 256))
    logits.requires_grad_()
    for reduction in ("none", "mean"):
        torch.library.opcheck(torch.ops.tkq.cross_entropy,
                              (logits, target, None, -100, reduction, 0.1, 0.0, 0.0, False),
                              test_utils=("test_schema", "test_autograd_registration", "test_faketensor"))

    def f(x):
        return tkq.cross_entropy(x * 2, target, label_smoothing=0.1)

    loss = torch.compile(f, fullgraph=True)(logits)
    assert torch.equal(loss, f(logits))
    for mine, wanted in zip(torch.autograd.grad(loss, logits), torch.autograd.grad(f(logits), logits)):
        assert torch.allclose(mine, wanted, rtol=0.02, atol=1e-6)


def test_bad_input_launches_nothing():
    x, t = make((4, 64))
    for error, says, args, options in (
            (ValueError, "target: is on cpu", (x, t.cpu()), {}), (TypeError, "logits: dtype", (x.double(), t), {}),
            (ValueError, r"target: shape is \(3,\)", (x, t[:3]), {}), (ValueError, "logits: strides", (x.t(), t), {}),
            (ValueError, r"target: shape is \(\)", (x[:1], t[0]), {}),
            (ValueError, "weight: shape", (x, t), dict(weight=torch.ones(5, device="cuda"))),
            (ValueError, "label_smoothing", (x, t), dict(label_smoothing=2.0)),
            (ValueError, "reduction", (x, t), dict(reduction="max")),
            (TypeError, "z_loss", (x, t), dict(z_loss="a"))):
        for _ in range(2):  # a refused call leaves nothing behind that would let the next one through
            with pytest.raises(error, match=says):
                tkq.cross_entropy(*args, **options)
    tkq.cross_entropy(x, t)
    with pytest.raises(ValueError, match=r"target: shape is \(3,\)"):
        tkq.cross_entropy(x, t[:3])


@pytest.mark.parametrize("reduction, launches", [("none", 1), ("mean", 2), ("sum", 2)])
@pytest.mark.parametrize("M", [256, 2000])
def test_launches_of_a_call(reduction, launches, M):
    from torch.profiler import ProfilerActivity, profile

    def names(call):
        call()
        with profile(activities=[ProfilerActivity.CUDA]) as record:
            call()
            torch.cuda.synchronize()
        return [e.name for e in record.events() if e.device_type == torch.autograd.DeviceType.CUDA]

    launches = launches if M > SINGLE_LAUNCH_ROWS else 1
    x, t = make((M, 1024))
    found = names(lambda: tkq.cross_entropy(x, t, reduction=reduction))
    assert len(found) == launches, found
    x.requires_grad_()
    loss, dloss = tkq.cross_entropy(x, t, reduction=reduction), torch.ones((), device="cuda")
    found = names(lambda: torch.autograd.grad(loss, x, dloss.expand(loss.shape), retain_graph=True))
    assert len(found) == 1, found


@pytest.mark.slow
@pytest.mark.alone
def test_more_than_2_31_elements():
    V = 50257
    M = (1 << 31) // V + 7
    logits = torch.zeros(M, V, device="cuda", dtype=torch.bfloat16)
    target = torch.zeros(M, dtype=torch.int64, device="cuda")
    rows = torch.tensor([0, 1, M // 2, M - 8, M - 7, M - 2, M - 1], device="cuda")
    sample, index = make((len(rows), V), "bf16", 2.0)
    logits[rows], target[rows] = sample, index
    with poisoned():
        loss, saved = launch.forward(logits, target, Terms(reduction="none"))
        launch.backward(logits, target, torch.ones(M, device="cuda"), saved, Terms(reduction="none"), True)
    wanted, saved = launch.forward(sample, index, Terms(reduction="none"))
    gradient = launch.backward(sample, index, torch.ones(len(rows), device="cuda"), saved, Terms(reduction="none"))
    assert torch.allclose(loss[rows], wanted, rtol=1e-5) and not loss.isnan().any()
    assert torch.allclose(logits[rows].float(), gradient.float(), rtol=2**-6, atol=1e-7)
    assert not logits[:: M // 100].isnan().any()


@pytest.mark.parametrize("N", (4096, pytest.param(50257, marks=pytest.mark.slow), 131072))
def test_a_forward_that_keeps_nothing_finds_the_same(N):
    x, target = torch.randn(9, N, device="cuda").bfloat16(), torch.randint(N, (9,), device="cuda")
    for options in ({}, dict(label_smoothing=0.1), dict(softcap=20.0, z_loss=1e-4)):
        recorded = tkq.cross_entropy(x.clone().requires_grad_(), target, reduction="none", **options)
        for _ in range(2):  # the second is replayed
            with poisoned():
                alone = tkq.cross_entropy(x, target, reduction="none", **options)
            assert torch.equal(alone, recorded)
