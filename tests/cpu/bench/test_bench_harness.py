"""The benchmark harness without a GPU: turns, medians, ratios, bounds, costs and files, by timers that are scripted."""

import dataclasses
import itertools
import json
import math
import os
from importlib import metadata
from types import SimpleNamespace

import pytest
import torch

from bench.core import command, harness
from bench.core.harness import Call
from bench.core.results import Bound, Case, Cost, Environment, Reading, Report, geometric_mean, within
from bench.ops import foundation
from bench.peers import common
from tkq.testing import timing
from tkq.testing.timing import Comparison, Effort, Timing, calls_per_batch, input_sets, ratio, turn_order

MIB = 2**20
L2 = 50 * MIB


class FakeBatch:
    mode, launches, note = "graph", 2.0, ""

    def __init__(self, gpu, name):
        self.gpu, self.name, self.turns = gpu, name, 0

    def run(self, seconds, during):
        assert self.gpu.cleared, "what the one before left in the cache would help, or not, the next one"
        self.gpu.cleared = False
        self.turns += 1
        self.gpu.turns.append((self.name, seconds, during is not None))
        if during is not None:
            during()
        return self.gpu.milliseconds(self.name, self.turns)


class FakeGpu:
    """Stands in for the GPU: a call is known by the name it returns, its time by `milliseconds(name, turn)`."""

    def __init__(self, milliseconds, free=2**36):
        self.milliseconds, self.free = milliseconds, free
        self.turns, self.released, self.sets, self.grad, self.cleared = [], False, [], None, False

    def l2_bytes(self):
        return L2

    def free_bytes(self):
        return self.free

    def clear_cache(self):
        self.cleared = True

    def first_calls(self, call, sets):
        self.sets, self.grad = sets, torch.is_grad_enabled()
        return call(*sets[0]), 1e-3

    def batch(self, call, sets, calls, graphs):
        self.graphs = graphs
        return FakeBatch(self, call(*sets[0]))

    def release(self):
        self.released = True


def named(*names):
    return {name: (lambda *_, name=name: name) for name in names}


def small_inputs(i):
    return (torch.full((1024,), float(i)),)


def timed(name, times, **more):
    return Timing(name, "graph", tuple(times), **more)


# ---- pure arithmetic ---------------------------------------------------------------------------------------------


def test_ratio_is_the_median_of_ratios_within_rounds_not_the_ratio_of_medians():
    ours = timed("tkq", [1.0, 2.0, 4.0])
    assert ratio(ours, timed("peer", [5.0, 2.0, 8.0])) == 2.0  # of 5, 1 and 2; the medians' ratio would be 2.5
    assert ratio(ours, timed("peer", [3.0, 2.0, 2.0])) == 1.0


def test_ratio_refuses_rounds_that_do_not_pair():
    with pytest.raises(ValueError, match="tkq has 3 rounds, peer has 2"):
        ratio(timed("tkq", [1, 2, 3]), timed("peer", [1, 2]))


def test_ratio_cancels_a_drifting_clock():
    drift = [1 + 0.01 * i for i in range(9)]
    ours, peer = timed("tkq", drift), timed("peer", [1.25 * d for d in drift])
    assert ratio(ours, peer) == pytest.approx(1.25)


def test_every_candidate_takes_every_place_and_changes_neighbours():
    for n in (2, 3, 4):
        names = "ABCD"[:n]
        rounds = [turn_order(names, r) for r in range(2 * n)]
        assert all(sorted(order) == list(names) for order in rounds)
        for place in range(n):
            assert sorted(order[place] for order in rounds) == sorted(names * 2)
    pairs = {tuple(order[i : i + 2]) for order in (turn_order("ABC", r) for r in range(6)) for i in range(2)}
    assert {("A", "B"), ("B", "A")} <= pairs
    for n in (3, 4, 5):  # the one before it changes soon
        names = "ABCDE"[:n]
        rounds = [turn_order(names, r) for r in range(2 * n)]
        assert len({tuple(order) for order in rounds}) == 2 * n
        ways = [(names.index(order[1]) - names.index(order[0])) % n == 1 for order in rounds]
        assert all(len(set(ways[r:r + 3])) == 2 for r in range(2 * n - 2))
    assert turn_order([], 3) == []


