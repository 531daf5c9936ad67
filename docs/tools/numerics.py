"""The tables of docs/numerics.md, made of the committed results when the site is built."""
from __future__ import annotations

import json
from pathlib import Path

from bench.core.ops import is_rival, shown

RESULTS = Path(__file__).resolve().parents[2] / "bench" / "results" / "h100"
HEAD = ("operation (bf16)", "shapes", "tkq", "baselines, max of each", "tkq / best baseline")
NOT = "not measured"


def tables(folder: Path = RESULTS) -> str:
    """One table per file of results, with the date of its run."""
    parts = []
    for path in sorted(folder.glob("*.json")):
        report = json.loads(path.read_text())
        rows = _rows(report.get("cases", []))
        if rows:
            day = report["environment"]["date"][:10]
            lines = [HEAD, ("---",) * len(HEAD), *rows]
            parts.append(f"### {path.stem.replace('_', ' ')}\n\nMeasured {day}.\n\n"
                         + "\n".join(f"| {' | '.join(cells)} |" for cells in lines))
    return "\n\n".join(parts)


def _rows(cases) -> list[tuple[str, ...]]:
    """One row per operation, except those without any measured error."""
    by_name: dict[str, list[dict]] = {}
    for case in cases:
        by_name.setdefault(shown(case["op"], case["section"]), []).append(case)
    return [_row(name, found) for name, found in by_name.items() if any(map(_has_errors, found))]


def _has_errors(case) -> bool:
    return any(timing["error"] is not None for timing in case["comparison"]["timings"])


def _row(name, cases):
    ours: list[float] = []
    theirs: dict[str, list[float]] = {}
    beside = []
    for case in cases:
        errors = {t["name"]: t["error"] for t in case["comparison"]["timings"]
                  if t["error"] is not None and (t["name"] == case["ours"] or is_rival(t["name"]))}
        mine = errors.pop(case["ours"], None)
        ours += [] if mine is None else [mine]
        for peer, error in errors.items():
            theirs.setdefault(peer, []).append(error)
        if mine is not None and errors and min(errors.values()) > 0:
            beside.append(mine / min(errors.values()))
    peers = ", ".join(f"{peer} {max(found):.1e}" for peer, found in theirs.items())
    op, comma, what = name.partition(",")
    return (f"`{op}`{comma}{what}", f"{len(ours)} of {len(cases)}", _span(ours, ".1e"), peers or NOT,
            _span(beside, ".2f"))


def _span(numbers, form) -> str:
    """From min to max."""
    if not numbers:
        return NOT
    low, high = format(min(numbers), form), format(max(numbers), form)
    return low if low == high else f"{low} to {high}"
