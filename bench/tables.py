"""Results as tables in Markdown: one for each run, with all that was measured or in short, and one of all runs."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Iterable, Mapping
from datetime import datetime

from bench import ops
from bench.results import SUSTAINED, Bound, Case, Cost, Reading, Report, busy, geometric_mean, host
from tkq.testing.timing import Timing


def table(head: Iterable[str], rows: Iterable[Iterable[str]]) -> str:
    lines = [tuple(head), tuple("---" for _ in head), *rows]
    return "\n".join(f"| {' | '.join(cells)} |" for cells in lines)


RATIO = ("A ratio is the median over interleaved rounds of the peer's time over ours in the same round (`sustained`: "
         "the ratio of medians): above 1, tkq is faster.")


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
    """How many times faster ours is, of the peers that were timed: neither roofs nor tkq's own."""
    return {name: ratio for name, ratio in case.ratios().items() if ops.is_rival(name)}


# ---- a run in short ----------------------------------------------------------------------------------------------


def short(report: Report, head: str = "") -> str:
    """A run: each case beside the fastest peer and its roof, and the costs. head: above it, `heading` without."""
    head = head or heading(report)
    parts = [f"{head} {_timed_beside(report.cases)} {_bursts(report.cases)}".strip() if report.cases else head]
    if report.cases:
        roofs = any(map(_of_roof, report.cases))
        beside = ("of its roof, or of tkq's own",) if roofs else ()
        columns = ("operation (bf16)", "shape", "tkq", "fastest peer", "ratio", *beside)
        parts.append(table(columns, ((name, *_case_row(case), *((_of_roof(case),) if roofs else ()))
                                     for name, case in zip(_named(report.cases), report.cases))))
    if report.costs:
        parts.append(costs(report.costs))
    if report.problems:
        parts.append(did_not_run(report))
    return "\n\n".join(parts)


def costs(found: Iterable[Cost]) -> str:
    """Costs, those of calls beside `x + x` too, their days in a file of several runs, and whether the host was busy."""
    found = list(found)
    x = host(found)
    rows = [(*_cost_row(cost), *((_beside(cost, x),) if x else ())) for cost in found]
    said = [table(("cost", "median", *(("of `x + x`",) if x else ())), rows)]
    if dated := {cost.date for cost in found if cost.date}:
        said.append(f"Costs are of {days(dated)}.")
    return "\n\n".join(filter(None, (*said, busy(found))))


def _beside(cost: Cost, x: Cost) -> str:
    return f"{cost.median_us / x.median_us:.2f}" if cost.name.startswith("CPU per eager call") else ""


def did_not_run(report: Report) -> str:
    return f"Did not run: {'; '.join(p.partition(': ')[0] for p in report.problems)}."


def _timed_beside(cases: list[Case]) -> str:
    """Which peers each operation was timed beside at one shape at least: "the fastest" says little without it."""
    timed: dict[str, dict] = {}
    for case in cases:
        timed.setdefault(_listed([ops.shown(case.op, case.section)]), {}).update(rivals(case))
    lists = [f"{name} beside {', '.join(peers) or 'nothing'}" for name, peers in timed.items()]
    return f"Timed: {'; '.join(lists)}."


def _bursts(cases: list[Case]) -> str:
    """Which sections were timed in bursts after a rest and which were not, of a file with such; "" without."""
    if not any(case.idle_seconds for case in cases):
        return ""
    of: dict[str, set] = {}
    for case in cases:
        of.setdefault(case.section, set()).add(_turns(case))
    said: dict[str, list] = {}
    for section, found in of.items():
        for how in sorted(found):
            said.setdefault(how, []).append(f"{section}, in part" if len(found) > 1 else section)
    lists = " ".join(f"{how}: {'; '.join(sections)}." for how, sections in sorted(said.items()))
    return f"{lists} A ratio is of one case, all of whose candidates had the same turns; rates are those of its turns."


def _turns(case: Case) -> str:
    if case.idle_seconds is None:
        return "Turns of which the file does not say the rest"
    if not case.idle_seconds:
        return "Turns without rest"
    return f"In bursts of {1e3 * case.round_seconds:.0f} ms after {1e3 * case.idle_seconds:.0f} ms of rest"


def _named(cases: list[Case]) -> list[str]:
    """The operation of each, and its section where one operation has the same shape in several."""
    names = [ops.shown(case.op, case.section) for case in cases]
    sections: dict[tuple, set] = {}
    for name, case in zip(names, cases):
        sections.setdefault((name, case.shape), set()).add(case.section)
    several = {name for (name, _), found in sections.items() if len(found) > 1}
    return [_listed([name]) + f", {case.section}" * (name in several) for name, case in zip(names, cases)]