def test_input_sets_exceed_the_cache_within_memory():
    assert input_sets(10 * MIB, L2, 2**36) == 15
    assert (
        input_sets(2**31, L2, 2**36) == 2
    )  # one set would do for the cache, but then each call repeats the last one's
    assert input_sets(1024, L2, 2**36) == timing.MOST_SETS
    assert input_sets(2**31, L2, 2**32) == 1  # 30 % of 4 GiB holds none: one is the least
    assert input_sets(100 * MIB, L2, 1000 * MIB) == 2
    assert input_sets(10 * MIB, L2, 100 * MIB) == 3


def test_calls_per_batch_is_a_multiple_of_the_sets_and_about_ten_milliseconds():
    assert calls_per_batch(1e-3, 2) == 10
    assert calls_per_batch(1e-3, 4) == 8
    assert calls_per_batch(1.0, 3) == 3
    assert calls_per_batch(1e-6, 5) == 255
    assert calls_per_batch(0.0, 64) == 256
    assert calls_per_batch(1e-3, 2, 0.006) == 6 and calls_per_batch(1e-3, 2, 2.0) == 10  # a turn of less, and of more


def test_tensor_bytes_counts_storage_once():
    x = torch.zeros(4, 8)
    assert timing.tensor_bytes((x, x.t(), None, 3)) == 128
    assert timing.tensor_bytes((torch.zeros(1).expand(1000), x)) == 132


def test_quartiles_and_median():
    t = timed("tkq", [1, 2, 3, 4, 100])
    assert t.median_ms == 3
    assert t.quartiles_ms == (2, 4)
    assert not Timing("tkq", "failed").ok


def test_effort_needs_seven_rounds():
    with pytest.raises(ValueError, match="at least 7.*got 6"):
        Effort(rounds=6)


# ---- turns -------------------------------------------------------------------------------------------------------


def test_compare_warms_up_by_time_and_then_interleaves_rounds():
    gpu = FakeGpu(lambda name, turn: {"tkq": 1.0, "peer": 1.5}[name])
    seen = []
    effort = Effort(rounds=8, round_seconds=0.1, warmup_seconds=0.5)
    result = timing.compare(named("tkq", "peer"), small_inputs, effort, during=seen.append, gpu=gpu)
    warm = [t for t in gpu.turns if not t[2]]
    assert len(warm) == 6  # three laps of two turns of 0.1 s: the first lap count beyond 0.5 s
    measured = [t for t in gpu.turns if t[2]]
    assert [t[0] for t in measured[:4]] == ["tkq", "peer", "peer", "tkq"]
    assert len(measured) == len(seen) == 16
    assert all(seconds == 0.1 for _, seconds, _ in gpu.turns)
    assert ratio(result["tkq"], result["peer"]) == 1.5
    assert result["tkq"].times_ms == (1.0,) * 8
    assert result["tkq"].launches == 2.0
    assert gpu.released
    assert gpu.grad is False


def test_compare_passes_on_whether_graphs_are_wanted():
    gpu = FakeGpu(lambda *_: 1.0)
    timing.compare(named("tkq"), small_inputs, gpu=gpu)
    assert gpu.graphs is True
    timing.compare(named("tkq"), small_inputs, Effort(graphs=False), gpu=gpu)
    assert gpu.graphs is False


def test_the_hosts_time_is_taken_where_it_is_wanted(monkeypatch):
    gpu = FakeGpu(lambda *_: 1.0)
    gpu.host_us = lambda call, sets, seconds: {"tkq": 5.0, "peer": 9.0}[call(*sets[0])]
    timed_ = timing.compare(named("tkq", "peer"), small_inputs, Effort(host=True), gpu=gpu)
    assert [t.host_us for t in timed_.timings] == [5.0, 9.0]
    assert timing.compare(named("tkq"), small_inputs, gpu=gpu)["tkq"].host_us is None
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: None)
    now = itertools.accumulate(itertools.cycle((1e-6, 7e-6, 1e-6, 7e-6, 1e-6, 100e-6)))  # between calls, and within
    monkeypatch.setattr(timing.time, "perf_counter", lambda: next(now))
    seen = []
    real = object.__new__(timing.Gpu)
    assert real.host_us(lambda x: seen.append(x), [(1,), (2,)], 1.0) == pytest.approx(7.0)
    assert seen == [1, 2] * 5  # seven calls of a second each are enough, after three
    real.host_us(lambda x: seen.append(x), [(1,)], 1e-6)
    assert len(seen) == 10 + 53


