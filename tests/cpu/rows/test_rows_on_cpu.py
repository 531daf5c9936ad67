"""The kernels of softmax and the losses, their own code run on a CPU thread by thread: every address, mask and formula,
but for the exchange between threads."""
import math

import pytest
import torch

from tests.helpers.emulation import rows
from tests.helpers.losses import cases
from tests.helpers.losses.cases import DTYPES, EVERYTHING, check, incoming
from tkq.losses import launch, linear
from tkq.losses.linear import Layer
from tkq.reference import losses as reference
from tkq.reference.losses import Terms
from tkq.softmax import ops
from tkq.testing import assert_2x

PLACES = [(40, 40, 0), (40, 48, 8), (40, 42, 1), (33, 33, 0), (35, 40, 3), (12, 12, 0), (7, 9, 1), (1, 1, 0)]


@pytest.fixture(autouse=True)
def on_cpu(monkeypatch):
    torch.manual_seed(0)
    rows.use(monkeypatch)


def make(shape, *args, **options):
    return cases.make(shape, *args, device="cpu", **options)


def class_weights(V, dtype="fp32"):
    return cases.class_weights(V, dtype, device="cpu")


def within(x, room, first):
    """(x as a view of rows `room` long from column `first` on, all of it with NaN around)."""
    wide = torch.full((x.shape[0] + 2, room), math.nan, dtype=x.dtype)
    view = wide[1:-1, first:first + x.shape[1]]
    return view.copy_(x), wide


def untouched(wide, view):
    """Is everything around the view NaN still?"""
    around = wide.clone()
    around[1:-1].as_strided(view.shape, view.stride(), view.storage_offset()).fill_(math.nan)
    return around.isnan().all()


# ---- softmax --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("log, dtype, N, room, first", [
    *((False, "bf16", *place) for place in PLACES), (True, "bf16", 33, 33, 0), (True, "fp32", 35, 40, 3),
    (False, "fp32", 33, 33, 0)])
# the row of 33 by its logarithm, which has the other's code besides
@pytest.mark.sampled(when=lambda log, first: log or first % 2)
def test_softmax(log, dtype, N, room, first):
    x, _ = within((3 * torch.randn(37, N)).to(DTYPES[dtype]), room, first)
    torchs = torch.log_softmax if log else torch.softmax
    truth, peer = torchs(x.double() * 0.7, -1), torchs(x.float() * 0.7, -1).to(x.dtype)
    out, wide = within(torch.full_like(x, math.nan), room, first)
    ops._run(x, (x, out), 0.7, log, False)
    assert_2x(out, truth, peer, ulps=2)
    assert untouched(wide, out)
    assert_2x(ops._launch(x, 0.7, log), truth, peer, ulps=2)  # into a tensor that lies in another way
    dy, dx = within(torch.randn(37, N).to(x.dtype), room, first)[0], torch.full_like(x, math.nan)
    dx, wide = within(dx, room, first)
    ops._run(out, (out, dy, dx), 0.7, log, True)
    wanted = reference.softmax_backward(out.double(), dy.double(), 0.7, log)
    assert_2x(dx, wanted, reference.softmax_backward(out, dy, 0.7, log), ulps=2)
    assert untouched(wide, dx)


def test_softmax_of_infinities_and_nan():
    x = torch.randn(7, 33).bfloat16()
    x[0], x[1], x[5] = -math.inf, -math.inf, torch.finfo(x.dtype).min
    x[0, 20], x[2, 32], x[3, 0], x[4, ::2] = 3.0, math.inf, math.nan, -math.inf
    for log, torchs in ((False, torch.softmax), (True, torch.log_softmax)):
        peer = torchs(x.float(), -1).bfloat16()
        y = ops._launch(x, 1.0, log)
        assert torch.equal(y.isnan(), peer.isnan())
        assert torch.allclose(y.float(), peer.float(), rtol=2**-7, atol=1e-6, equal_nan=True)


