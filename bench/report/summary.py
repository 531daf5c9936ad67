"""The results of all runs as one table in Markdown, with its notes. bench/report/tables.py has the tables of one
run."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from datetime import datetime

from bench.core import ops, row_peers
from bench.core.markdown import table
from bench.core.results import SHORT_US, SUSTAINED, Case, Report, geometric_mean
from bench.report.tables import LEGEND, date, dates, days, listed, rivals, roof, turns, whole


def grouped(reports: Mapping[str, Report]) -> dict[str, list[tuple[Report, Case]]]:
    """Every case by its title, in the order of `ops.OPS`. reports: by the file's name."""
    found: dict[str, list] = {}
    for file, report in reports.items():
        for case in report.cases:
            if (name := ops.title(file, case.section, case.op)) is not None:
                found.setdefault(name, []).append((report, case))
    order = [f"{name}, {part.what}" if part.what else name for name, parts in ops.OPS.items() for part in parts]
    return {name: found[name] for name in dict.fromkeys(order) if name in found}


def strongest(cases: Iterable[Case]) -> list[float]:
    """Of each case the ratio beside its fastest peer, of those that have one."""
    return [min(found.values()) for case in cases if (found := rivals(case))]


def summary(reports: Mapping[str, Report]) -> str:
    """A row for each operation: its speedup over the fastest baseline at each shape, and over a copy kernel; for every
    other baseline why it was not timed. Operations with neither are left out: `without_baseline` names them."""
    rows = []
    for name, found in grouped(reports).items():
        cases = [case for _, case in found]
        ratios, copies = strongest(cases), beside_roofs(cases)
        if not ratios and not copies:
            continue
        names = row_peers.listed(row_peers.of_row(cases, row_peers.asked_for(name)))
        said = [f"{x:.2f}" for x in (geometric_mean(ratios), min(ratios), max(ratios))] if ratios else [""] * 3
        op, comma, what = name.partition(",")
        rows.append((f"`{op}`{comma}{what}", names, str(len(ratios) or len(cases)), *said,
                     copies, days(date(*each) for each in found)))
    return table(("operation", "baselines", "shapes", "geomean", "min", "max", "vs. copy", "date"), rows)


FEW = 6  # rows that a sentence names
RUN = 3600  # seconds: what was begun within so long of the newest is of one run


def _of_rows(rows: Mapping[str, list[tuple[Report, Case]]]) -> dict[str, list[str]]:
    return {name: [date(*each) for each in cases] for name, cases in rows.items()}


def _older(of: Mapping[str, list[str]]) -> list[str]:
    """Of what was measured at these times, the names of what is older than the newest, and of what is so in part."""
    began = {name: [datetime.fromisoformat(each) for each in found] for name, found in of.items()}
    newest = max((time for found in began.values() for time in found), default=None)
    old = {name: [(newest - time).total_seconds() > RUN for time in found] for name, found in began.items()}
    return [name + ", in part" * (not all(each)) for name, each in old.items() if any(each)]


