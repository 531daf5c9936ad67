"""Runs of a bench as one file."""
from dataclasses import replace
from importlib import metadata

import pytest

from bench.core.join_results import joined, main
from bench.core.results import Case, Cost, Environment, Report
from tkq.testing.timing import Comparison, Timing

HERE = Environment("H100", "1", "13", "9", "3.12", "2026-01-01", "python -m bench.ops.gemm --sections few",
                   {"tkq": "0"})


def case(section: str, ms: float) -> Case:
    timings = tuple(Timing(name, "graph", (x,) * 7) for name, x in (("tkq", ms), ("cuBLAS", 2.0)))
    return Case(section, "gemm", section, "TFLOP/s", 1e12, Comparison(timings, 1, 1, 1))


def test_the_later_of_two_runs_counts():
    cost = Cost("a call", 1.0, 1.0, 1.0, 7)
    first = Report(HERE, [case("large", 1.0), case("few", 1.0)], [cost], ["what did not run"])
    again = Report(replace(HERE, command="python -m bench.ops.gemm", date="2026-01-02"), [case("few", 4.0)], [], [])
    both = joined([first, again])
    assert [(c.section, c.ratios()["cuBLAS"]) for c in both.cases] == [("large", 2.0), ("few", 0.5)]
    assert both.costs == [replace(cost, date="2026-01-01")] and both.problems == ["what did not run"]
    assert both.environment.date == "2026-01-02" and [c.date for c in both.cases] == ["2026-01-01", "2026-01-02"]
    assert [c.date for c in joined([both, replace(first, cases=[])]).cases] == ["2026-01-01", "2026-01-02"]
    assert both.environment.command == "python -m bench.ops.gemm --sections few; python -m bench.ops.gemm"


def test_what_ran_later_is_no_problem_any_more():
    first = Report(HERE, [], [], ["gemm few: out of memory", "gemm large: the time is up"], 3000.0)
    both = joined([first, Report(HERE, [case("few", 1.0)], [], [])])
    assert both.problems == ["gemm large: the time is up"] and both.copy_gbs == 3000.0


def test_folders(tmp_path):
    for name, section in (("a", "large"), ("b", "few")):
        Report(HERE, [case(section, 1.0)]).save(tmp_path / name / "gemm.json")
    (tmp_path / "b" / "fp8_sums.json").write_text('{"errors": []}')
    assert main([str(tmp_path / "a"), str(tmp_path / "b"), "--out", str(tmp_path / "out")]) == 0
    found = Report.from_json((tmp_path / "out" / "gemm.json").read_text())
    assert [c.section for c in found.cases] == ["large", "few"]
    assert (tmp_path / "out" / "fp8_sums.json").read_text() == '{"errors": []}'
    with pytest.raises(SystemExit):
        main([str(tmp_path / "a"), str(tmp_path / "a" / "gemm.json"), "--out", str(tmp_path / "out")])


def test_other_machines_are_not_joined():
    with pytest.raises(ValueError, match="H200"):
        joined([Report(HERE), Report(replace(HERE, device="H200"))])


def test_a_package_that_one_run_lacks_is_of_the_whole_and_another_version_is_not_joined():
    """As of a file from before a peer was asked for, and a run with it."""
    of = lambda **versions: Report(replace(HERE, versions={"tkq": "0", **versions}))
    for reports in ([of(), of(deep="2.5")], [of(deep=None), of(deep="2.5")], [of(deep="2.5"), of(deep=None)]):
        assert joined(reports).environment.versions == {"tkq": "0", "deep": "2.5"}
    with pytest.raises(ValueError, match="deep 2.6 is not deep 2.5"):
        joined([of(deep="2.5"), of(), of(deep="2.6")])
    with pytest.raises(ValueError, match="tkq 1 is not tkq 0"):
        joined([of(), Report(replace(HERE, versions={"tkq": "1"}))])


def test_files(tmp_path):
    parts, out = [tmp_path / "a.json", tmp_path / "b.json"], tmp_path / "both.json"
    for path, section in zip(parts, ("large", "few")):
        Report(HERE, [case(section, 1.0)]).save(path)
    assert main([*map(str, parts), "--out", str(out)]) == 0
    assert [c.section for c in Report.from_json(out.read_text()).cases] == ["large", "few"]


def test_versions_of_packages_that_wheels_name_otherwise(monkeypatch):
    def version(name):
        if name != "tokenspeed-flashkda":
            raise metadata.PackageNotFoundError(name)
        return "0.0.1"

    monkeypatch.setattr(metadata, "version", version)
    found = Environment.here().versions
    assert found["flash-kda"] == "0.0.1" and found["deep-gemm"] is None and found["torch"] is None