def test_leading_dimensions():
    """Rows of more dimensions give the same, the first time and when the launcher is known."""
    x = torch.randn(12, 40).bfloat16()
    logits, target = make((12, 40), "bf16", 3.0)
    for _ in range(2):
        assert torch.equal(ops._launch(x.view(3, 4, 40), 0.7, False), ops._launch(x, 0.7, False).view(3, 4, 40))
        for reduction in ("none", "mean"):
            flat = launch.forward(logits, target, Terms(reduction=reduction))[0]
            deep = launch.forward(logits.view(3, 4, 40), target.view(3, 4), Terms(reduction=reduction))[0]
            assert torch.equal(flat.view_as(deep), deep) and deep.dim() == (2 if reduction == "none" else 0)


# ---- cross entropy --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("options, dtype, V, room, first", [
    *(({}, "bf16", *place) for place in PLACES), ({}, "fp32", 33, 33, 0), (EVERYTHING, "bf16", 33, 33, 0),
    (EVERYTHING, "bf16", 40, 48, 8), (EVERYTHING, "fp32", 35, 40, 3), (EVERYTHING, "fp32", 7, 9, 1)])
# each place once: those with options are left out without them
@pytest.mark.sampled(when=lambda options, dtype, V, room: options or dtype == "fp32" or (V, room) in (
    (40, 40), (40, 42), (12, 12), (1, 1)))
def test_cross_entropy(options, dtype, V, room, first):
    logits, target = make((37, V), dtype, 3.0)
    view, wide = within(logits, room, first)
    weight = class_weights(V, "bf16") if options else None
    _, gradient = check(view, target, weight=weight, **options)
    _, saved = launch.forward(view, target, Terms(weight, reduction="none", **options))
    over = launch.backward(view, target, incoming(target), saved, Terms(weight, reduction="none", **options), True)
    assert over.data_ptr() == view.data_ptr() and torch.allclose(over, gradient, rtol=0.02, atol=1e-6)
    assert untouched(wide, view)


@pytest.mark.parametrize("options, dtype, V, room, first", [
    *(({}, "bf16", *place) for place in PLACES), ({}, "bf16", 136, 136, 0), ({}, "bf16", 129, 140, 5),
    ({}, "fp32", 33, 33, 0), (dict(softcap=5.0, z_loss=1e-2), "bf16", 40, 48, 8)])
# Rows below a step: apart by odd numbers, and the shortest. What is aligned is so at 136, too, and with options at 40;
# 3 behind a row's begin is as 5 at 129.
@pytest.mark.sampled(when=lambda dtype, room, first, options: first in (1, 5) or room == 1 or room > 100
                     or dtype == "fp32" or options)
def test_streaming(monkeypatch, options, dtype, V, room, first):
    """The forward in steps, of which none, some or all lie within the row."""
    logits, target = make((37, V), dtype, 3.0)
    view, wide = within(logits, room, first)
    weight = class_weights(V, "bf16") if options else None
    held, _ = check(view, target, weight=weight, **options)
    stream(monkeypatch)
    found, _ = check(view, target, weight=weight, **options)
    assert torch.allclose(found, held, rtol=1e-6, atol=1e-6) and untouched(wide, view)
    check(view, target, weight=weight, reduction="mean", **options)


def stream(monkeypatch):
    planned = launch.plan
    monkeypatch.setattr(launch, "plan", lambda spec: rows.STREAMING if spec.kind == "forward" else planned(spec))
    launch._launchers.clear(), launch._launch_cache.clear()


@pytest.mark.parametrize("options", [dict(label_smoothing=0.1), dict(softcap=5.0), dict(z_loss=1e-2)], ids=str)
def test_each_option(options):
    logits, target = make((37, 33), "bf16", 3.0)
    check(logits, target.int(), ignore_index=-100, **options)
    check(logits, target, weight=class_weights(33), **options)


