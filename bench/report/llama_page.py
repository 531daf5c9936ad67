"""The figures of docs/integrations.md, made from the results of `bench.studies.llama` alone.

    python -m bench.report.llama_page            print them
    python -m bench.report.llama_page --write    put them between the markers on the page
"""
from __future__ import annotations

import argparse
import json
import statistics
import sys
from pathlib import Path

from bench.core.markdown import table
from bench.core.results import Case, Report
from bench.report.tables import dates, days
from bench.studies.llama_profile import KINDS, REST, titled

ROOT = Path(__file__).resolve().parents[2]
RESULTS = ROOT / "bench" / "results" / "h100"
PAGE = ROOT / "docs" / "integrations.md"
BEGIN, END = "<!-- figures: begin (python -m bench.report.llama_page --write) -->", "<!-- figures: end -->"
WORDS = {"torch": "torch, fastest attention", "tkq": 'patched, `linear="tkq"`', "tkq, none": "patched"}
PROFILED = ("torch", "torch, compiled", "tkq", "tkq, fp8", "tkq, fp8_tensor", "tkq, fp8_block")  # if they are there


def words(name: str) -> str:
    """What a run is called here."""
    return WORDS.get(name) or f'patched, `linear="{name.partition(", ")[2]}"`'


def run_words(name: str) -> str:
    """The same of a run that may be torch's in several ways, which are named as they are."""
    return name if name.startswith("torch") else words(name)


def section(folder: Path = RESULTS) -> str:
    """The text between the markers."""
    report = Report.from_json((folder / "llama.json").read_text())
    e, when = report.environment, days(dates(report) or [report.environment.date])
    parts = [f"Measured {when} on one {e.device} with torch {e.versions['torch']}, wall-clock medians over\n"
             f"interleaved turns, {_runs(report)}.\nSpeedup: over torch, as a median of ratios within a turn.",
             steps(report)]
    if report.costs:
        parts.append(decoding(report))
    for file, made in (("llama_profile.json", profile), ("llama_learning.json", learning)):
        if (folder / file).exists():
            parts.append(made(json.loads((folder / file).read_text())))
    return "\n\n".join(parts)


def _runs(report: Report) -> str:
    """One run, or which sections are of which."""
    of = {case.section: (case.date or report.environment.date)[:16].replace("T", " ") for case in report.cases}
    if len(set(of.values())) < 2:
        return "in one run"
    return "in separate runs: " + ", ".join(f"{section} at {when}" for section, when in of.items())


def steps(report: Report) -> str:
    cases = {case.section: case for case in report.cases}
    names = dict.fromkeys(t.name for case in cases.values() for t in case.comparison.timings if t.times_ms)
    rows = [(words(name), *(cell for case in cases.values() for cell in _step(case, name)))
            for name in names if not name.endswith(", eager")]
    head = [x for kind in cases for x in (f"{kind}, ms", "tokens/s", "speedup", "GiB")]
    beside = [f"{words(name.removesuffix(', eager'))} {_ratio(case, name):.3f}"
              + f" ({case.section})" * (case.section != "compiled") for case in cases.values()
              for name in names if name.endswith(", eager") and _timed(case, name)]
    text = table(("training step", *head), rows)
    return text + ("" if not beside else "\n\nEager over torch compiled, in the same turns: " + ", ".join(beside) + ".")


def _timed(case: Case, name: str):
    return next((t for t in case.comparison.timings if t.name == name and t.times_ms), None)


def _ratio(case: Case, name: str) -> float:
    """The speedup over torch."""
    return statistics.median(a / b for a, b in zip(_timed(case, "torch").times_ms, _timed(case, name).times_ms))


def _step(case: Case, name: str) -> tuple[str, str, str, str]:
    found = _timed(case, name)
    if found is None:
        return "", "", "", ""
    batch, seqlen = (int(word[1:]) for word in case.shape.split())
    rate, ratio = 1e3 * batch * seqlen / found.median_ms, "" if name == "torch" else f"{_ratio(case, name):.3f}"
    return f"{found.median_ms:.1f}", f"{rate:.0f}", ratio, found.note.partition(" GiB")[0]


def decoding(report: Report) -> str:
    rows: dict[str, dict] = {}
    for cost in report.costs:
        library, _, what = cost.name.partition(": ")
        ms = f"{cost.median_us / 1e3:.2f} ({cost.least_us / 1e3:.2f} to {cost.most_us / 1e3:.2f})"
        rows.setdefault(what, {})[library] = ms, cost.note.removesuffix(" tokens/s")
    known = [cost.date for cost in report.costs if cost.date]
    when = f" ({days(known)})" if known else ""
    return f"Decoding{when}, one CUDA graph per token:\n\n" + table(
        ("milliseconds (min to max), tokens/s", "torch", "patched"),
        ((what, *(f"{ms}, {rate}" for ms, rate in (found["torch"], found["tkq"]))) for what, found in rows.items()))


def profile(found: dict) -> str:
    """Kernels of one step."""
    names = [name for name in PROFILED if name in found]
    rows = [(titled(kind), *(f"{found[name]['ms'][kind]:.1f}" for name in names)) for kind in (*KINDS, REST)]
    rows.append(("sum (launches)", *(f"{found[name]['all']:.1f} ({found[name]['launches']})" for name in names)))
    rows.append(("wall time from first to last kernel",
                 *(f"{found[name]['span']:.1f}" for name in names)))
    return ("Kernel time in a profile of one step, in milliseconds, eager unless the column says otherwise. tkq's\n"
            "kernels overlap their predecessor (programmatic dependent launch), and overlapped time counts for both:\n"
            "the last line is the wall time.\n\n"
            + table(("kernels", *map(run_words, names)), rows))


def learning(found: dict) -> str:
    marks = range(50, max(map(len, found["losses"].values())) + 1, 50)
    rows = []
    for name, curve in found["losses"].items():
        means = (f"{statistics.fmean(curve[i - 10:i]):.3f}" if i <= len(curve) else "" for i in marks)
        rows.append((run_words(name), f"{curve[0]:.3f}", *means, f"{100 * found['apart'][name]:.3f} %"))
    return ("Losses from the same initial weights, in a separate run: means of ten steps, and their largest\n"
            "difference from torch's:\n\n"
            + table(("run", "first", *(f"step {i}" for i in marks), "max difference"), rows) + earlier(found))


def earlier(found: dict) -> str:
    """A paragraph that says which curves a run took over from one before, which may have been of older code."""
    made = found.get("made", {})
    newest = max(made.values(), default="")
    old = [f"{name} ({made[name][:10] or 'no date on file'})" for name in found["losses"]
           if name in made and made[name] != newest]
    return f"\n\nFrom an earlier run than the rest: {', '.join(old)}." if old else ""


def written(page: str, text: str) -> str:
    """The page with the text between its markers."""
    before, begin, rest = page.partition(BEGIN)
    _, end, after = rest.partition(END)
    if not (begin and end):
        raise ValueError(f"{PAGE.name} lacks the markers {BEGIN!r} and {END!r}")
    return f"{before}{BEGIN}\n\n{text}\n\n{END}{after}"


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m bench.report.llama_page", description=__doc__.split("\n")[0])
    parser.add_argument("--write", action="store_true", help="rewrite docs/integrations.md")
    if parser.parse_args(argv).write:
        PAGE.write_text(written(PAGE.read_text(), section()))
    else:
        print(section())
    return 0


if __name__ == "__main__":
    sys.exit(main())
