"""Launches per call, where no GPU is needed: the page is made of what was counted, for every op."""
import functools

import torch

import tkq
from tests.helpers.emulation import fake_gpu
from tests.helpers.ops import launch_table
from tests.helpers.ops.every_op import CASES, of_all, results
from tkq.runtime.call import counters, replay
from tkq.warmup import catalog


def test_the_page_is_what_was_counted():
    assert launch_table.PAGE.read_text() == launch_table.text()
    wanted = {name: 3 if case.leaves else 1 for name, case in CASES.items()}
    assert {name: len(found) for name, found in launch_table.numbers().items()} == wanted


@of_all(list(CASES.values()))
def test_compiled_functions_per_call(case):
    """A call asks for no more than what it was counted to launch: each of these is one kernel at least."""
    most = launch_table.numbers()[case.name]
    with fake_gpu.launches() as seen:
        case.call(*case.inputs().values())
        assert 0 < len(seen) <= most[0]
        if case.leaves:
            seen.clear()
            inputs = case.inputs(grad=True)
            recorded = [t for t in results(case.call(*inputs.values())) if t.requires_grad]
            assert len(seen) <= most[1]
            leaves = [inputs[name] for name in case.leaves]
            torch.autograd.grad(recorded, leaves, [torch.zeros_like(t) for t in recorded])
            assert len(seen) <= most[2]


@of_all(list(CASES.values()))
def test_calls_with_a_counter_are_remembered_for_one_stream(case, monkeypatch):
    """Two streams would draw from it: whatever a call is remembered in knows the stream."""
    wrong = []
    with fake_gpu.launches():
        place, addresses = counters.counter(0).data_ptr(), lambda x: (
            [y for part in x for y in addresses(part)] if isinstance(x, tuple) else
            [x.data_ptr() if isinstance(x, torch.Tensor) else x])

        def add(cache, given, run, arguments, *_, **more):
            wrong.extend([run] * (not cache._by_stream and place in addresses(arguments)))

        def add_launched(cache, given, launched):
            for launch in launched().launches:
                add(cache, given, *launch)

        monkeypatch.setattr(counters, "workspace", counters.with_scratch)
        monkeypatch.setattr(replay.CallCache, "add", add)
        monkeypatch.setattr(replay.CallCache, "add_launched", add_launched)
        for _ in range(2):
            case.call(*case.inputs().values())
    assert not wrong


@functools.cache
def shipped():
    return catalog.shipped()


def not_chosen(function, launched):
    """Names of shipped kernels that a function's call launches and `compile --ops` does not compile for it."""
    chosen = {kernel.recipe for kernel in catalog.of_ops(shipped(), [function])}
    return [kernel.name for kernel in shipped() if kernel.recipe in launched - chosen]


@of_all(list(CASES.values()))
def test_kernels_of_an_op_are_chosen_by_its_name(case):
    with fake_gpu.launches() as seen:
        inputs = case.inputs(grad=True)
        recorded = [t for t in results(case.call(*inputs.values())) if t.requires_grad]
        if case.leaves:
            leaves = [inputs[name] for name in case.leaves]
            torch.autograd.grad(recorded, leaves, [torch.zeros_like(t) for t in recorded])
    assert not_chosen(case.function, {recipe for recipe, _ in seen}) == []


def test_kernels_of_segments_are_chosen_by_the_ops_name():
    x, B, dt = torch.zeros(1, 8192, 2, 64).bfloat16(), torch.zeros(1, 8192, 1, 128).bfloat16(), torch.zeros(1, 8192, 2)
    q, g = torch.zeros(1, 8192, 2, 128).bfloat16(), torch.zeros(1, 8192, 2)
    calls = {"mamba2_ssd": lambda: tkq.mamba2_ssd(x, dt.bfloat16(), torch.zeros(2), B, B, torch.zeros(2),
                                                  dt_bias=torch.zeros(2), dt_softplus=True),
             "linear_attn": lambda: tkq.linear_attn(q, q, q, g),
             "gated_delta_rule": lambda: tkq.gated_delta_rule(q, q, q, g, g)}
    for name, call in calls.items():
        with fake_gpu.launches() as seen, torch.no_grad():
            call()
        launched = {recipe for recipe, _ in seen}
        assert len(launched) > 2 and not_chosen(name, launched) == [], name
