"""The mean and the sum of few rows in the forward's own launch, on the GPU: tickets, streams, graphs, the same bits."""
import pytest
import torch
import torch.nn.functional as F

import tkq
from tests.helpers.losses.cases import check, class_weights, make
from tests.helpers.sanitizer.nan_fill import poisoned
from tkq.losses import launch, plan
from tkq.reference.losses import Terms
from tkq.runtime.call import counters

SHAPES = [(1, 256), (8, 256), (777, 1000), (1024, 8192), (1024, 64), (63, 131072), (16, 524288), (37, 50257)]


@pytest.mark.parametrize("M, V", SHAPES)
@pytest.mark.parametrize("reduction", ["mean", "sum"])
@pytest.mark.sampled(when=lambda V, reduction: V in (1000, 8192, 131072, 50257) if reduction == "mean" else V == 256)
def test_values_and_bits(M, V, reduction):
    """Held and streamed rows; saved or not; again and again, in memory that is NaN before."""
    assert plan.single_launch(M, V, reduction)
    logits, target = make((M, V), "bf16", 2.0)
    target[0] = 0
    terms = Terms(class_weights(V) if M < 100 else None, reduction=reduction)
    check(logits, target, terms, what=f"M {M} V {V}")
    wanted, _ = launch.forward(logits, target, terms)
    for _ in range(20):
        with poisoned():
            found, nothing = launch.forward(logits, target, terms, False)
        assert nothing is None and torch.equal(found, wanted)
    scratch = [each for key, each in counters._scratch.items() if key[2] == launch._SCRATCH]
    assert scratch and not any(each[0].item() for each in scratch), "a counter was not set back to 0"


@pytest.fixture
def in_two(monkeypatch):
    monkeypatch.setattr(launch, "single_launch", lambda *shape: False)
    launch.call_cache.clear()
    yield
    launch.call_cache.clear()


@pytest.mark.parametrize("M, V", [
    (37, 40000), pytest.param(11, 524288, marks=pytest.mark.slow), (1030, 131072)])
def test_in_two_launches(M, V, in_two):
    """Streamed rows, and a launch of its own for the total: what many long rows take."""
    logits, target = make((M, V), "bf16", 2.0)
    target[::3] = -100
    options = [dict()] if M > 1000 else [dict(), dict(label_smoothing=0.1, z_loss=1e-3, softcap=20.0)]
    for more in options:
        for weight in (None, class_weights(V)):
            check(logits, target, Terms(weight, reduction="mean", **more), what=f"M {M} V {V} {more}")


def test_smoothing_needs_several_exchanges():
    for V in (1000, 131072):
        logits, target = make((40, V), "bf16", 2.0)
        for weight in (None, class_weights(V)):
            check(logits, target, Terms(weight, reduction="mean", label_smoothing=0.1, z_loss=1e-3, softcap=20.0))


def test_streams_side_by_side():
    """Each has a counter and scratch memory of its own."""
    cases = [make((1024, 4096), "bf16", 2.0, seed) for seed in range(4)]
    wanted = [tkq.cross_entropy(x, t) for x, t in cases]
    streams = [torch.cuda.Stream() for _ in cases]
    torch.cuda.synchronize()
    for _ in range(20):
        found = []
        for stream, (x, t) in zip(streams, cases):
            with torch.cuda.stream(stream):
                found.append([tkq.cross_entropy(x, t) for _ in range(5)])
        torch.cuda.synchronize()
        for losses, loss in zip(found, wanted):
            assert all(torch.equal(one, loss) for one in losses)


def test_calls_one_after_the_other():
    cases = [make((1000, 64), "bf16", 2.0, seed) for seed in range(20)]
    wanted = [F.cross_entropy(x.float(), t) for x, t in cases]
    torch.cuda.synchronize()
    torch.cuda._sleep(10_000_000)
    found = [tkq.cross_entropy(x, t) for x, t in cases]
    assert torch.allclose(torch.stack(found), torch.stack(wanted), rtol=1e-5)


def test_graphs_beside_eager_calls():
    """A replay, another graph's replay and calls on another stream draw from counters of their own."""
    cases = [make((512, 4096), "bf16", 2.0, seed) for seed in range(3)]
    wanted = [tkq.cross_entropy(x, t) for x, t in cases]
    graphs, captured = [torch.cuda.CUDAGraph() for _ in range(2)], []
    for graph, (x, t) in zip(graphs, cases):
        with torch.cuda.graph(graph):
            captured.append([tkq.cross_entropy(x, t) for _ in range(3)])
    streams = [torch.cuda.Stream() for _ in graphs]
    for _ in range(10):
        for losses in captured:
            for loss in losses:
                loss.fill_(float("nan"))
        torch.cuda.synchronize()
        for graph, stream in zip(graphs, streams):
            with torch.cuda.stream(stream):
                graph.replay()
        eager = [tkq.cross_entropy(*cases[2]) for _ in range(5)]
        torch.cuda.synchronize()
        for losses, loss in zip([*captured, eager], wanted):
            assert all(torch.equal(one, loss) for one in losses)