def _case_row(case: Case) -> tuple[str, ...]:
    ours = f"{case.rate(case.ours):.0f} {case.unit}" if case.comparison[case.ours].ok else "failed"
    found = rivals(case)
    if not found:
        failed = [each.name for each in case.comparison.timings
                  if not each.ok and each.name != case.ours and ops.is_rival(each.name)]
        return case.shape, ours, f"{', '.join(failed)} failed" if failed else "none timed", ""
    name = min(found, key=found.get)
    wanted = case.bound.against if case.bound else ()
    absent = [peer for peer in wanted if peer not in found and ops.is_rival(peer)]
    note = f" ({', '.join(absent)} not timed)" if absent else ""
    return case.shape, ours, f"{name} {case.rate(name):.0f} {case.unit}{note}", f"{found[name]:.3f}"


def _roof(case: Case) -> Bound | None:
    """What a case is set beside that is no rival."""
    return case.roof or (case.bound if case.bound and not any(map(ops.is_rival, case.bound.against)) else None)


def _of_roof(case: Case) -> str:
    best = case.beside(roof) if (roof := _roof(case)) else None
    return f"{best[1]:.3f} of {best[0]}" if best else ""


def _cost_row(cost: Cost) -> tuple[str, ...]:
    value = f"{cost.median_us / 1000:.1f} ms" if cost.median_us >= 1000 else f"{cost.median_us:.1f} us"
    return cost.name, f"{value} ({cost.note})" if cost.note else value


# ---- a run with everything ---------------------------------------------------------------------------------------

WHOLE = ("operation", "shape", "who", "median", "spread", "rate", "tkq is", "launches", "host", "error", "SM clock",
         "power")
LEGEND = (
    "Median over the rounds of one call, with a cold L2; spread: half of what lies between the quartiles. \"tkq is\": "
    "how many times as fast. Host: the processor's time for an eager call of that shape. Error: relative, of the "
    "result against float32. Clock and power are medians of readings in the candidate's own turns; power is the "
    "driver's average over about a second. A field is empty where nothing was measured."
)


def whole(report: Report) -> str:
    """A run: a row for every candidate of every case, with all that was measured, the costs, and who is missing."""
    parts = [f"{heading(report)} {RATIO}", f"By `{report.environment.command}`."]
    if report.copy_gbs:
        parts.append(f"A device copy reads and writes {report.copy_gbs:.0f} GB/s in this run.")
    if said := _bursts(report.cases):
        parts.append(said)
    if report.cases:
        parts.append(table(WHOLE, ((name, *row) for name, case in zip(_named(report.cases), report.cases)
                                   for row in _candidates(case))))
    if report.costs:
        parts.append(costs(report.costs))
    parts += [f"Missing: {name}: {why}" for name, why in missing(report.cases).items()]
    if report.problems:
        parts.append(did_not_run(report))
    return "\n\n".join(parts)


def missing(cases: Iterable[Case]) -> dict[str, str]:
    """Peers that were timed nowhere, with the reason."""
    timed, absent = set(), {}
    for case in cases:
        timed |= {t.name for t in case.comparison.timings if t.ok}
        absent |= {**case.missing, **{t.name: t.note for t in case.comparison.timings if not t.ok}}
    return {name: why.split("\n")[0] for name, why in absent.items() if name not in timed}


def _candidates(case: Case) -> Iterable[tuple[str, ...]]:
    ratios = case.ratios()
    for t in case.comparison.timings:
        if not t.ok:
            yield case.shape, t.name, "failed", *("",) * (len(WHOLE) - 4)
            continue
        low, high = t.quartiles_ms
        yield (case.shape, t.name, f"{1e3 * t.median_ms:.2f} us", f"{(high - low) / 2 / t.median_ms:.1%}",
               f"{case.rate(t.name):.0f} {case.unit}", f"{ratios[t.name]:.3f}" if t.name in ratios else "",
               *_measured(t, case.readings))


def _measured(t: Timing, readings: Mapping[str, tuple[Reading, ...]]) -> tuple[str, ...]:
    own = readings.get(t.name) or readings.get("") or ()
    return ("" if t.launches is None else f"{t.launches:g}", "" if t.host_us is None else f"{t.host_us:.1f} us",
            "" if t.error is None else f"{t.error:.1e}", middle((r.sm_mhz for r in own), "MHz"),
            middle((r.watts for r in own), "W"))


def middle(values: Iterable[float | None], unit: str) -> str:
    known = [value for value in values if value is not None]
    return f"{statistics.median(known):.0f} {unit}" if known else ""


# ---- all runs ----------------------------------------------------------------------------------------------------


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
    """A row for each operation: how fast it is beside the fastest peer at each shape, and beside a copy.
    Operations that are beside neither are left out."""
    rows = []
    for name, found in grouped(reports).items():
        cases = [case for _, case in found]
        ratios, copies = strongest(cases), _beside_roofs(cases)
        if not ratios and not copies:
            continue
        names = dict.fromkeys(peer for case in cases for peer in rivals(case))
        said = [f"{x:.2f}" for x in (geometric_mean(ratios), min(ratios), max(ratios))] if ratios else [""] * 3
        op, comma, what = name.partition(",")
        rows.append((f"`{op}`{comma}{what}", ", ".join(names) or "no peer", str(len(ratios) or len(cases)), *said,
                     copies, days(date(*each) for each in found)))
    return table(("operation", "beside", "shapes", "mean", "least", "most", "of a copy", "day"), rows)


