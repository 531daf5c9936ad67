"""Results as tables in Markdown: one for each run, with all that was measured or in short. bench/report/summary.py has
one of all runs."""

from __future__ import annotations

import statistics
from collections.abc import Iterable, Mapping
from dataclasses import replace

from bench.core import ops, row_peers
from bench.core.markdown import table
from bench.core.results import SHORT_US, Bound, Case, Cost, Reading, Report, busy, host
from tkq.testing.timing import Timing

SPEEDUP = ("Speedup: the baseline's time over tkq's in the same round, as a median over interleaved rounds "
           "(`sustained`: a ratio of medians). Above 1, tkq is faster.")
BETWEEN = (f"Kernels below {SHORT_US:g} us are timed twice: back to back, and between other kernels as in a program. "
           "Where both exist, speedups and rates are of the second.")


def setting(report: Report) -> str:
    """Where and with what a run was made."""
    e = report.environment
    versions = ", ".join(f"{name} {version}" for name, version in e.versions.items() if version)
    return f"one {e.device} (driver {e.driver}, CUDA {e.cuda}, cuDNN {e.cudnn}; {versions})"


def most_common_setting(reports: Iterable[Report]) -> str:
    """Of several runs, for a page that says it once; "" of none."""
    return statistics.mode(found) if (found := [setting(report) for report in reports]) else ""


def heading(report: Report, known: str = "") -> str:
    """When, where and with what a run was made; of a page that says ``known`` above, the day alone where that is so."""
    where, when = setting(report), days(dates(report) or [report.environment.date])
    return f"Measured {when}{'' if where == known else f' on {where}'}."


def dates(report: Report) -> list[str]:
    """Of each case, when its run was."""
    return [date(report, case) for case in report.cases]


def date(report: Report, case: Case) -> str:
    return case.date or report.environment.date


def days(found: Iterable[str]) -> str:
    """Of these times the days, from the first to the last."""
    each = sorted({time[:10] for time in found})
    return " to ".join(dict.fromkeys((each[0], each[-1])))


def rivals(case: Case) -> dict[str, float]:
    """The speedup over each baseline that was timed: neither rooflines nor other forms of tkq."""
    return {name: ratio for name, ratio in case.ratios().items() if ops.is_rival(name)}


# ---- a run in short ----------------------------------------------------------------------------------------------


def short(report: Report, head: str = "") -> str:
    """A run: each case with its fastest baseline and its roofline, and the costs. head: above it, `heading` without."""
    head = head or heading(report)
    parts = [f"{head} {_timed_beside(report.cases)} {_bursts(report.cases)}".strip() if report.cases else head]
    if report.cases:
        more = {"back to back": _back_to_back, "errors, tkq / baseline": _errors, "vs. roofline or own form": _of_roof}
        more = {head: of for head, of in more.items() if any(map(of, report.cases))}
        columns = ("operation (bf16)", "shape", "tkq", "fastest baseline", "speedup", *more)
        parts.append(table(columns, ((name, *_case_row(case), *(of(case) for of in more.values()))
                                     for name, case in zip(_named(report.cases), report.cases))))
        parts += [said] if (said := between(report.cases)) else []
    if report.costs:
        titled = [replace(cost, name=ops.shown_cost(cost.name)) for cost in report.costs]
        parts.append(costs(titled, days(dates(report) or [report.environment.date])))
    if report.problems:
        parts.append(did_not_run(report))
    return "\n\n".join(parts)


def costs(found: Iterable[Cost], known: str = "") -> str:
    """Costs, those of calls relative to `x + x` too, and whether the host was busy. Of a file of several runs their
    dates as well, unless these are ``known``."""
    found = list(found)
    x = host(found)
    rows = [(*_cost_row(cost), *((_beside(cost, x),) if x else ())) for cost in found]
    said = [table(("cost", "median", *(("vs. `x + x`",) if x else ())), rows)]
    if (dated := {cost.date for cost in found if cost.date}) and days(dated) != known:
        said.append(f"Costs measured {days(dated)}.")
    return "\n\n".join(filter(None, (*said, busy(found))))


def _beside(cost: Cost, x: Cost) -> str:
    return f"{cost.median_us / x.median_us:.2f}" if cost.name.startswith("CPU per eager call") else ""


def did_not_run(report: Report) -> str:
    return f"Not run: {'; '.join(p.partition(': ')[0] for p in report.problems)}."


