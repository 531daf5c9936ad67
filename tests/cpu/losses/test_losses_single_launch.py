"""The mean and the sum in the forward's own launch: its code run on a CPU, and which calls take it."""
import pytest
import torch

from tests.helpers.emulation import rows
from tests.helpers.losses import cases
from tests.helpers.losses.cases import EVERYTHING, check
from tkq.losses import launch, plan
from tkq.losses.spec import CrossEntropySpec
from tkq.reference import losses as reference
from tkq.reference.losses import Terms
from tkq.runtime.call import counters


def make(shape, *args):
    return cases.make(shape, *args, device="cpu")


@pytest.mark.parametrize("streams", [False, True])
@pytest.mark.parametrize("reduction", ["mean", "sum"])
@pytest.mark.sampled(when=lambda streams, reduction: streams == (reduction == "sum"))
def test_values(monkeypatch, streams, reduction):
    """Beside the reference, saved or not, and to the bit beside the two launches where both add up in one order."""
    rows.use(monkeypatch)
    if streams:
        monkeypatch.setattr(launch, "plan",
                            lambda spec: rows.SHARED_BY_MANY if spec.kind == "backward" else rows.STREAMING)
    logits, target = make((37, 40), "bf16", 3.0)
    weight = cases.class_weights(40, "bf16", device="cpu")
    for options in ({}, dict(weight=weight), {} if streams else dict(weight=weight, **EVERYTHING)):
        terms = Terms(reduction=reduction, **options)
        check(logits, target, terms)
        recorded, saved = launch.forward(logits, target, terms)
        for _ in range(2):  # the second is replayed
            alone, nothing = launch.forward(logits, target, terms, False)
            assert torch.equal(alone, recorded) and nothing is None and saved.shape == (3 * 37 + 2,)
        with monkeypatch.context() as m:
            m.setattr(launch, "single_launch", lambda *_: False)
            two, _ = launch.forward(logits, target, terms)
            assert torch.equal(two, recorded)
    assert {key[10] for key in launch._launchers if key[1] == "forward"} == {False, True}


def test_no_rows_that_count(monkeypatch):
    rows.use(monkeypatch)
    logits, target = make((5, 33))
    target[:] = -100
    assert launch.forward(logits, target, Terms(reduction="mean"), False)[0].isnan()
    assert launch.forward(logits, target, Terms(reduction="sum"), False)[0] == 0
    target[2] = 99
    assert launch.forward(logits, target, Terms(reduction="sum"), False)[0].isnan()
    assert launch.forward(logits[:0], target[:0], Terms(reduction="sum"), False)[0] == 0


def test_leading_dimensions(monkeypatch):
    rows.use(monkeypatch)
    logits, target = make((3, 4, 33))
    for _ in range(2):
        found, _ = launch.forward(logits, target, Terms(reduction="mean"), False)
        assert torch.allclose(found, reference.cross_entropy(logits, target, Terms(reduction="mean")), rtol=1e-5)


def test_few_rows_take_it():
    assert plan.single_launch(8, 256, "mean") and plan.single_launch(plan.SINGLE_LAUNCH_ROWS, 4096,
                                                                     "sum") and not plan.single_launch(8, 256, "none")
    assert not plan.single_launch(plan.SINGLE_LAUNCH_ROWS + 1, 8,
                                  "mean") and not plan.single_launch(plan.SINGLE_LAUNCH_ROWS, 16384, "mean")
    from tkq.losses import single_launch

    assert launch._SCRATCH >= plan.SINGLE_LAUNCH_ROWS + single_launch.HEADER


def test_what_a_spec_refuses():
    assert not CrossEntropySpec("forward", 256, "bf16", reduction="mean", save=False, once=True).save
    for kind, options in (("forward", {}), ("backward", dict(reduction="mean")),
                          ("forward", dict(reduction="mean", part=True))):
        with pytest.raises(ValueError):
            CrossEntropySpec(kind, 256, "bf16", once=True, **options)
    with pytest.raises(ValueError, match="save"):
        CrossEntropySpec("forward", 256, "bf16", reduction="mean", save=False)


def test_scratch_memory(monkeypatch):
    """One for each device, stream and size; every captured call has its own."""
    capturing, stream = [False], [7]
    monkeypatch.setattr(counters, "_scratch", {})
    monkeypatch.setattr(counters, "_capturing", lambda index: capturing[0])
    monkeypatch.setattr(torch._C, "_cuda_getCurrentRawStream", lambda index: stream[0], raising=False)
    for zeros in ("_zeros", "_persistent_zeros"):
        monkeypatch.setattr(counters, zeros, lambda n, index: torch.zeros(n, dtype=torch.int32))
    first = counters.with_scratch(0, 9)
    assert first.shape == (9,) and not first.any() and counters.with_scratch(0, 9) is first
    assert counters.with_scratch(1, 9) is not first and counters.with_scratch(0, 10) is not first
    capturing[0] = True
    assert counters.with_scratch(0, 9) is not counters.with_scratch(0, 9)
    capturing[0], stream[0] = False, 8
    assert counters.with_scratch(0, 9) is not first
    assert len(counters._scratch) == 4
