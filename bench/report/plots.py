"""Results as plots: rates over sizes with a line for each baseline and the roofline; the speedup of all operations.

The same results make the same bytes: no dates, and no names drawn at random. What a picture shows is in its description
as a digest, so that a test sees whether it is of the results that lie beside it. Needs matplotlib (`pip install
-e .[bench]`).
"""

from __future__ import annotations

import hashlib
import json
import re
import statistics
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

from bench.core import ops
from bench.core.results import Case, Report, _words, geometric_mean, kind_of
from bench.report import summary

STYLE = 4  # to be raised where the drawing changes: pictures of another style are stale
OVERVIEW = 3  # likewise, of the overview alone
WIDE = 6.0  # of speedups on its axis
FORMATS = ("svg", "png")
FLOPS_PER_CLOCK = 4096  # of one multiprocessor's tensor cores, in 16 bits; twice as many in float8
COLOURS = {"tkq": "#0b6e4f", "QuACK": "#d1495b", "FA4": "#d1495b", "cuDNN": "#edae49", "cuBLAS": "#edae49",
           "torch": "#8d6a9f", "torch.compile": "#00798c", "Liger": "#8f5d2e"}
COLOURS |= {"QuACK tuned": "#8c1c2f", "FA4, deterministic": "#d1495b", "torch.compile autotuned": "#005f6b",
            "Liger CuTe": "#c98a4b", "DeepGEMM": "#4059ad", "FA3": "#97a97c"}
OWN_COLOUR = "#7fb8a4"  # tkq's in another form
OTHERS = ("#5f7470", "#a37b73", "#4059ad", "#97a97c")
WIDTH, HEIGHT, ACROSS = 4.6, 3.2, 3  # of a panel in inches; panels side by side
LEGEND_LINE = 0.2  # inches


@dataclass(frozen=True)
class Line:
    """One candidate: its rate at each size, None where it was not timed, and the quartiles."""

    name: str
    rates: tuple[float | None, ...]
    low: tuple[float | None, ...]
    high: tuple[float | None, ...]


@dataclass(frozen=True)
class Panel:
    """Rates over sizes of one kind of problem. roofs: by what they are, at each size."""

    title: str
    unit: str
    sizes: tuple[str, ...]
    lines: tuple[Line, ...]
    roofs: Mapping[str, tuple[float | None, ...]]


# ---- what is to be drawn -----------------------------------------------------------------------------------------


def panels(report: Report, section: str) -> list[Panel]:
    """A panel for each operation and kind of problem in a section; one for each operation where sizes do not vary."""
    found: list[Panel] = []
    cases = [case for case in report.cases if case.section == section]
    for op in dict.fromkeys(case.op for case in cases):
        kinds: dict[tuple[str, str], list[Case]] = {}
        for case in (case for case in cases if case.op == op):
            kinds.setdefault((kind_of(case.shape), case.unit), []).append(case)
        if all(len(group) == 1 for group in kinds.values()):
            kinds = {("", unit): [case for (_, u), (case,) in kinds.items() if u == unit] for _, unit in kinds}
        name = ops.shown(op, section)
        found += [_panel(report, f"{name} {kind}".strip(), group, bool(kind)) for (kind, _), group in kinds.items()]
    return found


def _panel(report: Report, title: str, cases: list[Case], kinds: bool) -> Panel:
    names = list(dict.fromkeys(t.name for case in cases for t in case.comparison.timings if t.ok))
    lines = tuple(_line(name, cases) for name in names if name not in ops.ROOFS)
    roofs = {f"{name} of the same bytes": _line(name, cases).rates for name in names if name in ops.ROOFS}
    if cases[0].unit == "GB/s" and report.copy_gbs:
        roofs["device copy"] = (report.copy_gbs,) * len(cases)
    elif cases[0].unit == "TFLOP/s" and any(peaks := tuple(tensor_peak(report, case) for case in cases)):
        roofs["tensor-core peak at the measured clock"] = peaks
    sizes = tuple((_words(case.shape, False) if kinds else case.shape) or case.shape for case in cases)
    return Panel(title, cases[0].unit, sizes, lines, roofs)


