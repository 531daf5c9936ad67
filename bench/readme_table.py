"""The README's speed section and docs/speed.md, made from measured results and nothing else.

python -m bench.readme_table            print the section
python -m bench.readme_table --write    put it between the markers in README.md, and write docs/speed.md
"""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path

from bench.results import Case, Cost, Report

ROOT = Path(__file__).resolve().parent.parent
RESULTS = (ROOT / "bench" / "results" / "h100" / "foundation.json",)
README = ROOT / "README.md"
PAGE = ROOT / "docs" / "speed.md"
BEGIN, END = "<!-- speed: begin (python -m bench.readme_table --write) -->", "<!-- speed: end -->"
# timed beside the peers to show what memory allows, or what fusing brings or costs; no rivals
ROOFS = ("copy", "add", "copy + add", "tkq apart", "plain")


def section(*results: Path) -> str:
    """The section's text in Markdown, run by run, "Not measured yet." where there are no results."""
    found = [_run(Report.from_json(path.read_text())) for path in results or RESULTS if path.exists()]
    return "\n\n".join(found) or "Not measured yet."


def page(folder: Path = RESULTS[0].parent) -> str:
    """docs/speed.md: every results file but the README's, with what the roofs are."""
    head = """# Speed

Made by `python -m bench.readme_table --write` from `bench/results/h100`; the foundation is in the README. A roof is
what only moves the bytes: `copy` one read and one write, `add` two reads and one write. GB/s count the bytes that an
operation has to move: of (M, N) tensors two in a norm's or softmax's forward (four with a residual), one in a cross
entropy's, three in a norm's or softmax's backward, two in a cross entropy's. `plain` is tkq's own operation without
what is fused into it. Each table has the day of its run; the README says which are older than the code they measure."""
    others = sorted(path for path in folder.glob("*.json") if path not in RESULTS)
    runs = (f"## {path.stem.replace('_', ' ')}\n\n{_of_file(path)}" for path in others)
    return "\n\n".join((head, *runs)) + "\n"


def _of_file(path: Path) -> str:
    text = path.read_text()
    if path.stem.endswith("_sums"):
        return _sums(json.loads(text))
    if path.stem.endswith("_profile"):
        return _profile(json.loads(text))
    if path.stem.endswith("_learning"):
        return _learning(json.loads(text))
    return _memory(json.loads(text)) if path.stem.endswith("_memory") else _run(Report.from_json(text))


def _profile(found: dict) -> str:
    """bench.llama's second file: of a profile of one step, what kernels are for."""
    kinds = next(iter(found.values()))["ms"]
    rows = [(kind, *(f"{each['ms'][kind]:.1f}" for each in found.values())) for kind in kinds]
    rows.append(("all (launches)", *(f"{each['all']:.1f} ({each['launches']})" for each in found.values())))
    return "Milliseconds of kernels in one step.\n\n" + _table(("kernels", *found), rows)


def _learning(found: dict) -> str:
    """bench.llama's third file: losses."""
    rows = ((name, *(f"{x[i]:.3f}" for i in (0, len(x) // 2, -1)), f"{100 * found['apart'][name]:.3f} %")
            for name, x in found["losses"].items())
    head = f"From the same weights; at most {100 * found['at_most']:.1f} % from the first one, in means of ten steps."
    return f"{head}\n\n" + _table(("model", "loss", "half way", "at the end", "apart"), rows)


def _memory(found: dict[str, dict[str, int]]) -> str:
    """bench.linear_cross_entropy's second file: bytes by shape and candidate."""
    names = list(dict.fromkeys(name for taken in found.values() for name in taken))
    rows = ((shape, *(f"{taken[name] / 2**20:.0f} MB" if name in taken else "" for name in names),
             f"{taken['tkq'] / taken['torch']:.3f}" if "torch" in taken else "") for shape, taken in found.items())
    return "The most in use above inputs and gradients.\n\n" + _table(("shape", *names, "tkq of torch"), rows)


def _sums(found: dict) -> str:
    """bench.fp8_sums's file: what sums lose."""
    ways = dict.fromkeys(x["way"] for x in found["errors"])
    rows: dict[tuple, dict] = {}
    for x in found["errors"]:
        rows.setdefault((x["operands"], str(x["K"])), {})[x["way"]] = (
            f"{x['mean_signed']:+.1e}" if "mean_signed" in x else "not there")
    head = (f"{found['type']} on one {found['device']}, results in float32: the mean signed error as a share of the "
            "mean absolute result; below 0, results are too near to zero. Operands between 0 and 1, or normal.")
    return f"{head}\n\n" + _table(("operands", "K", *ways), ((*row, *(said[way] for way in ways))
                                                             for row, said in rows.items()))


def _run(report: Report) -> str:
    e = report.environment
    versions = ", ".join(f"{name} {version}" for name, version in e.versions.items() if version)
    head = (
        f"Measured {e.date[:10]} on one {e.device} (driver {e.driver}, CUDA {e.cuda}, cuDNN {e.cudnn}; {versions}). "
        "A ratio is the median over interleaved rounds of the peer's time over ours in the same round: "
        "above 1, tkq is faster. The peer shown is the fastest of those timed."
    )
    parts = [f"{head} {_timed_beside(report.cases)}" if report.cases else head]
    if report.cases:
        roofs = any(map(_of_roof, report.cases))
        columns = ("operation (bf16)", "shape", "tkq", "fastest peer", "ratio", *(("of its roof",) if roofs else ()))
        parts.append(_table(columns, (_case_row(case) + ((_of_roof(case),) if roofs else ()) for case in report.cases)))
    if report.costs:
        parts.append(_table(("cost", "median"), map(_cost_row, report.costs)))
    if report.problems:
        parts.append(f"Did not run: {'; '.join(p.partition(': ')[0] for p in report.problems)}.")
    return "\n\n".join(parts)


def _rivals(case: Case) -> dict[str, float]:
    return {name: ratio for name, ratio in case.ratios().items() if name not in ROOFS and not name.startswith("tkq,")}


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


def _of_roof(case: Case) -> str:
    roof = case.roof or (case.bound if case.bound and set(case.bound.against) <= set(ROOFS) else None)
    best = case.beside(roof) if roof else None
    return f"{best[1]:.3f} of {best[0]}" if best else ""


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
    parser.add_argument("--write", action="store_true", help="rewrite README.md and docs/speed.md")
    if parser.parse_args(argv).write:
        README.write_text(replace_section(README.read_text(), section()))
        PAGE.write_text(page())
    else:
        print(section())
    return 0


if __name__ == "__main__":
    sys.exit(main())
