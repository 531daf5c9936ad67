"""What scans give to kernels, where no GPU is needed: which kernel, and tensors as it reads them."""
import pytest
import torch

import tkq
from tests.helpers.emulation import fake_gpu
from tkq.recurrence import launch, ops
from tkq.recurrence.plan import SHORTEST, plan
from tkq.recurrence.segments import segments
from tkq.recurrence.spec import ScanSpec


def lying(time, *sizes):
    """Random numbers (B, T, C) with neighbouring tokens, or channels, neighbours in memory."""
    return torch.randn(sizes[0], sizes[2], sizes[1]).mT if time else torch.randn(sizes)


@pytest.mark.parametrize("time", [False, True])
def test_all_lie_as_a_does(time):
    """And states are contiguous."""
    a, b, dh, h = (lying(t, 1, 40, 24) for t in (time, not time, not time, not time))
    state, dfinal = torch.randn(2, 1, 48)[..., ::2]
    with fake_gpu.launches() as seen:
        launch.forward(a, b, state, False, True)
        launch.backward(dh, dfinal, a, h, state, False, launch.Wanted(True, True, True))
    inner = 1 if time else 2
    for (_, (_, (x, y, *_, first, last, _, _), _)), (other, of_h, given) in zip(
            seen, ((b, None, (state,)), (dh, h, (state, dfinal))), strict=True):
        assert x.stride(inner) == 1 and torch.equal(x, other)
        assert of_h is None or (y.stride(inner) == 1 and torch.equal(y, of_h))
        for mine, of in zip((first, last), given):
            assert mine.is_contiguous() and torch.equal(mine, of)


def test_tokens_that_lie_too_far_apart_are_copied(monkeypatch):
    x = torch.randn(2, 3, 16)[..., :8]
    assert launch.readable(x, False) is x
    monkeypatch.setattr(launch, "FARTHEST", 63)
    assert launch.readable(x, False).is_contiguous()
    one = x[:, :1]
    assert launch.readable(one, False) is one


def test_one_channel_is_a_line():
    assert launch.along_time(torch.zeros(2, 9, 1)) and not launch.along_time(torch.zeros(2, 1, 1))
    assert launch.along_time(torch.zeros(2, 3, 9).mT) and not launch.along_time(torch.zeros(2, 9, 3))


def test_sizes_decide_the_kernel():
    """Whatever came before."""
    spec, columns = ScanSpec("fp32"), (65, 8193)
    with fake_gpu.launches() as seen:
        for n in columns:
            tkq.scan(torch.zeros(1, 8, n), torch.zeros(1, 8, n))
    few, many = (plan(spec, n, 8, 132) for n in columns)
    assert [recipe.args for recipe, _ in seen] == [(spec, few), (spec, many)] and few != many


def test_only_sequences_that_follow_each_other_are_cut():
    spec, apart = ScanSpec("fp32"), torch.empty(2, SHORTEST + 8, 4)[:, :SHORTEST]
    together = torch.empty(2, SHORTEST, 4)
    assert segments(spec, 132, together, None, together) is not None
    assert segments(spec, 132, together, apart) is None is segments(spec, 132, apart, together)


@pytest.mark.parametrize("wanted, state", [((True, False, False), "fp32"), ((False, True, True), None),
                                           ((False, False, True), None)])
def test_only_a_needs_the_states_before(wanted, state):
    a, h = torch.zeros(2, 9, 8), torch.zeros(2, 8)
    with fake_gpu.launches() as seen:
        launch.backward(a, None, a, a, h, False, launch.Wanted(*wanted))
    (recipe, (_, (_, of_h, *_), _)), = seen
    assert recipe.args[0].state == state and (of_h is None) == (state is None)


@pytest.mark.parametrize("has_state", [False, True])
def test_no_token_launches_nothing(has_state):
    a, state = torch.zeros(2, 0, 8), torch.randn(2, 8) if has_state else None
    with fake_gpu.launches() as seen:
        _, final = tkq.scan(a, a, state, False, True)
    assert not seen and torch.equal(final, state if has_state else torch.zeros(2, 8))


def test_gradients_are_as_the_meta_device_says():
    a, state = torch.zeros(2, 9, 8), torch.zeros(2, 8).bfloat16()
    given = a, a[:, 0], a, a, state, False, True, True, True
    with fake_gpu.launches():
        found = ops._backward_cuda(*given)
    assert [(x.shape, x.dtype) for x in found] == [(x.shape, x.dtype) for x in ops._backward_fake(*given)]


def test_too_many_columns():
    a = torch.empty(1 << 15, 1, (1 << 15) + 1, device="meta")
    with pytest.raises(NotImplementedError, match="scan: a: has 32768 x 32769 sequences and channels"):
        tkq.scan(a, a)
