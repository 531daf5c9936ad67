"""What docs/integrations.md says of a Llama's training step and of its tokens: tables of what bench.llama writes."""

from __future__ import annotations

import json
import re
from collections.abc import Iterable
from pathlib import Path

from bench.results import Case, Cost, reports_in
from bench.tables import table
from tkq.testing.timing import ratio

NONE = "Not measured yet."


def patched(name: str) -> str:
    """A candidate of bench.llama, in the words of `patch`."""
    model, _, linear = name.partition(", ")
    if model != "tkq":
        return name
    return "patched" if linear == "none" else f'patched, `linear="{linear or "tkq"}"`'


def section(folder: Path) -> str:
    """Steps, tokens and, where it was kept, the profile of a step."""
    report = reports_in(folder).get("llama")
    if report is None or not report.cases:
        return NONE
    e, cases = report.environment, report.cases
    parts = [f"Measured {e.date[:10]} on one {e.device} with torch {e.versions['torch']}: {cases[0].shape} (sequences, "
             "tokens of each), bf16, torch's AdamW in each step, medians of turns by the host's clock, and the most "
             f"memory in use. torch has the fastest of its attentions: {_attention(cases[0])}.", steps(cases)]
    if report.costs:
        parts.append(f"Decoding, with a CUDA graph for each token:\n\n{tokens(report.costs)}")
    profile = folder / "llama_profile.json"
    if profile.exists():
        parts.append(profiled(json.loads(profile.read_text())))
    return "\n\n".join(parts)


def steps(cases: Iterable[Case]) -> str:
    """A row for each model, two columns for each way to run it."""
    cases = list(cases)
    names = dict.fromkeys(t.name for case in cases for t in case.comparison.timings if t.ok)
    head = ("model", *(word for case in cases for word in (case.section, f"times as fast as torch, {case.section}")))
    return table(head, ((patched(name), *(cell for case in cases for cell in _cells(case, name))) for name in names))


def _cells(case: Case, name: str) -> tuple[str, str]:
    timed = {t.name: t for t in case.comparison.timings if t.ok}
    if name not in timed:
        return "", ""
    memory = re.match(r"[\d.]+ GiB", timed[name].note)
    shown = f"{timed[name].median_ms:.1f} ms" + (f", {memory[0]}" if memory else "")
    if name == "torch" or "torch" not in timed:
        return shown, ""
    return shown, f"{ratio(timed[name], timed['torch']):.3f}"


def _attention(case: Case) -> str:
    note = next((t.note for t in case.comparison.timings if t.name == "torch"), "")
    found = re.search(r"(\w+) attention", note)
    return found[1] if found else "not known"


def tokens(costs: Iterable[Cost]) -> str:
    """A row for each prompt: a token's and the prefill's time, of tkq and of torch."""
    found: dict[str, dict[str, str]] = {}
    for cost in costs:
        who, _, rest = cost.name.partition(": ")
        what, _, prompt = rest.partition(", ")
        found.setdefault(prompt, {})[f"{what}, {who}"] = f"{cost.median_us / 1000:.2f} ms ({cost.note})"
    columns = list(dict.fromkeys(column for cells in found.values() for column in cells))
    return table(("sequences, prompt", *columns), ((prompt, *(cells.get(column, "") for column in columns))
                                                   for prompt, cells in found.items()))


def profiled(found: dict) -> str:
    """Of a profile of one step, what kernels are for."""
    kinds = next(iter(found.values()))["ms"]
    rows = [(kind, *(f"{each['ms'][kind]:.1f}" for each in found.values())) for kind in kinds]
    rows.append(("all (launches)", *(f"{each['all']:.1f} ({each['launches']})" for each in found.values())))
    return "Milliseconds of kernels in one step.\n\n" + table(("kernels", *map(patched, found)), rows)