def _line(name: str, cases: Iterable[Case]) -> Line:
    found = []
    for case in cases:
        if not any(t.name == name and t.ok for t in case.comparison.timings):
            found.append((None,) * 3)
            continue
        timing, rate = case.timing(name), case.rate(name)
        found.append((rate, *(rate * timing.median_ms / ms for ms in reversed(timing.quartiles_ms))))
    return Line(name, *zip(*found))


def tensor_peak(report: Report, case: Case) -> float | None:
    """TFLOP/s of the tensor cores at the median clock of our turns; None where it was not read."""
    readings = case.readings.get(case.ours) or case.readings.get("") or ()
    clocks = [r.sm_mhz for r in readings if r.sm_mhz is not None]
    if not clocks or not report.environment.processors:
        return None
    flops = FLOPS_PER_CLOCK * (2 if ops.is_float8(case.op, case.unit) else 1)
    return report.environment.processors * flops * statistics.median(clocks) * 1e6 / 1e12


def digest(drawn) -> str:
    """What a picture's data and style come to."""
    return hashlib.sha256(json.dumps([STYLE, drawn], default=vars, sort_keys=True).encode()).hexdigest()[:16]


# ---- drawing -----------------------------------------------------------------------------------------------------


def figure(drawn: list[Panel]):
    """A matplotlib figure of these panels, three side by side."""
    from matplotlib.figure import Figure

    across = 2 if len(drawn) == 4 else min(ACROSS, len(drawn))
    down = -(-len(drawn) // across)
    names = {name for panel in drawn for name in (*(line.name for line in panel.lines), *panel.roofs)}
    columns = min(len(names), 2 if across == 1 else 3 * across)
    height = HEIGHT * down + LEGEND_LINE * -(-len(names) // columns)
    made = Figure(figsize=(WIDTH * across, height), layout="constrained")
    axes = made.subplots(down, across, squeeze=False).flatten()
    for ax, panel in zip(axes, drawn):
        _draw(ax, panel)
    for ax in axes[len(drawn):]:
        ax.set_axis_off()
    named = {name: line for ax in axes for line, name in zip(*ax.get_legend_handles_labels())}
    order = sorted(named, key=lambda name: name != "tkq")
    made.legend([named[name] for name in order], order, loc="outside lower center", fontsize=7.5, frameon=False,
                ncols=columns)
    return made


def _draw(ax, panel: Panel) -> None:
    places = range(len(panel.sizes))
    scale = _is_scale(panel.sizes)
    joined = "-" if scale else "none"
    spare, lines = iter(OTHERS * 3), [line.rates for line in panel.lines]
    for line in sorted(panel.lines, key=lambda line: line.name != "tkq"):
        ours = line.name == "tkq"
        colour = COLOURS.get(line.name) or (OWN_COLOUR if ops.is_own(line.name) else next(spare))
        nan = lambda values: [float("nan") if v is None else v for v in values]
        own = ops.is_own(line.name) and not line.name.startswith("tkq")
        label = {"example": "the docs' example"}.get(line.name, f"tkq, {line.name}" if own else line.name)
        ax.plot(places, nan(line.rates), label=label, color=colour, marker="o", markersize=3.5 + ours,
                linestyle=joined, linewidth=1.4 + 0.8 * ours, zorder=3 + ours)
        if scale:
            ax.fill_between(places, nan(line.low), nan(line.high), color=colour, alpha=0.18, linewidth=0)
    for (name, rates), style in zip(panel.roofs.items(), ("--", ":", "-.", "--")):
        shown = dict(linestyle=style) if scale else dict(linestyle="none", marker="_", markersize=16)
        ax.plot(places, [float("nan") if v is None else v for v in rates], label=name, color="#777777", linewidth=1.1,
                **shown)
    ax.set_title(panel.title, fontsize=9)
    ax.set_ylabel(panel.unit, fontsize=8)
    ax.set_xticks(list(places), panel.sizes, rotation=30, ha="right", fontsize=7)
    ax.tick_params(axis="y", labelsize=7)
    known = [rate for line in (*lines, *panel.roofs.values()) for rate in line if rate is not None]
    ax.set_ylim(0, 1.06 * max(known, default=1.0))  # without any: everyone failed
    ax.grid(axis="y", color="#dddddd", linewidth=0.6)
    ax.spines[["top", "right"]].set_visible(False)


def _is_scale(sizes: Iterable[str]) -> bool:
    """Do the sizes differ by their numbers alone? Otherwise no line leads from one to the next."""
    return len({re.sub(r"\d+", "0", size) for size in sizes}) == 1


def overview(reports: Mapping[str, Report]) -> dict[str, list[float]]:
    """For each operation the speedup over the fastest baseline at each shape."""
    found = {name: summary.strongest(case for _, case in pairs) for name, pairs in summary.grouped(reports).items()}
    return {name: ratios for name, ratios in found.items() if ratios}


def overview_figure(found: Mapping[str, list[float]]):
    """A row for each operation: a dot at each shape's speedup, and a line at the geomean."""
    from matplotlib.figure import Figure

    made = Figure(figsize=(8.2, 0.27 * len(found) + 1.0), layout="constrained")
    ax = made.subplots()
    names = list(found)
    for row, name in enumerate(names):
        ax.plot(found[name], [row] * len(found[name]), "o", color=COLOURS["tkq"], alpha=0.45, markersize=5,
                markeredgewidth=0, label="one shape" if row == 0 else None)
        ax.plot([geometric_mean(found[name])], [row], "|", color="black", markersize=13, markeredgewidth=1.8,
                label="geomean" if row == 0 else None)
    ax.axvline(1.0, color="#777777", linewidth=1.0)
    ax.set_xscale("log")
    least, most = 0.97 * min(map(min, found.values())), 1.1 * max(map(max, found.values()))
    near = (0.9, 1.1, 1.25) if most < WIDE else ()  # where there is room for their labels
    ticks = [t for t in sorted((0.5, 0.7, 0.8, 1.0, 1.5, 2.0, 3.0, 5.0, 10.0, 20.0, 50.0, *near))
             if least <= t <= most]
    ax.set_xticks(ticks, [f"{t:g}" for t in ticks], fontsize=8)
    ax.minorticks_off()
    ax.set_yticks(range(len(names)), names, fontsize=8)
    ax.set_ylim(len(names) - 0.3, -0.7)
    ax.set_xlabel("speedup over the fastest baseline (above 1, tkq is faster)", fontsize=8)
    ax.grid(axis="x", color="#e5e5e5", linewidth=0.6)
    ax.spines[["top", "right"]].set_visible(False)
    ax.legend(fontsize=7, frameon=False, loc="upper right")
    return made


def save(made, path: Path, described: str) -> None:
    """Write a figure as PATH, by its ending, with the digest in it."""
    import matplotlib

    path.parent.mkdir(parents=True, exist_ok=True)
    svg = path.suffix == ".svg"
    about = {"Date": None, "Creator": None, "Description": described} if svg else {
        "Software": None, "Description": described}
    with matplotlib.rc_context({"svg.hashsalt": "tkq", "svg.fonttype": "none", "path.simplify": False}):
        made.savefig(path, metadata=about, dpi=110)


def drawings(reports: Mapping[str, Report]) -> Iterator[tuple[str, object, str]]:
    """(name, what draws it, digest) of every picture of these results. reports: by the file's name."""
    for file, report in reports.items():
        for section in dict.fromkeys(case.section for case in report.cases):
            drawn = [panel for panel in panels(report, section) if len(panel.sizes) > 1]
            if drawn:
                yield f"{file}_{section}", lambda drawn=drawn: figure(drawn), digest(drawn)


def drawn_overview(found: Mapping[str, list[float]]) -> list[tuple[str, object, str]]:
    """The same of an overview, where it has a row."""
    return [("overview", lambda: overview_figure(found), digest([OVERVIEW, found]))] if found else []


def write(reports: Mapping[str, Report], folder: Path, formats: Iterable[str] = FORMATS) -> list[Path]:
    """Every picture of these results, an overview with a row for each operation among them, in every format, into a
    folder; the files."""
    written = []
    for name, draw, described in (*drawings(reports), *drawn_overview(overview(reports))):
        made = draw()
        for ending in formats:
            save(made, folder / f"{name}.{ending}", described)
            written.append(folder / f"{name}.{ending}")
    return written
