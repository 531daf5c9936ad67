"""One file of results from several runs of a bench on the same machine and code.

    python -m bench.join_results PART.json PART.json .. --out bench/results/h100/gemm.json

A case or cost that two runs have is the later file's. Runs of different devices or versions are not joined.
"""

from __future__ import annotations

import argparse
import sys
from dataclasses import replace
from pathlib import Path

from bench.results import Report


def joined(reports: list[Report]) -> Report:
    """The reports as one, of the first one's environment.

    Raises:
        ValueError: a report of another device, driver or version."""
    first = reports[0]
    for report in reports[1:]:
        if replace(report.environment, date=first.environment.date, command=first.environment.command) != (
                first.environment):
            raise ValueError(f"{report.environment} is not {first.environment}")
    cases, costs = {}, {}
    for report in reports:
        cases |= {(case.section, case.op, case.shape): case for case in report.cases}
        costs |= {cost.name: cost for cost in report.costs}
    commands = "; ".join(report.environment.command for report in reports)
    return Report(replace(first.environment, command=commands), list(cases.values()), list(costs.values()),
                  [problem for report in reports for problem in report.problems])


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m bench.join_results", description=__doc__.split("\n")[0])
    parser.add_argument("parts", nargs="+", type=Path)
    parser.add_argument("--out", type=Path, required=True)
    options = parser.parse_args(argv)
    joined([Report.from_json(path.read_text()) for path in options.parts]).save(options.out)
    return 0


if __name__ == "__main__":
    sys.exit(main())
