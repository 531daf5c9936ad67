"""What a call hands to its kernel, the second time replayed: the same as the first. Kernels are replaced by
notes, and CPU tensors pose as a GPU's."""
import types

import pytest
import torch

from tests.helpers.emulation import fake_gpu
from tests.helpers.ops import call_cases
from tkq.runtime.call import alloc, counters, ops


@pytest.fixture
def launches():
    """[(recipe, arguments)] of what is launched."""
    with fake_gpu.launches() as seen:
        yield seen


TENSORS = types.SimpleNamespace(**call_cases.inputs("cpu"))
CASES = call_cases.cases(TENSORS)
EACH = [x if torch.is_tensor(x) else x() for x in vars(TENSORS).values()]


def look(given):
    """What a kernel sees of its arguments: tensors by sizes, strides and types, and by where in which memory where that
    is not new."""
    if isinstance(given, torch.Tensor):
        storages = {x.untyped_storage().data_ptr() for x in EACH}
        storage = given.untyped_storage().data_ptr()
        return (given.shape, given.stride(), given.dtype,
                (storage, given.storage_offset()) if storage in storages else given.storage_offset())
    if isinstance(given, (tuple, list)):
        return tuple(map(look, given))
    return given


def results(found):
    return [(x.shape, x.stride(), x.dtype) for x in (found if isinstance(found, (tuple, list)) else (found,))]


@pytest.mark.parametrize("name", CASES)
def test_the_second_call_launches_what_the_first_did(launches, name):
    with torch.no_grad():
        first = results(CASES[name]())
        launched = [(recipe, look(args)) for recipe, args in launches]
        launches.clear()
        assert launched
        for _ in range(2):
            assert results(CASES[name]()) == first
            again = [(recipe, look(args)) for recipe, args in launches]
            launches.clear()
            if not name.startswith("fp8") and not name.startswith("grouped"):  # these take addresses as numbers
                assert again == launched
            assert [recipe for recipe, _ in again] == [recipe for recipe, _ in launched]


def test_what_is_known_does_not_grow_for_ever(monkeypatch):
    monkeypatch.setattr(ops.LaunchCache, "MOST", 3)
    known = ops.LaunchCache()
    for i in range(10):
        known.add(i, str(i))
        assert known[i] == str(i) and len(known) <= 3


def test_an_output_is_not_made_where_another_device_is_current(monkeypatch):
    monkeypatch.setattr(alloc, "_short", True)
    monkeypatch.setattr(alloc, "_one_device", lambda: False)
    monkeypatch.setattr(alloc, "_current", lambda: 1)
    seen = []
    monkeypatch.setattr(torch, "empty_strided", lambda *args, device, **options: seen.append(device))
    alloc.empty(0, (4,), (1,), torch.bfloat16)
    assert seen == [torch.device("cuda", 0)]


@pytest.mark.parametrize("stream, asked", ((0, False), (7, True)))
def test_the_default_stream_is_not_asked_for_a_capture(monkeypatch, stream, asked):
    questions = []
    monkeypatch.setattr(torch._C, "_cuda_getCurrentRawStream", lambda index: stream, raising=False)
    monkeypatch.setattr(counters, "_capturing", lambda index: questions.append(index))
    monkeypatch.setattr(counters, "_of_stream", {(0, stream): "counter"})
    monkeypatch.setattr(counters, "_scratch", {(0, stream, 9): "scratch"})
    assert counters.counter(0) == "counter" and counters.with_scratch(0, 9) == "scratch"
    assert questions == [0] * 2 * asked


def test_workspaces_are_of_powers_of_two():
    for size, most in ((1, 1), (2, 2), (3, 4), (255, 256), (256, 256), (257, 512)):
        assert counters.workspace(-1, size).numel() == most and counters.with_scratch(-1, size).numel() == size
