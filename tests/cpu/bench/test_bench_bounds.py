"""Which bounds results miss, in words."""
from dataclasses import replace

from bench.core import bounds
from bench.core.results import Bound, Case, Cost, Environment, Report
from tkq.testing.timing import Comparison, Timing

HERE = Environment("H100", "580", "13.0", "9", "3.12", "2026-11-21T10:00:00+00:00", "x", {})


def case(shape, bound=None, roof=None, section="large", error=1e-3, **others):
    timings = (Timing("tkq", "graph", (1.0,) * 7, error=error),
               *(Timing(name, "graph", (ms,) * 7, error=1e-3) for name, ms in others.items()))
    return Case(section, "gemm", shape, "TFLOP/s", 1e9, Comparison(timings, 2, 1, 1), bound=bound, roof=roof)


def test_bounds_that_are_missed_are_named_and_those_that_hold_are_not():
    beside = Bound(("cuBLAS",), 0.98)
    report = Report(HERE, [case("good", beside, cuBLAS=0.975), case("slow", beside, cuBLAS=0.96),
                           case("far from its roof", beside, Bound(("copy",), 0.95), cuBLAS=1.0, copy=0.9),
                           case("alone", beside), case("wrong", error=9e-3, cuBLAS=1.0)],
                    [Cost("CPU per eager call: x + x", 8, 8, 8, 9), Cost("CPU per eager call: a", 8.0, 8, 8, 9, 9.0),
                     Cost("CPU per eager call: b", 9.04, 9, 9, 9, 9.0)])
    assert bounds.missed({"other": report}) == [
        "other: gemm slow: 0.960x cuBLAS, bound 0.98",
        "other: gemm far from its roof: 0.900x copy, bound 0.95",
        "other: gemm wrong: the error exceeds twice the best baseline's",
        "other: CPU per eager call: b: 9.04 us, bound 9 (`x + x` took 8.0)"]
    assert bounds.undecided({"other": report, "again": report}) == 2


def test_what_failed_is_not_said_to_be_inaccurate():
    failed = case("failed", Bound(("cuBLAS",), 0.98), cuBLAS=1.0)
    timings = (Timing("tkq", "failed"), failed.comparison["cuBLAS"])
    failed = replace(failed, comparison=Comparison(timings, 2, 1, 1))
    assert failed.accurate() is False
    assert bounds.missed({"other": Report(HERE, [failed])}) == ["other: gemm failed: failed, bound 0.98"]


def test_an_error_that_is_not_equal_is_named():
    found = replace(case("M", Bound(("FA4",), 0.98), error=2.9e-3, FA4=1.0), equal_error=1.05)
    assert bounds.missed({"other": Report(HERE, [found])}) == [
        "other: gemm M: the error exceeds 1.05 times the fastest baseline's"]


def test_a_mean_is_missed_where_all_of_its_shapes_are_there(capsys):
    report = lambda n: Report(HERE, [case(str(i), Bound(("cuBLAS",), 0.98), cuBLAS=1.0) for i in range(n)])
    assert bounds.missed({"gemm": report(4)}) == []
    assert bounds.missed({"gemm": report(5)}) == ["gemm: large: geomean 1.000x the best baseline, bound 1.01"]
    said = capsys.readouterr().out.splitlines()
    assert all(line.startswith("gemm: large: geomean 1.000x the best baseline") for line in said) and len(said) == 2
    assert said[0].endswith("4 of 5 shapes: undecided")