def _which_run(of: Mapping[str, list[str]], what: str, listed: Callable[[list[str]], str]) -> str:
    """A sentence about what is older than the rest, "" where nothing is. Of which state of the code a run is, no file
    says."""
    found = _older(of)
    if len(found) > min(FEW, len(of) // 2):
        every = sorted(each[:10] for times in of.values() for each in times)
        between = f"on {every[0]}" if every[0] == every[-1] else f"from {every[0]} to {every[-1]}"
        return f"The {what} come from several runs, {between}."
    return f"From an earlier run than the other {what}: {listed(found)}." if found else ""


def are_of_one_run(reports: Mapping[str, Report]) -> bool:
    """The rows of the summary and of what works for seconds: is none older than the rest?"""
    return not _older(_of_rows({**grouped(reports), **_of_seconds(reports)}))


def of_which_run(reports: Mapping[str, Report]) -> str:
    """Of the rows of the summary."""
    return _which_run(_of_rows(grouped(reports)), "rows", listed) or "All rows come from one run."


def timings_of_which_run(reports: Mapping[str, Report]) -> str:
    """Of the files with cases or costs."""
    of = {name.replace("_", " "): dates(report) or [report.environment.date] for name, report in reports.items()}
    return _which_run(of, "timings", "; ".join) or "All timings come from one run."


def at_full_clock(reports: Mapping[str, Report]) -> str:
    """A sentence about which rows are bursts after a rest; "" without such."""
    rows = {name: [bool(case.idle_seconds) for _, case in found] for name, found in grouped(reports).items()
            if any(rivals(case) for _, case in found)}  # as in the summary
    bursts = [name + ", in part" * (not all(each)) for name, each in rows.items() if any(each)]
    if not bursts:
        return ""
    how = dict.fromkeys(turns(case) for found in grouped(reports).values() for _, case in found
                        if case.idle_seconds)
    return f"Timed {'; '.join(how)}, at full clock: {listed(bursts)}."


def sustained(reports: Mapping[str, Report]) -> str:
    """A sentence and a table of GEMMs that run for seconds, at the power limit; "" without such."""
    kinds = _of_seconds(reports)
    if not kinds:
        return ""
    known = [2 * case.round_seconds for found in kinds.values() for _, case in found if case.round_seconds]
    long = f"{max(known):g} s" if known else "seconds"
    head = (f"Sustained: each large GEMM runs for {long} by itself and reaches the power limit. The speedup is a ratio "
            "of medians:")
    rows = [(listed([ops.shown(op, SUSTAINED)]), *_sustained_row([case for _, case in found]),
             days(date(*each) for each in found)) for op, found in kinds.items()]
    names = ("operation", "fastest baseline", "shapes", "geomean", "min", "max", "rate of tkq", "date")
    return "\n\n".join(filter(None, (head, table(names, rows), _left_out(kinds))))


def _left_out(kinds: Mapping[str, list[tuple[Report, Case]]]) -> str:
    """A sentence about peers that have such a product and did not work for seconds at any shape; "" without such."""
    said = []
    for op, found in kinds.items():
        timed = {peer for _, case in found for peer in rivals(case)}
        if absent := dict.fromkeys(peer for _, case in found for peer in case.missing if peer not in timed):
            said.append(f"{', '.join(absent)} for {listed([ops.shown(op, SUSTAINED)])}")
    return f"No sustained run: {'; '.join(said)}." if said else ""


def _of_seconds(reports: Mapping[str, Report]) -> dict[str, list[tuple[Report, Case]]]:
    """By operation, the cases of products that work for seconds beside peers."""
    kinds: dict[str, list[tuple[Report, Case]]] = {}
    for report in reports.values():
        for case in report.cases:
            if case.section == SUSTAINED and rivals(case):
                kinds.setdefault(case.op, []).append((report, case))
    return kinds


def _sustained_row(cases: list[Case]) -> tuple[str, ...]:
    found, ratios = map(rivals, cases), strongest(cases)
    fastest = dict.fromkeys(min(each, key=each.get) for each in found)
    rates = _span([case.rate(case.ours) for case in cases], ".0f")
    said = (f"{x:.3f}" for x in (geometric_mean(ratios), min(ratios), max(ratios)))
    return ", ".join(fastest), str(len(cases)), *said, f"{rates} {cases[0].unit}"


def _span(values: list[float], form: str) -> str:
    """The least and the most, or one where they read the same."""
    return " to ".join(dict.fromkeys(format(each, form) for each in (min(values), max(values))))


def without_baseline(reports: Mapping[str, Report]) -> str:
    """A sentence about what the summary leaves out: operations with neither a baseline nor a copy; "" without such."""
    names = [name for name, found in grouped(reports).items()
             if not strongest(case for _, case in found) and not beside_roofs(case for _, case in found)]
    return f"Compared only with other forms of tkq itself, and so not in the table: {listed(names)}." if names else ""


def of_short(reports: Mapping[str, Report]) -> str:
    """How the rows with short kernels were timed, in a sentence; "" without such."""
    rows = {name: [case.between for _, case in found if case.short] for name, found in grouped(reports).items()}
    alone = [name + ", in part" * any(each) for name, each in rows.items() if each and not all(each)]
    both = [name for name, each in rows.items() if any(each)]
    said = [f"Kernels below {SHORT_US:g} us ([two timings](docs/measuring.md#short-kernels))"] if both or alone else []
    said += [f" timed between other kernels: {listed(both)}."] if both else []
    said += [f"{';' if both else ''} timed back to back only: {listed(alone)}."] if alone else []
    return "".join(said).replace(".;", ";")


def document(reports: Mapping[str, Report]) -> str:
    """results.md of a folder: all that was measured."""
    files = (f"## {name.replace('_', ' ')}\n\n{whole(report)}" for name, report in reports.items())
    return "\n\n".join(("# Results", summary(reports), LEGEND, *files)) + "\n"


def beside_roofs(cases: Iterable[Case]) -> str:
    """The geomean speedup over a kernel that only moves the bytes, and the number of shapes."""
    cases = list(cases)
    found = [best[1] for case in cases if (beside := roof(case)) and set(beside.against) <= set(ops.ROOFS)
             and (best := case.beside(beside))]
    of = f"{len(found)}" if len(found) == len(cases) else f"{len(found)} of {len(cases)}"
    return f"{geometric_mean(found):.2f} ({of})" if found else ""