def _timed_beside(cases: list[Case]) -> str:
    """The baselines that each operation was timed with at one shape or more, operations with the same ones together.
    Those without are left out: their rows say so."""
    timed: dict[str, dict] = {}
    for case in cases:
        timed.setdefault(listed([ops.shown(case.op, case.section)]), {}).update(rivals(case))
    alike: dict[str, list[str]] = {}
    for name, peers in timed.items():
        alike.setdefault(", ".join(peers) or "none", []).append(name)
    if len(alike) == 1:
        return f"Baselines: {', '.join(alike)}."
    alike.pop("none", None)
    lists = (f"{peers} ({'; '.join(names)})" for peers, names in alike.items())
    return f"Baselines: {'; '.join(lists)}."


def _bursts(cases: list[Case]) -> str:
    """Which sections were timed in bursts after idle time and which were not, of a file with such; "" without."""
    if not any(case.idle_seconds for case in cases):
        return ""
    of: dict[str, set] = {}
    for case in cases:
        of.setdefault(case.section, set()).add(turns(case))
    said: dict[str, list] = {}
    for section, found in of.items():
        for how in sorted(found):
            said.setdefault(how, []).append(f"{section}, in part" if len(found) > 1 else section)
    lists = (f"{how}: {', '.join(sections)}" for how, sections in sorted(said.items()))
    return f"Turns {'; '.join(lists)}."


def turns(case: Case) -> str:
    """How long a candidate's turn was, and the idle time before it."""
    if case.idle_seconds is None:
        return "with unrecorded idle time"
    if not case.idle_seconds:
        return "without idle time"
    return f"in bursts of {1e3 * case.round_seconds:.0f} ms after {1e3 * case.idle_seconds:.0f} ms idle"


def listed(names: Iterable[str]) -> str:
    """Titles as code and words: "`gemm`, small M" keeps its comma, so semicolons separate titles."""
    parts = (name.partition(",") for name in names)
    return "; ".join(f"`{op}`{comma}{what}" for op, comma, what in parts)


def _named(cases: list[Case]) -> list[str]:
    """The operation of each, and its section where one operation has the same shape in several and does not say it."""
    names = [ops.shown(case.op, case.section) for case in cases]
    sections: dict[tuple, set] = {}
    for name, case in zip(names, cases):
        sections.setdefault((name, case.shape), set()).add(case.section)
    several = {name for (name, _), found in sections.items() if len(found) > 1}
    return [listed([name]) + f", {case.section}" * (name in several and case.section not in case.op.split())
            for name, case in zip(names, cases)]


def _case_row(case: Case) -> tuple[str, ...]:
    ours = f"{case.rate(case.ours):.0f} {case.unit}" if case.comparison[case.ours].ok else "failed"
    found, others = rivals(case), _not_timed(case)
    if not found:
        return case.shape, ours, others or "none", ""
    name = min(found, key=found.get)
    note = f" ({others})" if others else ""
    return case.shape, ours, f"{name} {case.rate(name):.0f} {case.unit}{note}", f"{found[name]:.3f}"


def _not_timed(case: Case) -> str:
    """The baselines of a case that were not timed, by reason; "" without such."""
    by: dict[str, list[str]] = {}
    for peer in row_peers.of_row([case]):
        for why in set(peer.at) - {row_peers.TIMED}:
            by.setdefault("not timed" if why == row_peers.NOT_REQUESTED else why, []).append(peer.name)
    return "; ".join(f"{', '.join(names)} {why}" for why, names in sorted(by.items()))


def _back_to_back(case: Case) -> str:
    """The back-to-back speedup over the same baseline, for a case whose speedup is of the other timing."""
    found = rivals(case)
    return f"{case.back_to_back()[min(found, key=found.get)]:.3f}" if case.between and found else ""


def _errors(case: Case) -> str:
    """The relative errors of tkq and of the fastest baseline against float32, where both were measured."""
    found = rivals(case)
    known = [case.comparison[name].error for name in (case.ours, *([min(found, key=found.get)] if found else ()))]
    return " / ".join(f"{error:.1e}" for error in known) if found and None not in known else ""


def between(cases: Iterable[Case]) -> str:
    """How the short kernels were timed, in a sentence; "" without short ones."""
    short = [case for case in cases if case.short]
    without = sum(not case.between for case in short)
    if not short:
        return ""
    if not without:
        return BETWEEN
    which = "all" if without == len(short) else f"{without} of {len(short)}"
    said = f"Timed back to back only: {which} cases below {SHORT_US:g} us."
    return said if without == len(short) else f"{said} {BETWEEN}"


