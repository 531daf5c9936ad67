"""runtime.new: tensors past the dispatcher, and where that is not possible."""
import functools

import pytest
import torch

from tkq.runtime.call import alloc


def test_a_tensor_without_a_gpu_comes_from_torch():
    x = alloc.empty(-1, (2, 5), (5, 1), torch.float16)
    assert x.shape == (2, 5) and x.stride() == (5, 1) and x.dtype == torch.float16 and x.device.type == "cpu"
    assert alloc.empty(-1, (), (), torch.float32).shape == ()


@pytest.mark.parametrize("index, current, filling, short", (
    (0, 0, False, True), (1, 1, False, True), (-1, 0, False, False), (-1, -1, False, False), (-1, 0, True, False)))
def test_the_short_way_is_for_the_current_device_and_not_where_torch_fills(monkeypatch, index, current, filling, short):
    seen = []
    monkeypatch.setattr(alloc, "_short", True)
    monkeypatch.setattr(alloc, "_strided", lambda *args: seen.append(args))
    monkeypatch.setattr(alloc, "_one_device", lambda: False)
    monkeypatch.setattr(alloc, "_current", lambda: current)
    monkeypatch.setattr(alloc, "_filling", lambda: filling)
    for make in (functools.partial(alloc.empty, index), alloc.maker(index)):
        found = make((4,), (1,), torch.float32)
        assert seen == ([((4,), (1,), torch.float32)] if short else [])
        assert short or found.shape == (4,)
        seen.clear()


def test_where_there_is_one_device_it_is_the_current_one(monkeypatch):
    monkeypatch.setattr(alloc, "_short", True)
    monkeypatch.setattr(alloc, "_strided", lambda *args: args)
    monkeypatch.setattr(alloc, "_one_device", lambda: True)
    monkeypatch.setattr(alloc, "_current", lambda: pytest.fail("asked"))
    monkeypatch.setattr(alloc, "_filling", lambda: False)
    assert alloc.empty(0, (4,), (1,), torch.float16) == alloc.maker(0)((4,), (1,), torch.float16) == (
        (4,), (1,), torch.float16)


@pytest.mark.parametrize("current, filling", ((1, False), (0, True)))
def test_the_other_way_names_the_device(monkeypatch, current, filling):
    seen = []
    monkeypatch.setattr(alloc, "_short", True)
    monkeypatch.setattr(alloc, "_one_device", lambda: False)
    monkeypatch.setattr(alloc, "_current", lambda: current)
    monkeypatch.setattr(alloc, "_filling", lambda: filling)
    monkeypatch.setattr(torch, "empty_strided", lambda *args, **options: seen.append((*args, options)))
    alloc.empty(0, (4,), (1,), torch.float32)
    assert seen == [((4,), (1,), dict(dtype=torch.float32, device=torch.device("cuda", 0)))]


@pytest.mark.parametrize("shape", ((), (7,), (3, 5), (2, 3, 4, 5), (2, 0, 3)))
def test_like_is_contiguous(shape):
    for x in (torch.zeros(shape), torch.zeros(*shape, 2)[..., 0]):
        found = alloc.like(x, -1, torch.float16)
        assert found.shape == x.shape and found.is_contiguous() and found.dtype == torch.float16
        assert found.untyped_storage().nbytes() == 2 * x.numel()


@pytest.mark.parametrize("without", (False, True))
def test_rows_share_memory_from_where_a_view_begins(monkeypatch, without):
    if without:
        monkeypatch.setattr(alloc, "_over", None)
    x = torch.arange(48.0).view(4, 3, 4)[1:]
    rows = alloc.rows(x, 9, 4)
    assert torch.equal(rows, x.reshape(9, 4)) and rows.data_ptr() == x.data_ptr()
    spread = alloc.over(x, (3, 2), (12, 2))
    assert torch.equal(spread, x[:, 0, ::2]) and spread.data_ptr() == x.data_ptr()


@pytest.mark.parametrize("shape", ((), (5,), (0,), (2, 3), (3, 0), (0, 4), (2, 0, 3), (2, 3, 0, 5), (4, 1, 2)))
def test_strides_are_torchs(shape):
    """Also of no elements."""
    assert alloc.strides(shape) == torch.empty(shape).stride()
