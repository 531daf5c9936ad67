"""Short kernels are timed once more between other kernels: by a GPU whose times are scripted."""
import dataclasses

import pytest

from bench.core import compared, harness
from bench.core.results import SHORT_US, Bound, Case, Report
from bench.report import plots, readme_table, summary, tables
from tests.cpu.bench.test_bench_harness import FakeBatch, FakeGpu, small_inputs
from tkq.testing import timing, timing_between
from tkq.testing.timing import Comparison, Effort, Timing

OTHER = 3e-3  # milliseconds of the other kernel
ALONE = {"tkq": 0.010, "peer": 0.012, "slow": 0.080}  # back to back, where one begins while the one before it ends
BEHIND = {"tkq": 0.012, "peer": 0.0125, "slow": 0.081}  # behind another kernel, without that one's time


class Gpu(FakeGpu):
    """A call launches what its name says; a batch is known by all that one of its calls launches."""

    def __init__(self, broken=()):
        super().__init__(self.time)
        self.launched, self.broken, self.calls = [], broken, {}

    def foreign(self):
        return lambda: self.launched.append("other")

    def batch(self, call, sets, calls, graphs):
        self.launched = []
        name = call(*sets[0])
        if tuple(self.launched) == ("other",) and name in self.broken:
            raise RuntimeError("no graph of both")
        self.calls[name, tuple(self.launched)] = calls
        return FakeBatch(self, (name, *self.launched))

    def time(self, name, turn):
        candidate, *others = name
        drift = 1 + 0.01 * turn  # of the clock
        if candidate is None:
            return OTHER * drift
        return (OTHER + BEHIND[candidate] if others else ALONE[candidate]) * drift


def compare(*names, short_us=50.0, gpu=None, **more):
    gpu = gpu or Gpu()
    candidates = {name: (lambda *_, name=name: name) for name in names}
    return timing.compare(candidates, small_inputs, Effort(7, 0.04, 0.0, short_us=short_us, **more), gpu=gpu), gpu


def test_short_ones_are_timed_behind_another_kernel_whose_time_is_taken_off():
    found, gpu = compare("tkq", "peer", "slow")
    for name in ("tkq", "peer", "slow"):  # all of them, that they can be compared
        assert found[name].median_ms == pytest.approx(ALONE[name] * 1.05)  # the first turn warms up
        assert len(found[name].between_ms) == 7
        assert found[name].between_ms == pytest.approx([BEHIND[name] * (1 + 0.01 * turn) for turn in range(2, 9)])
    turns = [(name, seconds) for name, seconds, _ in gpu.turns if name[1:]]
    assert {seconds for _, seconds in turns} == {timing_between.TURN} and len(turns) == 8 * 4
    assert gpu.released


def test_nothing_is_timed_twice_unless_it_is_short_and_asked_for():
    for names, short_us in ((("slow",), 50.0), (("tkq", "slow"), 0.0), (("tkq",), 10.0)):
        found, gpu = compare(*names, short_us=short_us)
        assert all(found[name].between_ms == () for name in names) and not [n for n, *_ in gpu.turns if n[1:]]
    assert Effort().short_us == 0.0  # neither tune nor the demo asks for it


def test_what_cannot_be_timed_between_others_keeps_its_first_times():
    found, _ = compare("tkq", "peer", gpu=Gpu(broken=("peer",)))
    assert found["peer"].ok and found["peer"].between_ms == () and len(found["tkq"].between_ms) == 7
    assert not _case(found).between  # a ratio is of one kind of timing
    assert _case(found).ratios() == _case(found).back_to_back()
    found, _ = compare("tkq", "peer", gpu=Gpu(broken=(None,)))  # nor the other kernel alone
    assert found["tkq"].ok and found["tkq"].between_ms == found["peer"].between_ms == ()


def test_a_candidate_that_is_lost_in_the_other_kernels_noise_is_not_timed_between(monkeypatch):
    monkeypatch.setitem(BEHIND, "peer", -1e-4)
    found, _ = compare("tkq", "peer")
    assert found["peer"].between_ms == () and found["tkq"].between_ms


def test_as_many_calls_are_queued_as_fit_a_short_turn():
    _, gpu = compare("tkq", "slow")
    assert gpu.calls["tkq", ("other",)] == gpu.calls[None, ("other",)] == 256  # the most
    assert gpu.calls["slow", ("other",)] == 64  # of 83 us each, a multiple of 64 sets in 10 ms