def roof(case: Case) -> Bound | None:
    """The bound of a case whose candidates are no baselines: a roofline, or another form of tkq."""
    return case.roof or (case.bound if case.bound and not any(map(ops.is_rival, case.bound.against)) else None)


def _of_roof(case: Case) -> str:
    best = case.beside(found) if (found := roof(case)) else None
    return f"{best[1]:.3f} vs. {best[0]}" if best else ""


def _cost_row(cost: Cost) -> tuple[str, ...]:
    value = f"{cost.median_us / 1000:.1f} ms" if cost.median_us >= 1000 else f"{cost.median_us:.1f} us"
    return cost.name, f"{value} ({cost.note})" if cost.note else value


# ---- a run with everything ---------------------------------------------------------------------------------------

REASON = 100  # characters of it
WHOLE = ("operation", "shape", "candidate", "median", "between", "spread", "rate", "speedup", "launches", "host",
         "error", "SM clock", "power")
LEGEND = (
    "Median: over the rounds, of one call, with a cold L2, calls back to back. Between: the same between other "
    "kernels, where that was timed; rate and speedup are then of it. Spread: half the interquartile range. Speedup: of "
    "tkq over the candidate. Host: CPU time of an eager call of that shape. Error: relative, against float32. SM clock "
    "and power: medians of readings in the candidate's own turns; power is the driver's average over about a second. "
    "An empty field was not measured."
)


def whole(report: Report) -> str:
    """A run: a row for every candidate of every case, with all that was measured, the costs, and missing baselines."""
    parts = [f"{heading(report)} {SPEEDUP}", f"By `{report.environment.command}`."]
    if report.copy_gbs:
        parts.append(f"Device copy in this run: {report.copy_gbs:.0f} GB/s read and written.")
    if said := _bursts(report.cases):
        parts.append(said)
    if report.cases:
        parts.append(table(WHOLE, ((name, *row) for name, case in zip(_named(report.cases), report.cases)
                                   for row in _candidates(case))))
        parts += [said] if (said := between(report.cases)) else []
    if report.costs:
        parts.append(costs(report.costs))
    parts += [f"Missing: {name}: {why}" for name, why in missing(report.cases).items()]
    if report.problems:
        parts.append(did_not_run(report))
    return "\n\n".join(parts)


def missing(cases: Iterable[Case]) -> dict[str, str]:
    """Baselines that were timed nowhere, with the reason."""
    timed, absent = set(), {}
    for case in cases:
        timed |= {t.name for t in case.comparison.timings if t.ok}
        absent |= {**case.missing, **{t.name: t.note for t in case.comparison.timings if not t.ok}}
    return {name: why.split("\n")[0] for name, why in absent.items() if name not in timed}


def _candidates(case: Case) -> Iterable[tuple[str, ...]]:
    ratios = case.ratios()
    for t in case.comparison.timings:
        if not t.ok:
            yield case.shape, t.name, f"failed: {_in_a_cell(t.note)}", *("",) * (len(WHOLE) - 4)
            continue
        counts = case.timing(t.name)
        low, high = counts.quartiles_ms
        yield (case.shape, t.name, f"{1e3 * t.median_ms:.2f} us",
               f"{1e3 * counts.median_ms:.2f} us" if case.between else "", f"{(high - low) / 2 / counts.median_ms:.1%}",
               f"{case.rate(t.name):.0f} {case.unit}", f"{ratios[t.name]:.3f}" if t.name in ratios else "",
               *_measured(t, case.readings))


def _in_a_cell(reason: str) -> str:
    """A reason's beginning, as a cell of a table can have it."""
    return " ".join(reason.split())[:REASON].replace("|", "/")


def _measured(t: Timing, readings: Mapping[str, tuple[Reading, ...]]) -> tuple[str, ...]:
    own = readings.get(t.name) or readings.get("") or ()
    return ("" if t.launches is None else f"{t.launches:g}", "" if t.host_us is None else f"{t.host_us:.1f} us",
            "" if t.error is None else f"{t.error:.1e}", middle((r.sm_mhz for r in own), "MHz"),
            middle((r.watts for r in own), "W"))


def middle(values: Iterable[float | None], unit: str) -> str:
    known = [value for value in values if value is not None]
    return f"{statistics.median(known):.0f} {unit}" if known else ""
