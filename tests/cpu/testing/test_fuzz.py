"""2,000 random calls of every operation on the CPU; what ends neither right nor refused by name fails."""

import pytest
import torch

import tkq
from tests.fuzz import judge, oracles, oracles_linear
from tests.fuzz.run import OPERATIONS, call, run
from tests.helpers.process import fresh

CALLS, PARTS = 2000, 4


@pytest.mark.parametrize("part", range(PARTS))
def test_calls_end_right_or_are_refused_by_name(part):
    names, threads = list(OPERATIONS), torch.get_num_threads()
    try:
        outcomes = run(names, "cpu", CALLS // PARTS, part, 60.0)
    finally:
        torch.set_num_threads(threads)
    assert not [o for o in outcomes if not o.good]
    assert {o.operation for o in outcomes} == set(names), "an operation was not called"
    assert sum(o.verdict == "right" for o in outcomes) > len(outcomes) // 5, "hardly a call was judged"


def test_the_command_in_two_processes():
    command = "import runpy\nrunpy.run_module('tests.fuzz', run_name='__main__', alter_sys=True)"
    done = fresh.run(command, "--jobs", "2", "--calls", "4", "--only", "scan,rope")
    assert done.returncode == 0 and "4 calls on cpu, seed 0: " in done.stdout, done.stdout + done.stderr


def test_the_fuzzer_sees_a_wrong_result(monkeypatch):
    right = tkq.softmax
    monkeypatch.setattr(tkq, "softmax", lambda **given: right(**given) * 1.02)
    assert any(call("softmax", "cpu", seed).verdict == "BAD: wrong result" for seed in range(40))


def test_the_fuzzer_sees_a_wrong_gradient(monkeypatch):
    right = tkq.rmsnorm

    class Twice(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            return x.view_as(x)

        @staticmethod
        def backward(ctx, dy):
            return 2 * dy

    def wrong(*, x, **given):
        return right(Twice.apply(x) if isinstance(x, torch.Tensor) else x, **given)

    monkeypatch.setattr(tkq, "rmsnorm", wrong)
    monkeypatch.setattr(wrong, "__signature__", __import__("inspect").signature(right), raising=False)
    assert any(call("rmsnorm", "cpu", seed).verdict == "BAD: wrong gradient" for seed in range(60))


def test_the_fuzzer_sees_an_argument_without_a_name(monkeypatch):
    def wrong(x, **_):
        raise TypeError("something else is wrong")

    monkeypatch.setattr(tkq, "softmax", wrong)
    verdicts = {call("softmax", "cpu", seed).verdict for seed in range(20)}
    assert verdicts == {"BAD: refused a usual call", "BAD: names no argument"}


@pytest.mark.parametrize("error, seen", [(0.0, False), (0.004, False), (0.04, True)])
def test_the_judge(error, seen):
    value = torch.randn(7, 64, dtype=torch.float64)
    wanted = oracles.Wanted("y", value, 2, torch.bfloat16)
    assert bool(judge.tensor((value * (1 + error)).bfloat16(), wanted)) == seen


@pytest.mark.parametrize("change", ["nan", "inf", "dtype", "shape"])
def test_the_judge_compares_what_is_no_number(change):
    value = torch.randn(7, 64, dtype=torch.float64)
    got = value.bfloat16()
    if change in ("nan", "inf"):
        got[3, 5] = float(change)
    got = {"dtype": got.half(), "shape": got[:, :-1]}.get(change, got)
    assert judge.tensor(got, oracles.Wanted("y", value, 2, torch.bfloat16))


@pytest.mark.parametrize("largest, compared", [(1.0, True), (2.0**31, False)])
def test_states_without_end_behind_queries_of_0_are_not_compared(largest, compared):
    """In float32 they are infinity, and o is NaN; with a beta of usual size NaN is a fault."""
    k, v = torch.randn(2, 1, 9, 2, 32, generator=torch.Generator().manual_seed(0)).bfloat16()
    k = torch.nn.functional.normalize(k, dim=-1)
    given = dict(q=torch.zeros_like(k), k=k, v=v, g=-torch.ones(1, 9, 2), beta=torch.full((1, 9, 2), largest),
                 scale=None, initial_state=None, output_final_state=False, cu_seqlens=None, state_v_first=False)
    wanted = oracles_linear.linear_attn(given)
    wrong = judge.results(torch.full_like(v, float("nan")), wanted)
    assert (wrong is not None) == compared