FEW = 6  # rows that a sentence names
SUSTAINED_OPS = {  # what the operations of seconds of work are called elsewhere
    "gemm bf16": "`gemm`", "gemm tensor": "`fp8_gemm`, one scale", "gemm row": "`fp8_gemm`, scales by rows",
    "gemm block": "`fp8_gemm`, scales by blocks"}
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
        return f"The {what} are of several runs, {between}."
    return f"Of an earlier run than the other {what}: {listed(found)}." if found else ""


def are_of_one_run(reports: Mapping[str, Report]) -> bool:
    """The rows of the summary and of what works for seconds: is none older than the rest?"""
    return not _older(_of_rows({**grouped(reports), **_of_seconds(reports)}))


def of_which_run(reports: Mapping[str, Report]) -> str:
    """Of the rows of the summary."""
    return _which_run(_of_rows(grouped(reports)), "rows", _listed) or "All rows of this table are of one run."


def timings_of_which_run(reports: Mapping[str, Report]) -> str:
    """Of the files with cases or costs."""
    of = {name.replace("_", " "): dates(report) or [report.environment.date] for name, report in reports.items()}
    return _which_run(of, "timings", "; ".join) or "All timings are of one run."


def at_full_clock(reports: Mapping[str, Report]) -> str:
    """A sentence about which rows are bursts after a rest; "" without such."""
    rows = {name: [bool(case.idle_seconds) for _, case in found] for name, found in grouped(reports).items()
            if any(rivals(case) for _, case in found)}  # as in the summary
    bursts = [name + ", in part" * (not all(each)) for name, each in rows.items() if any(each)]
    if not bursts:
        return ""
    how = dict.fromkeys(_turns(case).partition(" ")[2] for found in grouped(reports).values() for _, case in found
                        if case.idle_seconds)
    return f"Large products are {'; '.join(how)}, at full clock: {_listed(bursts)}."


def sustained(reports: Mapping[str, Report]) -> str:
    """A sentence and a table of what products give that work for seconds, at the power limit; "" without such."""
    kinds = _of_seconds(reports)
    if not kinds:
        return ""
    known = [2 * case.round_seconds for found in kinds.values() for _, case in found if case.round_seconds]
    long = f"{max(known):g} s" if known else "seconds"
    head = (f"Large products that work for {long} each, one after the other, meet the power limit; a ratio is that of "
            "medians:")
    rows = [(SUSTAINED_OPS.get(op, f"`{op}`"), *_sustained_row([case for _, case in found]),
             days(date(*each) for each in found)) for op, found in kinds.items()]
    names = ("operation", "fastest peer", "shapes", "mean", "least", "most", "its rate", "day")
    return "\n\n".join(filter(None, (head, table(names, rows), _left_out(kinds))))


def _left_out(kinds: Mapping[str, list[tuple[Report, Case]]]) -> str:
    """A sentence about peers that have such a product and did not work for seconds at any shape; "" without such."""
    said = []
    for op, found in kinds.items():
        timed = {peer for _, case in found for peer in rivals(case)}
        if absent := dict.fromkeys(peer for _, case in found for peer in case.missing if peer not in timed):
            said.append(f"{SUSTAINED_OPS.get(op, f'`{op}`')} beside {', '.join(absent)}")
    return f"Not timed for so long: {'; '.join(said)}." if said else ""


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


def not_timed(reports: Mapping[str, Report]) -> str:
    """A sentence about peers that bounds name and that were not timed at any shape of a row; "" without such."""
    said = []
    for name, found in grouped(reports).items():
        cases = [case for _, case in found]
        wanted = dict.fromkeys(peer for case in cases if case.bound for peer in case.bound.against)
        timed = {peer for case in cases for peer in case.ratios()}
        if absent := [peer for peer in wanted if ops.is_rival(peer) and peer not in timed]:
            said.append(f"{_listed([name])} beside {', '.join(absent)}")
    return f"Not timed: {'; '.join(said)}." if said else ""


def _listed(names: Iterable[str]) -> str:
    """Titles as code and words: "`gemm`, few rows" keeps its comma, so titles are apart by semicolons."""
    parts = (name.partition(",") for name in names)
    return "; ".join(f"`{op}`{comma}{what}" for op, comma, what in parts)


def document(reports: Mapping[str, Report]) -> str:
    """results.md of a folder: all that was measured."""
    files = (f"## {name.replace('_', ' ')}\n\n{whole(report)}" for name, report in reports.items())
    return "\n\n".join(("# Results", summary(reports), LEGEND, *files)) + "\n"


def _beside_roofs(cases: Iterable[Case]) -> str:
    """The mean beside what only moves the bytes."""
    found = [best[1] for case in cases if (roof := _roof(case)) and set(roof.against) <= set(ops.ROOFS)
             and (best := case.beside(roof))]
    return f"{geometric_mean(found):.2f}" if found else ""