def test_a_device_copy_that_cannot_be_timed_is_none():
    if torch.cuda.is_available():
        assert 500 < harness.device_copy() < 20000
    else:
        assert harness.device_copy() is None


def test_what_clears_the_cache_is_more_than_it_holds_and_goes_with_the_comparison(monkeypatch):
    """Written when what was there has ended, and when nothing of it is to stay any longer."""
    made, done = [], []
    monkeypatch.setattr(timing.driver, "ask", done.append)
    monkeypatch.setattr(torch, "empty", lambda n, dtype, device: made.append(torch.zeros(n, dtype=dtype)) or made[-1])
    monkeypatch.setattr(timing.Gpu, "l2_bytes", lambda self: 4096)
    for name in ("synchronize", "empty_cache"):
        monkeypatch.setattr(torch.cuda, name, lambda name=name: done.append(name))
    monkeypatch.setattr(torch.Tensor, "fill_", lambda self, value: done.append("written") or self.copy_(
        torch.tensor(value)))
    gpu = object.__new__(timing.Gpu)
    gpu._others = None
    for _ in range(3):
        gpu.clear_cache()
    assert done == 3 * ["synchronize", "cuCtxResetPersistingL2Cache", "written"]
    assert len(made) == 1 and made[0].all() and made[0].nbytes == timing.CLEARED_MULTIPLE * 4096 > 4096
    gpu.release()
    assert gpu._others is None


def test_queued_calls_have_a_lead_in_that_is_not_timed(monkeypatch):
    """Of a quarter of the calls, at least one, on the inputs that come last."""
    seen = []
    event = lambda **_: SimpleNamespace(
        record=lambda: seen.append("event"), synchronize=int, elapsed_time=lambda end: 8)
    monkeypatch.setattr(torch.cuda, "Event", event)
    monkeypatch.setattr(torch.cuda, "_sleep", lambda cycles: seen.append("sleep"))
    monkeypatch.setattr(torch.cuda, "synchronize", int)
    monkeypatch.setattr(timing.timing_launches, "profiled", lambda *_: None)
    for sets, calls, lead_in in ((4, 8, [2, 3]), (2, 2, [1]), (2, 16, [0, 1])):
        batch = timing.QueuedBatch(seen.append, [(i,) for i in range(sets)], calls, "")
        seen.clear()
        assert batch.run(1e-6, None) == 8 / calls
        assert seen == ["sleep", *lead_in, "event", *(i % sets for i in range(calls)), "event"]


def test_compare_rotates_different_inputs():
    gpu = FakeGpu(lambda *_: 1.0)
    result = timing.compare(named("tkq"), small_inputs, gpu=gpu)
    assert result.sets == timing.MOST_SETS == len(gpu.sets)
    assert [int(s[0][0]) for s in gpu.sets] == list(range(timing.MOST_SETS))
    assert result.set_bytes == 4096
    assert not result.beyond_l2
    assert Comparison((), 2, 75 * MIB, L2).beyond_l2


@pytest.mark.parametrize("when", ["first", "warm-up", "measured"])
def test_a_candidate_that_raises_is_reported_and_the_others_go_on(when):
    def milliseconds(name, turn):
        if name == "bad" and turn >= {"warm-up": 1, "measured": 5}.get(when, 99):
            raise RuntimeError("no such kernel")
        return 2.0

    def bad(*_):
        if when == "first":
            raise RuntimeError("no such kernel")
        return "bad"

    gpu = FakeGpu(milliseconds)
    effort = Effort(rounds=7, round_seconds=0.1, warmup_seconds=0.2)
    result = timing.compare({**named("tkq"), "bad": bad, **named("peer")}, small_inputs, effort, gpu=gpu)
    assert result["bad"].mode == "failed"
    assert result["bad"].note == "RuntimeError: no such kernel"
    assert not result["bad"].ok
    assert result["tkq"].times_ms == result["peer"].times_ms == (2.0,) * 7
    assert [t.name for t in result.timings] == ["tkq", "bad", "peer"]


