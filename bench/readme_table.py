"""The README's speed section and docs/speed_of_reductions.md, made from measured results and nothing else.

python -m bench.readme_table            print the section
python -m bench.readme_table --write    put it between the markers in README.md, and write the page
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from bench.results import Case, Cost, Report

ROOT = Path(__file__).resolve().parent.parent
H100 = ROOT / "bench" / "results" / "h100"
RESULTS = (H100 / "foundation.json",)
REDUCTIONS = tuple(H100 / f"{name}.json" for name in (
    "norms", "norm_backward", "softmax", "cross_entropy", "linear_cross_entropy", "pointwise"))
PAGE = ROOT / "docs" / "speed_of_reductions.md"
PAGE_HEAD = """# Speed of the reductions

Made by `python -m bench.readme_table --write` from `bench/results/h100`; what was tried is in
[attempts.md](attempts.md).

GB/s count the bytes that an operation has to move: of (M, N) tensors two in a norm's or softmax's forward (four with a
residual), one in a cross entropy's, three in a norm's or softmax's backward, two in a cross entropy's. The last column
is the ratio to an elementwise kernel that moves as many and computes nothing."""
README = ROOT / "README.md"
BEGIN, END = "<!-- speed: begin (python -m bench.readme_table --write) -->", "<!-- speed: end -->"
ROOFS = ("copy", "add", "copy + add", "tkq apart")  # show what memory allows, or fusing brings; not rivals


def section(*results: Path) -> str:
    """The section's text in Markdown, run by run, "Not measured yet." where there are no results."""
    found = [_run(Report.from_json(path.read_text())) for path in results or RESULTS if path.exists()]
    return "\n\n".join(found) or "Not measured yet."


def page(*results: Path) -> str:
    """All the reductions' tables, of the results that there are."""
    lines = [PAGE_HEAD]
    for path in results or REDUCTIONS:
        if path.exists():
            lines += ["", f"## {path.stem}", "", _run(Report.from_json(path.read_text()), roofs=True)]
    return "\n".join(lines) + "\n"


def _run(report: Report, roofs: bool = False) -> str:
    e = report.environment
    versions = ", ".join(f"{name} {version}" for name, version in e.versions.items() if version)
    head = (
        f"Measured {e.date[:10]} on one {e.device} (driver {e.driver}, CUDA {e.cuda}, cuDNN {e.cudnn}; {versions}). "
        "A ratio is the median over interleaved rounds of the peer's time over ours in the same round: "
        "above 1, tkq is faster. The peer shown is the fastest of those timed."
    )
    parts = [
        f"{head} {_timed_beside(report.cases)}",
        _table(("operation (bf16)", "shape", "tkq", "fastest peer", "ratio", *(("of the roof",) if roofs else ())),
               [_case_row(case) + (_of_roof(case) if roofs else ()) for case in report.cases]),
    ]
    if not report.cases:
        parts = [head]
    if report.costs:
        parts.append(_table(("cost", "median"), map(_cost_row, report.costs)))
    if report.problems:
        parts.append(f"Did not run: {'; '.join(p.partition(': ')[0] for p in report.problems)}.")
    return "\n\n".join(parts)


def _rivals(case: Case) -> dict[str, float]:
    return {name: ratio for name, ratio in case.ratios().items() if name not in ROOFS}


def _timed_beside(cases: list[Case]) -> str:
    """Which peers each operation was timed beside at one shape at least: "the fastest" says little without it."""
    timed: dict[str, dict] = {}
    for case in cases:
        timed.setdefault(case.op, {}).update(_rivals(case))
    lists = [f"`{op}` beside {', '.join(names) or 'nothing'}" for op, names in timed.items()]
    return f"Timed: {'; '.join(lists)}."


def _table(head: tuple[str, ...], rows) -> str:
    lines = [head, tuple("---" for _ in head), *rows]
    return "\n".join(f"| {' | '.join(cells)} |" for cells in lines)


def _case_row(case: Case) -> tuple[str, ...]:
    ours = f"{case.rate(case.ours):.0f} {case.unit}" if case.comparison[case.ours].ok else "failed"
    rivals = _rivals(case)
    if not rivals:
        return f"`{case.op}`", case.shape, ours, "none timed", ""
    name = min(rivals, key=rivals.get)
    absent = [peer for peer in (case.bound.against if case.bound else ()) if peer not in rivals]
    note = f" ({', '.join(absent)} not timed)" if absent else ""
    return f"`{case.op}`", case.shape, ours, f"{name} {case.rate(name):.0f} {case.unit}{note}", f"{rivals[name]:.3f}"


def _of_roof(case: Case) -> tuple[str]:
    """One cell: of what only moves the bytes, where that was timed."""
    found = [f"{name} {ratio:.3f}" for name, ratio in case.ratios().items() if name in ROOFS[:3]]
    return (", ".join(found),)


def _cost_row(cost: Cost) -> tuple[str, ...]:
    value = f"{cost.median_us / 1000:.1f} ms" if cost.median_us >= 1000 else f"{cost.median_us:.1f} us"
    return cost.name, f"{value} ({cost.note})" if cost.note else value


def replace_section(readme: str, text: str) -> str:
    """README's text with the section between the markers replaced."""
    before, found_begin, rest = readme.partition(BEGIN)
    _, found_end, after = rest.partition(END)
    if not found_begin or not found_end:
        raise ValueError(f"README.md lacks the markers {BEGIN!r} and {END!r}")
    return f"{before}{BEGIN}\n{text}\n{END}{after}"


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m bench.readme_table", description=__doc__.split("\n")[0])
    parser.add_argument("--write", action="store_true", help="rewrite README.md")
    if parser.parse_args(argv).write:
        README.write_text(replace_section(README.read_text(), section()))
        if any(path.exists() for path in REDUCTIONS):
            PAGE.write_text(page())
    else:
        print(section())
    return 0


if __name__ == "__main__":
    sys.exit(main())
