"""Runs of a bench as one file."""
from dataclasses import replace

import pytest

from bench.join_results import joined, main
from bench.results import Case, Cost, Environment, Report
from tkq.testing.timing import Comparison, Timing

HERE = Environment("H100", "1", "13", "9", "3.12", "2026-01-01", "python -m bench.gemm --sections few", {"tkq": "0"})


def case(section: str, ms: float) -> Case:
    timings = tuple(Timing(name, "graph", (x,) * 7) for name, x in (("tkq", ms), ("cuBLAS", 2.0)))
    return Case(section, "gemm", section, "TFLOP/s", 1e12, Comparison(timings, 1, 1, 1))


def test_the_later_of_two_runs_counts():
    cost = Cost("a call", 1.0, 1.0, 1.0, 7)
    first = Report(HERE, [case("large", 1.0), case("few", 1.0)], [cost], ["what did not run"])
    again = Report(replace(HERE, command="python -m bench.gemm", date="later"), [case("few", 4.0)], [], [])
    both = joined([first, again])
    assert [(c.section, c.ratios()["cuBLAS"]) for c in both.cases] == [("large", 2.0), ("few", 0.5)]
    assert both.costs == [cost] and both.problems == ["what did not run"]
    assert both.environment.command == "python -m bench.gemm --sections few; python -m bench.gemm"


def test_other_machines_are_not_joined():
    with pytest.raises(ValueError, match="H200"):
        joined([Report(HERE), Report(replace(HERE, device="H200"))])


def test_files(tmp_path):
    parts, out = [tmp_path / "a.json", tmp_path / "b.json"], tmp_path / "both.json"
    for path, section in zip(parts, ("large", "few")):
        Report(HERE, [case(section, 1.0)]).save(path)
    assert main([*map(str, parts), "--out", str(out)]) == 0
    assert [c.section for c in Report.from_json(out.read_text()).cases] == ["large", "few"]