def test_compare_reports_errors_of_the_first_output():
    gpu = FakeGpu(lambda *_: 1.0)
    asked = []

    def error(name, inputs, output):
        asked.append((name, int(inputs[0][0]), output))
        return {"tkq": 0.25, "copy": None}[name]

    result = timing.compare(named("tkq", "copy"), small_inputs, error=error, gpu=gpu)
    assert asked == [("tkq", 0, "tkq"), ("copy", 0, "copy")]
    assert result["tkq"].error == 0.25
    assert result["copy"].error is None


# ---- cases, bounds and files -------------------------------------------------------------------------------------


def case(ours, bound=None, unit="TFLOP/s", work=4e9, **others):
    timings = (timed("tkq", ours, error=1e-3), *(timed(name, times, error=1e-3) for name, times in others.items()))
    return Case("gemm", "gemm", "M2 N3", unit, work, Comparison(timings, 2, 75 * MIB, L2), bound=bound)


def test_rates_are_work_over_the_median():
    c = case([1, 2, 3], peer=[4, 4, 4])
    assert c.rate("tkq") == pytest.approx(2.0)  # 4 GFLOP in 2 ms
    assert c.rate("peer") == pytest.approx(1.0)
    assert case([1, 2, 3], unit="GB/s").rate("tkq") == pytest.approx(2000.0)
    with pytest.raises(ValueError, match="unit.*'GiB'"):
        case([1], unit="GiB")


def test_a_bound_is_against_the_best_peer_and_may_be_missed_by_one_per_cent():
    bound = Bound(("fast", "slow"), 1.0)
    assert case([100] * 7, bound, fast=[101] * 7, slow=[150] * 7, roof=[10] * 7).against_best() == ("fast", 1.01)
    assert case([100] * 7, bound, fast=[99.1] * 7, slow=[150] * 7).holds() is True
    assert case([100] * 7, bound, fast=[98.9] * 7, slow=[150] * 7).holds() is False
    assert case([100] * 7, bound, fast=[200] * 7).holds() is None  # the other peer was not timed
    assert case([100] * 7, None, fast=[50] * 7).holds() is None
    assert within(0.9603, 0.97)
    assert not within(0.9602, 0.97)


def test_a_roof_is_a_second_bound():
    timed_case = case([100] * 7, Bound(("peer",), 1.0), peer=[101] * 7, copy=[94] * 7)
    high, low = (dataclasses.replace(timed_case, roof=Bound(("copy",), r)) for r in (0.96, 0.94))
    assert high.holds_beside(high.bound) is True and high.holds() is False
    assert low.holds() is True
    assert dataclasses.replace(low, roof=Bound(("add",), 0.5)).holds() is None
    assert "copy 0.940 0.96 MISSED" in harness.summary([high])
    assert "bound 0.96x copy: 0.940x copy: MISSED" in "\n".join(harness.case_lines(high))


def test_our_failure_is_a_missed_bound():
    timings = (Timing("tkq", "failed", note="boom"), timed("peer", [1] * 7))
    c = Case("gemm", "gemm", "M", "GB/s", 1, Comparison(timings, 2, 1, 1), bound=Bound(("peer",), 1.0))
    assert c.holds() is False
    assert c.accurate() is False
    assert any("FAILED boom" in line for line in harness.case_lines(c))


@pytest.mark.parametrize(("ours", "accurate"), [(2e-3, True), (2.9e-3, True), (3.1e-3, False), (math.nan, False)])
def test_accuracy_is_judged_beside_the_best_peer(ours, accurate):
    timings = (timed("tkq", [1], error=ours), timed("a", [1], error=1e-3), timed("b", [1], error=1e-2))
    assert Case("s", "op", "M", "GB/s", 1, Comparison(timings, 2, 1, 1)).accurate() is accurate


def test_accuracy_is_judged_beside_those_that_compute_alike():
    timings = tuple(Timing(name, "graph", (1.0,) * 7, error=error)
                    for name, error in (("tkq", 4e-3), ("torch", 4e-3), ("QuACK", 1e-3)))
    case = Case("s", "op", "M", "GB/s", 1, Comparison(timings, 2, 1, 1))
    assert case.accurate() is False and dataclasses.replace(case, alike=("torch",)).accurate()
    assert dataclasses.replace(case, alike=("Liger",)).accurate() is None, "what computes alike was not timed"


