"""The bounds that results miss, in words: of single shapes, of geomeans, of call costs."""

from __future__ import annotations

import contextlib
import io
from collections.abc import Iterable, Mapping

from bench.core import accuracy, ops
from bench.core.results import Case, Cost, Report, host


def missed(reports: Mapping[str, Report]) -> list[str]:
    """Of all files, by their names."""
    return [f"{name}: {text}" for name, report in reports.items()
            for text in (*_of_cases(report.cases), *_of_costs(report.costs), *_of_all(name, report.cases))]


def undecided(reports: Mapping[str, Report]) -> int:
    """How many cases have a bound beside a peer that was not timed."""
    return sum(case.holds_beside(bound) is None for report in reports.values() for case in report.cases
               for bound in (case.bound, case.roof) if bound is not None)


def _of_cases(cases: Iterable[Case]) -> Iterable[str]:
    for case in cases:
        for bound in filter(None, (case.bound, case.roof)):
            if case.holds_beside(bound) is False:
                best = case.beside(bound)
                reached = f"{best[1]:.3f}x {best[0]}" if best else "failed"
                yield f"{case.op} {case.shape}: {reached}, bound {bound.at_least:.3g}"
        if not case.comparison[case.ours].ok:
            if not (case.bound or case.roof):
                yield f"{case.op} {case.shape}: failed"
        elif case.accurate() is False:
            yield f"{case.op} {case.shape}: the error exceeds {accuracy.rule(case.equal_error)}"


def _of_costs(costs: list[Cost]) -> Iterable[str]:
    x = host(costs)
    beside = f" (`x + x` took {x.median_us:.1f})" if x else ""
    for cost in costs:
        if cost.holds() is False:
            yield f"{cost.name}: {cost.median_us:.2f} us, bound {cost.at_most:g}{beside}"


def _of_all(name: str, cases: list[Case]) -> list[str]:
    """What a file of cases says of all of them together; the means that it prints have its name."""
    there_are = {part.bench for parts in ops.OPS.values() for part in parts} | {"chapters"}
    if name not in there_are:
        return []
    with contextlib.redirect_stdout(io.StringIO()) as said:
        found = ops.bench_of(name).judge(cases)
    for line in said.getvalue().splitlines():
        print(f"{name}: {line}")
    return found
