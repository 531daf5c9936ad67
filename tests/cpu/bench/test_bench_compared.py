"""What got slower between two runs, beyond the spread of both."""
import dataclasses

import pytest

from bench.core import compared
from bench.core.results import Case, Cost, Environment, Report
from tkq.testing.timing import Comparison, Timing

HERE = Environment("H100", "580", "13.0", "9", "3.12", "2026-11-21T10:00:00+00:00", "x", {})


def case(op, **times):
    timings = tuple(Timing(name, "graph" if ms else "failed", tuple(ms)) for name, ms in times.items())
    return Case("s", op, "M1", "GB/s", 1e9, Comparison(timings, 2, 1, 1))


def steady(ms):
    return [0.98 * ms] * 2 + [ms] * 3 + [1.02 * ms] * 2  # a spread of 1 %


def one(old, new):
    change, = compared.changes(Report(HERE, [old]), Report(HERE, [new]))
    return change


@pytest.mark.parametrize("now, verdict", ((1.03, "slower"), (1.015, ""), (0.99, ""), (0.97, "faster")))
def test_slower_is_beyond_the_spread_of_both(now, verdict):
    change = one(case("op", tkq=steady(1.0)), case("op", tkq=steady(now)))
    assert change.spread == pytest.approx(0.01 * (1 + 1), rel=0.05)
    assert change.ratio == pytest.approx(now) and change.others is None and change.verdict == verdict


def test_what_the_whole_run_changed_by_does_not_count():
    old = case("op", tkq=steady(1.0), QuACK=steady(2.0), copy=steady(0.5))
    assert one(old, case("op", tkq=steady(1.1), QuACK=steady(2.2), copy=steady(0.55))).verdict == ""
    change = one(old, case("op", tkq=steady(1.0), QuACK=steady(1.8), copy=steady(0.45)))
    assert change.verdict == "slower"
    assert change.others == pytest.approx(0.9) and change.beyond == pytest.approx(1 / 0.9)


@pytest.mark.parametrize("name", ("plain", "tkq, fp8_block"))
def test_our_own_variants_excuse_nothing(name):
    old, new = (case("op", **{"tkq": steady(ms), name: steady(ms)}) for ms in (1.0, 1.5))
    assert one(old, new).verdict == "slower"


def test_others_that_one_run_lacks_do_not_count():
    change = one(case("op", tkq=steady(1.0), QuACK=[], copy=steady(1.0)),
                 case("op", tkq=steady(1.0), QuACK=steady(9.0)))
    assert change.others is None and change.verdict == ""


def test_cases_that_one_run_lacks_are_left_out():
    old, new = Report(HERE, [case("a", tkq=steady(1.0)), case("b", tkq=[])]), Report(HERE, [case("b", tkq=steady(1.0))])
    assert compared.changes(old, new) == []
    assert compared.text([]) == "The runs have no case in common."


@pytest.mark.parametrize("then, now, both", (
    (0.1, 0.03, 1), (0.1, 0.0, 0), (0.0, 0.1, 0), (None, 0.1, 0), (0.1, None, 0), (None, 0.0, 1), (None, None, 1)))
def test_bursts_are_not_compared_with_turns_without_rest(then, now, both):
    old, new = (Report(HERE, [dataclasses.replace(case("op", tkq=steady(1.0)), idle_seconds=rest)])
                for rest in (then, now))
    assert len(compared.changes(old, new)) == both


def test_calls_are_judged_beside_the_host():
    def report(host, call, start):
        names = (compared.HOST, host), ("CPU per eager call: rmsnorm tkq", call), ("first call", start)
        return Report(HERE, costs=[Cost(name, us, 0.98 * us, 1.1 * us, 9) for name, us in names])

    of = lambda *us: {c.op: c.verdict for c in compared.changes(report(6.0, 8.0, 100.0), report(*us))}
    assert of(9.0, 12.0, 100.0)["CPU per eager call: rmsnorm tkq"] == ""  # a slower host
    assert of(6.0, 8.8, 110.0) == {"CPU per eager call: rmsnorm tkq": "slower", "first call": "slower"}


def test_what_peers_calls_cost_is_not_compared():
    names = ("rmsnorm tkq", "rmsnorm tkq, recorded", "rmsnorm QuACK", "rmsnorm Liger, recorded", "nn.Linear torch",
             "fp8_gemm row torch", "x + x", "x + x, recorded", "flash_attn")
    report = Report(HERE, costs=[Cost(f"CPU per eager call: {name}", 8.0, 7.9, 9.0, 9) for name in names])
    found = [change.op.partition(": ")[2] for change in compared.changes(report, report)]
    assert found == ["rmsnorm tkq", "rmsnorm tkq, recorded", "flash_attn"]


def test_what_torch_takes_to_begin_is_not_compared():
    names = ("import torch", "import tkq, after torch", "first call, cache: torch.sum, recorded", "torch: a token, B1",
             "second calls, cache: torch.sum, both", "first call, bundle: rope", "tkq: a token, B1")
    report = Report(HERE, costs=[Cost(name, 8.0, 7.9, 9.0, 9) for name in names])
    assert [change.op for change in compared.changes(report, report)] == [names[1], names[5], names[6]]


@pytest.mark.parametrize("now, verdict", ((1.009, ""), (1.011, "slower"), (0.991, ""), (0.989, "faster")))
def test_less_than_one_per_cent_is_no_change(now, verdict):
    assert one(case("op", tkq=[1.0] * 7), case("op", tkq=[now] * 7)).verdict == verdict


def test_the_table_has_what_changed_and_counts_the_rest():
    old = Report(HERE, [case(op, tkq=steady(1.0), copy=steady(1.0)) for op in ("same", "fast", "slow", "slowest")])
    new = Report(HERE, [case(op, tkq=steady(ms), copy=steady(1.0))
                        for op, ms in (("same", 1.0), ("fast", 0.5), ("slow", 1.25), ("slowest", 2.0))])
    text = compared.text(compared.changes(old, new))
    assert text.startswith("4 compared: 2 slower, 1 faster, 1 within the spread.")
    rows = [line for line in text.splitlines() if line.startswith("| `")]
    assert [row.split("`")[1] for row in rows] == ["slowest", "slow", "fast"]
    assert rows[1] == "| `slow` | M1 | 1000 GB/s | 800 GB/s | +25.0% | +0.0% | +25.0% | 2.0% | slower |"