def test_geometric_mean():
    assert geometric_mean([0.5, 2.0]) == pytest.approx(1.0)
    assert geometric_mean([1.0, 8.0, 1.0]) == pytest.approx(2.0)


def report():
    c = case([1.0] * 7, Bound(("peer",), 0.96), peer=[1.5] * 7)
    readings = {"tkq": (Reading(1755, 640.5, 61), Reading(None, None, None))}
    full = Case(**{**c.__dict__, "readings": readings, "missing": {"FA4": "ModuleNotFoundError"}})
    plain = case([2.0] * 7)
    environment = Environment.here("580.1")
    return Report(environment, [full, plain], [Cost("rmsnorm", 9.5, 9.0, 11.0, 31, 12.0, "note")], ["one problem"])


def test_json_round_trips(tmp_path):
    before = report()
    path = tmp_path / "new" / "foundation.json"
    before.save(path)
    assert Report.from_json(path.read_text()) == before
    assert [p.name for p in path.parent.iterdir()] == ["foundation.json"]
    data = json.loads(path.read_text())
    assert data["cases"][0]["derived"]["ratio"] == {"peer": 1.5}
    assert data["cases"][0]["derived"]["holds"] is True
    assert data["environment"]["versions"]["torch"] == metadata.version("torch")


def test_text_of_a_run_names_every_candidate_and_verdict():
    r = report()
    lines = "\n".join(harness.case_lines(r.cases[0]))
    assert "1.500x" in lines
    assert "MISSING ModuleNotFoundError" in lines
    assert "1755 MHz" in lines
    assert "holds" in lines
    table = harness.summary(r.cases).splitlines()
    assert len(table) == 1 + len(r.cases)
    assert table[1].endswith("0.96 ok")
    cost, = harness.cost_lines(r.costs)
    assert "bound 12 ok note" in cost


def test_harness_compare_answers_a_question_and_reads_the_clock_while_a_candidate_works():
    class Live:
        live, reads = True, 0

        def read(self):
            self.reads += 1
            return Reading(1000 + self.reads, 500.0, 50)

    monitor = Live()
    gpu = FakeGpu(lambda name, _: {"tkq": 1.0, "peer": 1.1}[name])
    question = harness.Question("gemm", "gemm", "8^3", "TFLOP/s", 1e9, Bound(("peer",), 1.0), {"other": "absent"})
    c = harness.compare(question, named("tkq", "peer"), small_inputs, Effort(rounds=7), monitor=monitor, gpu=gpu)
    assert monitor.reads == 14
    assert {name: len(r) for name, r in c.readings.items()} == {"tkq": 7, "peer": 7}
    assert c.holds() is True
    assert c.missing == {"other": "absent"} and (c.round_seconds, c.idle_seconds) == (0.04, 0.0)
    monitor.live, monitor.reads = False, 0
    c = harness.compare(question, named("tkq", "peer"), small_inputs, monitor=monitor, gpu=gpu)
    assert {name: len(r) for name, r in c.readings.items()} == {"": 1}


# ---- the cost of a call ------------------------------------------------------------------------------------------


def test_calls_take_turns_and_a_cost_is_the_median_batch_over_its_calls():
    now, seen, synchronised = [0.0], [], [0]

    def call(name, microseconds):
        def run():
            batch = seen.count(name) // 10
            seen.append(name)
            # The two warm batches are slow, and one of the measured ones is disturbed.
            now[0] += {0: 1.0, 1: 1.0, 4: 0.5}.get(batch, (microseconds + batch % 3) * 1e-6)

        return run

    one, two = harness.cpu_times(
        {"one": Call(call("one", 8), at_most=9.5), "two": Call(call("two", 28))},
        batches=7,
        size=10,
        synchronize=lambda: synchronised.__setitem__(0, synchronised[0] + 1),
        clock=lambda: now[0],
    )
    assert seen == (["one"] * 10 + ["two"] * 10) * 9
    assert synchronised[0] == 19
    assert one.median_us == pytest.approx(10.0, rel=1e-3) and two.median_us == pytest.approx(30.0, rel=1e-3)
    assert one.least_us == pytest.approx(8.0, rel=1e-3)
    assert one.most_us == pytest.approx(0.5e6 / 10 * 10, rel=1e-3)
    assert one.samples == 7 and one.holds() is False and two.holds() is None