@pytest.mark.parametrize("reduction", ["mean", "sum"])
@pytest.mark.parametrize("weighted", [False, True])
@pytest.mark.sampled(when=lambda reduction, weighted: weighted == (reduction == "mean"))
def test_the_fused_pass_and_the_total(reduction, weighted):
    weight = class_weights(33) if weighted else None
    for M in (1, 37):
        logits, target = make((M, 33), "bf16", 3.0)
        terms = Terms(weight, reduction=reduction, label_smoothing=0.1)
        check(logits, target, terms)
        for inplace in (False, True):
            given = logits.clone()
            loss, gradient = launch.both(given, target, terms, inplace)
            assert torch.allclose(loss, reference.cross_entropy(logits, target, terms), rtol=1e-5)
            wanted = reference.cross_entropy_backward(logits, target, torch.ones(()), terms)
            assert torch.allclose(gradient.float(), wanted.float(), rtol=2**-7, atol=1e-6)
            assert (gradient.data_ptr() == given.data_ptr()) == inplace


@pytest.mark.parametrize("streams", [False, True])
def test_rows_that_have_no_loss(monkeypatch, streams):
    """Ignored ones, whatever they hold; targets that are no class; an ignored class; all -inf but one."""
    if streams:
        stream(monkeypatch)
    logits, target = make((9, 33), "bf16")
    logits[1], target[4], target[5], target[7] = math.nan, 33, -1, 2**40
    terms = Terms(reduction="none")
    loss, saved = launch.forward(logits, target, terms)
    gradient = launch.backward(logits, target, torch.ones(9), saved, terms)
    nan = torch.tensor([0, 0, 0, 0, 1, 1, 0, 1, 0], dtype=torch.bool)
    assert torch.equal(loss.isnan(), nan) and torch.equal(gradient.isnan().all(-1), nan)
    assert torch.equal(gradient.isnan().any(-1), nan) and loss[1] == 0 and not gradient[1].any()
    both = launch.both(logits, target, Terms(), False)
    assert both[0].isnan() and torch.equal(both[1].isnan().any(-1), nan) and not both[1][1].any()
    target = torch.arange(9)
    logits = torch.full((9, 33), -math.inf).bfloat16()
    logits[torch.arange(8), target[:8]] = 2.0
    logits[3, 3], logits[3, 4] = -math.inf, 1.0
    assert torch.equal(launch.forward(logits, target, Terms(reduction="none", ignore_index=2))[0].nan_to_num(7, 9),
                       torch.tensor([0.0, 0, 0, 9, 0, 0, 0, 0, 7]))


# ---- of a linear layer ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("reduction", ["none", "mean", "sum"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.sampled(when=lambda reduction, dtype: (reduction == "mean") == (dtype == torch.float16))
def test_linear_in_chunks(monkeypatch, reduction, dtype):
    """The launches of a GPU, with PyTorch's product in the place of ours."""
    def product(a, b, c, accumulate=False, writable_padding=False):
        found = (a.float() @ b.float()).to(c.dtype)
        c.copy_(c + found if accumulate else found)

    monkeypatch.setattr(linear, "gemm", product)
    monkeypatch.setattr(linear, "chunk_rows", lambda M, V, size: 8)
    x, weight = torch.randn(21, 16).to(dtype), torch.randn(33, 16).to(dtype)
    _, target = make((21, 33))
    terms = Terms(class_weights(33), reduction=reduction, label_smoothing=0.1)
    layer, dloss = Layer(x, weight, target), torch.randn(21) if reduction == "none" else torch.tensor(2.0)
    found = linear.forward(layer, terms, True, True)
    assert torch.allclose(found.loss, reference.linear_cross_entropy(x, weight, target, terms), rtol=1e-4)
    recomputed = linear.backward(layer, terms, dloss, found.saved, found.all, True, True)
    wanted = reference.linear_cross_entropy_backward(x, weight, target, dloss, terms)
    factor = linear.gradient_factor(terms, x, dloss, found.all)
    at_once = [] if reduction == "none" else [
        launch.scale_(found.dx, factor),
        (found.dweight * factor).to(dtype) if dtype == torch.float16 else launch.scale_(found.dweight, factor)]
    for gradients in (recomputed, at_once):
        for mine, right in zip(gradients, wanted):
            assert mine.dtype == dtype
            assert torch.allclose(mine.float(), right.float(), rtol=0.05, atol=0.02 * right.abs().max())
    alone = linear.forward(layer, terms, False, False)
    assert torch.allclose(alone.loss, found.loss, rtol=1e-6) and not alone.dx.numel() and not alone.dweight.numel()