# ---- what results say ----------------------------------------------------------------------------------------------


def _case(comparison, **more):
    return Case("forward", "softmax", "M1 N2", "GB/s", 1e6, comparison, bound=Bound(("peer",), 1.1), **more)


def _timings(between=True, us=10.0):
    ms = us / 1e3
    of = lambda name, alone, behind: Timing(name, "graph", (alone * ms,) * 7, between_ms=(behind * ms,) * 7 * between)
    return Comparison((of("tkq", 1.0, 1.2), of("peer", 1.2, 1.26)), 1, 1, 1)


def test_what_counts_is_the_timing_between_others():
    case = _case(_timings())
    assert case.short and case.between
    assert case.ratios() == {"peer": pytest.approx(1.05)} and case.back_to_back() == {"peer": pytest.approx(1.2)}
    assert case.rate("tkq") == pytest.approx(1e6 / 0.012 / 1e6) and case.timing("tkq").median_ms == pytest.approx(0.012)
    assert case.holds() is False  # 1.1 would hold back to back
    old = _case(_timings(between=False))
    assert old.short and not old.between and old.ratios() == old.back_to_back() and old.holds() is True
    assert not _case(_timings(us=2 * SHORT_US)).short


def report(*cases):
    return dataclasses.replace(next(iter(readme_table.reports().values())), cases=list(cases), costs=[], problems=[])


def test_both_timings_come_back_from_a_file_and_old_files_have_one():
    made = report(_case(_timings()))
    text = made.to_json()
    assert Report.from_json(text).cases == made.cases and '"ratio_back_to_back"' in text
    lacking = report(_case(_timings(between=False)))
    without = lacking.to_json().replace(',\n      "between_ms": []', "")
    assert '"between_ms"' not in without and Report.from_json(without).cases == lacking.cases


def test_tables_say_which_timing_is_which():
    text = tables.short(report(_case(_timings())))
    assert "| shape | tkq | fastest baseline | speedup | back to back |" in text
    assert "| M1 N2 | 83 GB/s | peer 79 GB/s | 1.050 | 1.200 |" in text and tables.BETWEEN in text
    old = tables.short(report(_case(_timings(between=False))))
    assert "| 1.200 |" in old and "| back to back |" not in old
    assert "Timed back to back only: all cases below 50 us." in old
    whole = tables.whole(report(_case(_timings())))
    assert "| tkq | 10.00 us | 12.00 us | 0.0% | 83 GB/s |" in whole
    assert "| peer | 12.00 us | 12.60 us | 0.0% | 79 GB/s | 1.050 |" in whole
    assert tables.between([_case(_timings(us=100))]) == ""


def test_the_summary_says_of_which_timing_a_row_is():
    both, one = _case(_timings()), _case(_timings(between=False))
    assert summary.of_short({"softmax": report(_case(_timings(us=100)))}) == ""
    head = "Kernels below 50 us ([two timings](docs/measuring.md#short-kernels)) timed"
    assert summary.of_short({"softmax": report(both)}) == (
        f"{head} between other kernels: `softmax`.")
    assert summary.of_short({"softmax": report(one)}) == (
        f"{head} back to back only: `softmax`.")
    assert summary.of_short({"softmax": report(both, one)}) == (
        f"{head} between other kernels: `softmax`; timed back to back only: `softmax`, in part.")
    assert "| 1.05 | 1.05 | 1.05 |" in summary.summary({"softmax": report(both)})


def test_pictures_and_changes_use_one_timing_each():
    """Pictures show what counts; a change since an older run is of calls back to back, which both have."""
    line = plots._line("tkq", [_case(_timings())])
    assert line.rates == (pytest.approx(1e6 / 0.012 / 1e6),)
    change, = compared.changes(report(_case(_timings(between=False))), report(_case(_timings())))
    assert change.ratio == pytest.approx(1.0) and change.old == change.new == "100 GB/s"


def test_a_line_of_a_run_says_both(monkeypatch):
    text = "\n".join(harness.case_lines(_case(_timings())))
    assert "10.00 us" in text and "between 12.00 us" in text and "1.050x" in text