def test_calls_are_priced_again_while_the_host_has_other_work():
    def attempt(least, median):
        return [Cost("CPU per eager call: x + x", median, least, median, 31, None, ""),
                Cost("CPU per eager call: op", 2 * median, 2 * least, 2 * median, 31, None, "")]

    attempts = [attempt(6.0, 9.0), attempt(6.0, 8.0), attempt(6.0, 8.5), attempt(6.0, 6.1)]
    measure = iter(attempts)
    found = harness.quiet_cpu_times(lambda: next(measure))
    assert [dataclasses.replace(cost, note="") for cost in found] == attempts[1]
    assert {cost.note for cost in found} == {"attempt 2 of 3: the host was busy in another"}
    assert next(measure) is attempts[3], "three attempts and no more"
    measure = iter([attempts[0], attempts[3], attempts[1]])
    assert harness.quiet_cpu_times(lambda: next(measure))[0].note.startswith("attempt 2 of 2")
    assert next(measure) is attempts[1], "none after a quiet one"
    assert harness.quiet_cpu_times(lambda: attempts[3]) is attempts[3]


def test_the_cpu_on_which_python_runs_fastest_is_chosen(monkeypatch):
    on, ticks = [None], itertools.count()
    monkeypatch.setattr(os, "sched_setaffinity", lambda pid, cpus: on.__setitem__(0, next(iter(cpus))))
    # Two readings make a spin: each CPU has its own distance between them, and CPU 2 is disturbed once.
    now = [0.0]

    def clock():
        now[0] += {1: 3.0, 2: 9.0 if next(ticks) == 12 else 2.0, 3: 2.5}[on[0]]
        return now[0]

    assert harness._quietest([1, 2, 3], clock) == 2


def test_pricing_calls_leaves_the_process_as_it_was():
    import gc

    before = os.sched_getaffinity(0)
    seen = []

    def look():
        seen.append((len(os.sched_getaffinity(0)), gc.isenabled(), torch.is_grad_enabled()))

    with torch.no_grad():
        harness.cpu_times({"op": Call(look), "recorded": Call(look, recorded=True)}, batches=1, size=1)
        assert not torch.is_grad_enabled()
    assert seen[-2:] == [(1, False, False), (1, False, True)]
    assert os.sched_getaffinity(0) == before
    assert gc.isenabled()


def test_a_cost_holds_up_to_its_bound():
    assert Cost("c", 12.0, 1, 20, 3, 12.0).holds() is True
    assert Cost("c", 12.1, 1, 20, 3, 12.0).holds() is False
    assert Cost("c", 12.1, 1, 20, 3).holds() is None


# ---- peers and the foundation's cases ----------------------------------------------------------------------------


def test_a_missing_peer_is_named_with_its_reason(monkeypatch):
    def absent():
        raise ModuleNotFoundError("No module named 'gone'")

    monkeypatch.setitem(common.PEERS["gemm"], "gone", absent)
    found, missing = common.find("gemm", ("cuBLAS", "gone", "nonsense"))
    assert list(found) == ["cuBLAS"]
    assert missing["gone"] == "ModuleNotFoundError: No module named 'gone'"
    assert "nonsense" in missing["nonsense"]


@pytest.mark.parametrize("op", ["rmsnorm", "layernorm"])
def test_torch_peers_compute_what_tkq_means(op):
    from tkq import reference

    x, w, b = torch.randn(4, 64), torch.randn(64), torch.randn(64)
    found, _ = common.find(op, ("torch", "copy"))
    eps = {"rmsnorm": common.RMS_EPS, "layernorm": common.LAYER_EPS}[op]
    torch.testing.assert_close(found["torch"](x, w, b), getattr(reference, op)(x, w, b, eps))
    copied = found["copy"](x, w, b)
    assert torch.equal(copied, x)
    assert copied.data_ptr() != x.data_ptr()


