"""Merges results of several runs of a bench on the same machine and code into one file.

    python -m bench.core.join_results PART.json PART.json .. --out bench/results/h100/gemm.json
    python -m bench.core.join_results FOLDER FOLDER .. --out bench/results/h100

A case or cost that two runs have is the later file's; the file's date is the newest run's, each case and cost keeps its
own.
Runs of different devices or versions are not joined.
"""

from __future__ import annotations

import argparse
import json
import sys
from dataclasses import replace
from pathlib import Path

from bench.core.results import Report


class Mixed(ValueError):
    """Results that are not of one machine with one set of versions."""


def joined(reports: list[Report]) -> Report:
    """The reports as one, of the environment that they share, at the newest date. A package that one of them had and
    another had not, or does not name, is of the whole: which cases it was timed in, they say.

    Raises:
        Mixed: a report of another device, driver or version."""
    first = reports[0]
    versions = _versions(reports)
    for report in reports[1:]:
        e = replace(report.environment, date=first.environment.date, command=first.environment.command)
        if replace(e, versions={}) != replace(first.environment, versions={}):
            raise Mixed(f"{report.environment} is not {first.environment}")
    cases, costs = {}, {}
    for report in reports:
        cases |= {(case.section, case.op, case.shape): replace(case, date=case.date or report.environment.date)
                  for case in report.cases}
        costs |= {cost.name: replace(cost, date=cost.date or report.environment.date) for cost in report.costs}
    commands = "; ".join(dict.fromkeys(report.environment.command for report in reports))
    copies = [report.copy_gbs for report in reports if report.copy_gbs is not None]
    newest = max(report.environment.date for report in reports)
    environment = replace(first.environment, command=commands, date=newest, versions=versions)
    return Report(environment, list(cases.values()), list(costs.values()), _problems(reports),
                  copies[-1] if copies else None)


def _versions(reports: list[Report]) -> dict[str, str | None]:
    found: dict[str, str | None] = {}
    for report in reports:
        for package, version in report.environment.versions.items():
            if version is not None and found.get(package) not in (None, version):
                raise Mixed(f"{package} {version} is not {package} {found[package]}")
            found[package] = version if version is not None else found.get(package)
    return found


def _problems(reports: list[Report]) -> list[str]:
    """What did not run, but for what a later report has run."""
    found = []
    for i, report in enumerate(reports):
        done = tuple(f"{case.op} {case.shape}: " for later in reports[i + 1:] for case in later.cases)
        found += [problem for problem in report.problems if not problem.startswith(done)]
    return list(dict.fromkeys(found))


def join_folders(folders: list[Path], out: Path) -> list[str]:
    """Each results file that one of the folders has, joined, into ``out``; the names. What is no report is the last
    folder's."""
    files: dict[str, list[Path]] = {}
    for folder in folders:
        for path in sorted(folder.glob("*.json")):
            files.setdefault(path.name, []).append(path)
    for name, paths in files.items():
        texts = [path.read_text() for path in paths]
        if "environment" in json.loads(texts[-1]):
            joined([Report.from_json(text) for text in texts]).save(out / name)
        else:
            out.mkdir(parents=True, exist_ok=True)
            (out / name).write_text(texts[-1])
    return sorted(files)


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m bench.core.join_results", description=__doc__.split("\n")[0])
    parser.add_argument("parts", nargs="+", type=Path, help="files, or folders of files")
    parser.add_argument("--out", type=Path, required=True, help="the file, or the folder")
    options = parser.parse_args(argv)
    folders = [path.is_dir() for path in options.parts]
    if all(folders):
        print(*join_folders(options.parts, options.out))
    elif any(folders):
        parser.error("parts: got files and folders, allowed are files or folders")
    else:
        joined([Report.from_json(path.read_text()) for path in options.parts]).save(options.out)
    return 0


if __name__ == "__main__":
    sys.exit(main())