@pytest.mark.parametrize("causal", [False, True])
def test_attention_peers_take_and_return_the_layout_of_tkq(causal):
    from tkq import reference

    q, k, v = torch.randn(2, 33, 4, 16), torch.randn(2, 33, 2, 16), torch.randn(2, 33, 2, 16)
    found, _ = common.find("attention", ("torch",), causal=causal)
    torch.testing.assert_close(found["torch"](q, k, v), reference.flash_attn(q, k, v, causal)[0])


def test_foundation_asks_what_the_issue_names():
    jobs = {name: list(make(())) for name, make in foundation.BENCH.sections.items()}
    assert {name: len(j) for name, j in jobs.items()} == {"gemm": 4, "attention": 12, "norms": 24}
    bounds = {j.question.shape: j.question.bound.at_least for j in jobs["attention"]}
    assert bounds["B16 S1024 H16 D128 causal"] == 1.10
    assert bounds["B4 S4096 H16 D128 causal"] == bounds["B1 S16384 H16 D128 causal"] == 1.04
    assert bounds["B1 S16384 H16 D128 full"] == 1.00
    assert bounds["B4 S4096 H32 D64 full"] == 0.97
    full, causal = (
        next(j for j in jobs["attention"] if j.question.shape == f"B4 S4096 H16 D128 {w}") for w in ("full", "causal")
    )
    assert full.question.work == 2 * causal.question.work == 4 * 4 * 16 * 4096 * 4096 * 128
    assert {j.question.bound for j in jobs["norms"]} == {Bound(("QuACK",), 0.99)}
    assert next(j for j in jobs["norms"] if j.question.shape == "M4096 N262144 with bias").question.work == 4 * 2**30
    assert {j.question.bound for j in jobs["gemm"]} == {Bound(("cuBLAS",), 0.96)}
    for j in (*jobs["attention"], *jobs["norms"], *jobs["gemm"]):
        assert set(j.question.bound.against) <= set(j.peer_names) <= set(common.PEERS[j.peer_op])


def test_a_run_shortens_its_turns_for_the_time_left(tmp_path):
    run = command.Run(tmp_path / "f.json", 1000.0, Effort(rounds=9, round_seconds=0.04))
    assert run.effort(10, 3).round_seconds == 0.04
    run = command.Run(tmp_path / "f.json", 9.0, Effort(rounds=9, round_seconds=0.04))
    short = run.effort(10, 3)
    assert 0.01 < short.round_seconds == pytest.approx(0.5 * 0.9 / 10 / 3, rel=0.05)
    assert short.rounds == 9
    late = command.Run(tmp_path / "f.json", -1.0, Effort())
    assert late.effort(2, 3).round_seconds == 0.01
    late.case(next(foundation.gemm_jobs()), 2)
    assert late.report.problems == ["gemm 4096^3 a @ b: not run, out of time"]
    assert Report.from_json((tmp_path / "f.json").read_text()).problems == late.report.problems


def test_relative_error_shows_what_is_wrong():
    wanted = torch.randn(64, 64)
    assert timing.relative_error(wanted, wanted) == 0
    assert timing.relative_error(wanted * 1.01, wanted) == pytest.approx(0.01, rel=1e-3)
    broken = wanted.clone()
    broken[3, 4] = math.nan
    assert math.isnan(timing.relative_error(broken, wanted))


def test_a_cost_that_cannot_be_measured_is_recorded_and_the_others_go_on(tmp_path):
    def broken():
        raise RuntimeError("no kernel")

    run = command.Run(tmp_path / "f.json", 10.0, Effort())
    run.costs("peer", broken)
    run.costs("x + x", lambda: [Cost("x + x", 1.0, 1.0, 1.0, 1)])
    saved = Report.from_json((tmp_path / "f.json").read_text())
    assert saved.problems == ["cost of peer: RuntimeError: no kernel"]
    assert [c.name for c in saved.costs] == ["x + x"]


def test_a_command_is_published_without_the_machine_s_folders(monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(
        "sys.argv", [str(tmp_path / "bench" / "ops" / "foundation.py"), "--out", "/elsewhere/results", "--seconds", "5"]
    )
    assert Environment.here().command == "python -m bench.ops.foundation --out results --seconds 5"
    monkeypatch.setattr("sys.argv", [str(tmp_path / "bench" / "__main__.py"), "rmsnorm"])
    assert Environment.here().command == "python -m tkq bench rmsnorm"
