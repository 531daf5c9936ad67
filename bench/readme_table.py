"""What is made from measured results alone: the README's speed section, docs/speed.md with its pictures, results.md,
and what the docs' own kernels reach.

    python -m bench.readme_table            print the section
    python -m bench.readme_table --write    put it between the markers in README.md, and write the others
"""

from __future__ import annotations

import argparse
import contextlib
import io
import json
import sys
from collections.abc import Mapping
from pathlib import Path

from bench import bounds, chapters, features, llama_page, plots, row_peers, summary, tables
from bench.results import Report, reports_in

ROOT = Path(__file__).resolve().parent.parent
RESULTS = ROOT / "bench" / "results" / "h100"
README = ROOT / "README.md"
PAGE = ROOT / "docs" / "speed.md"
PLOTS = ROOT / "docs" / "plots"
OWN_KERNELS = ROOT / "docs" / "write_your_own" / "index.md"
BEGIN, END = "<!-- {}: begin (python -m bench.readme_table --write) -->", "<!-- {}: end -->"
TWICE = ("foundation",)  # its cases are other files' too: a table on the page, no picture, not in the summary

SECTION = """Times as fast as the fastest peer, a dot for each shape, measured on one {device}{each}
with {versions}:

![Every operation beside the fastest peer at each shape](docs/plots/overview.svg)

{table}

A row is an operation at all shapes timed, in bf16 unless its name says otherwise. At each shape the ratio is the median
over interleaved rounds of the fastest peer's time over ours: above 1, tkq is faster. Beside: the peers, and of those
that were not timed at every shape, at how many and why not ("has none": the library has no such operation, or not at
such shapes). Mean: geometric. Of a copy: beside a kernel that only moves the bytes, in the mean of so many shapes. Day:
of the run. {said}{seconds}"""
HEAD = """# Speed

Made by `python -m bench.readme_table --write` from `bench/results/h100`. `results.md` there has every candidate with
its spread, launches, CPU time, error, clock and power; [how it is measured](measuring.md) says how.

- Measured on {known}, where a table does not say otherwise; other runs may be of another GPU of that kind.
  Each has the day of its run. {said}
- {ratio} The peer shown is the fastest of those timed.{bursts}
- {between}
- A roof is what only moves the bytes: `copy` one read and one write, `add` two reads and one write. GB/s count the
  bytes that an operation has to move: of (M, N) tensors two in a norm's or softmax's forward (four with a residual),
  one in a cross entropy's, three in a norm's or softmax's backward, two in a cross entropy's.
- `plain` is tkq's own operation without what is fused into it; `32/32`, `all keys`, `as usual` and `tkq apart` are its
  own too.
- In the pictures a band is what lies between the quartiles, and the tensor cores' roof is their peak at the SM clock
  that was read while tkq ran.
- What a call costs depends on the host: compare it with `x + x` of the same run."""


def reports(folder: Path = RESULTS) -> dict[str, Report]:
    """Every file of results, by its name, with the roofs that the benches have now."""
    return row_peers.with_roofs(reports_in(folder))


def drawn(found: Mapping[str, Report]) -> dict[str, Report]:
    """Those that have pictures and are in the summary."""
    return {name: report for name, report in found.items() if name not in TWICE}


def section(folder: Path = RESULTS) -> str:
    """The section's text in Markdown, "Not measured yet." where there are no results."""
    found = drawn(reports(folder))
    if not summary.grouped(found):
        return "Not measured yet."
    newest = max((report.environment for report in found.values()), key=lambda e: e.date)
    versions = ", ".join(f"{name} {version}" for name, version in newest.versions.items() if version)
    seconds = summary.sustained(found)
    return SECTION.format(device=newest.device, versions=versions, table=summary.summary(found),
                          each="" if summary.are_of_one_run(found) else ", in each run",
                          seconds=f"\n\n{seconds}" if seconds else "",
                          said=" ".join(filter(None, (summary.of_which_run(found), summary.of_short(found),
                                                      summary.beside_nothing(found),
                                                      summary.at_full_clock(found)))))


def page(folder: Path = RESULTS) -> str:
    """docs/speed.md: every results file, those that are in other files too last."""
    found = reports(folder)
    pictures = [name for name, _, _ in plots.drawings(drawn(found))]
    known = tables.most_common_setting(found.values())
    paths = sorted(folder.glob("*.json"), key=lambda path: (path.stem in TWICE, path.stem))
    runs = [f"## {path.stem.replace('_', ' ')}\n\n{_of_file(path, pictures, found, known)}" for path in paths]
    bursts = summary.at_full_clock(found)
    if bursts and summary.sustained(found):
        bursts += " What works for seconds meets the power limit: [gemm sustained](#gemm-sustained)."
    head = HEAD.format(said=summary.timings_of_which_run(found), bursts=f"\n- {bursts}" if bursts else "", known=known,
                       ratio=tables.RATIO, between=tables.BETWEEN)
    return "\n\n".join((head, _missed(found), *runs)) + "\n"


def _missed(found: Mapping[str, Report]) -> str:
    """What the benches ask for and results do not have."""
    with contextlib.redirect_stdout(io.StringIO()):  # of means it says more than what is missed
        missed, undecided = bounds.missed(found), bounds.undecided(found)
    left = f" {undecided} are not decided, as a peer was not timed." if undecided else ""
    if not missed:
        return f"## Bounds\n\nEach shape's bound, which `python -m tkq bench` judges by, holds.{left}"
    return "\n".join((f"## Bounds\n\nOf the bounds that `python -m tkq bench` judges by, these are missed.{left}\n",
                      *(f"- {each}" for each in missed)))


def _of_file(path: Path, pictures: list[str], found: Mapping[str, Report], known: str) -> str:
    if path.stem in found:
        report = found[path.stem]
        names = [f"{path.stem}_{section}" for section in dict.fromkeys(case.section for case in report.cases)]
        shown = [f"![{name.replace('_', ' ')}](plots/{name}.svg)" for name in names if name in pictures]
        head = tables.heading(report, known)
        table = f"{head}\n\n{chapters.table(report)}" if path.stem == "chapters" else tables.short(report, head)
        return "\n\n".join([table, *shown])
    of = {"sums": _sums, "memory": _memory, "profile": _profile, "learning": _learning}
    read = json.loads(path.read_text())
    run = read.pop("run", {})
    day = run.get("date") or max(read.get("made", {}).values(), default="")
    begin = f"Measured {day[:10]}. " if day else "The file does not say of which run it is. "
    return begin + of[path.stem.rpartition("_")[2]](read)


def _memory(found: dict[str, dict[str, int]]) -> str:
    """bench.linear_cross_entropy's second file: bytes by shape and candidate."""
    names = list(dict.fromkeys(name for taken in found.values() for name in taken))
    rows = ((shape, *(f"{taken[name] / 2**20:.0f} MB" if name in taken else "" for name in names),
             f"{taken['tkq'] / taken['torch']:.3f}" if "torch" in taken else "") for shape, taken in found.items())
    return "The most in use above inputs and gradients.\n\n" + tables.table(("shape", *names, "tkq of torch"), rows)


def _sums(found: dict) -> str:
    """bench.fp8_sums's file: what sums lose."""
    ways = dict.fromkeys(x["way"] for x in found["errors"])
    rows: dict[tuple, dict] = {}
    for x in found["errors"]:
        rows.setdefault((x["operands"], str(x["K"])), {})[x["way"]] = (
            f"{x['mean_signed']:+.1e}" if "mean_signed" in x else "not there")
    head = (f"{found['type']} on one {found['device']}, results in float32: the mean signed error as a share of the "
            "mean absolute result; below 0, results are too near to zero. Operands between 0 and 1, or normal.")
    return f"{head}\n\n" + tables.table(("operands", "K", *ways), ((*row, *(said[way] for way in ways))
                                                                   for row, said in rows.items()))


def _profile(found: dict) -> str:
    """bench.llama's second file: of a profile of one step, what kernels are for."""
    kinds = next(iter(found.values()))["ms"]
    rows = [(kind, *(f"{each['ms'][kind]:.1f}" for each in found.values())) for kind in kinds]
    rows.append(("all (launches)", *(f"{each['all']:.1f} ({each['launches']})" for each in found.values())))
    return "Milliseconds of kernels in one step.\n\n" + tables.table(("kernels", *found), rows)


def _learning(found: dict) -> str:
    """bench.llama's third file: losses."""
    rows = ((name, *(f"{x[i]:.3f}" for i in (0, len(x) // 2, -1)), f"{100 * found['apart'][name]:.3f} %")
            for name, x in found["losses"].items())
    head = f"From the same weights; at most {100 * found['at_most']:.1f} % from the first one, in means of ten steps."
    table = tables.table(("model", "loss", "half way", "at the end", "apart"), rows)
    return f"{head}\n\n{table}{llama_page.earlier(found)}"


def own_kernels(folder: Path = RESULTS) -> str:
    """What the kernels that the docs write reach, for docs/write_your_own."""
    report = reports(folder).get("chapters")
    if report is None or not report.cases:
        return "Not measured yet."
    e = report.environment
    return (f"Measured {e.date[:10]} on one {e.device}, with a cold L2, in turns; a speed beside another is the median "
            f"over the rounds (`python -m bench.chapters`):\n\n{chapters.table(report)}")


def sections() -> dict[Path, dict[str, str]]:
    """What stands between the markers of pages that are written by hand."""
    return {README: {"features": features.section(), "speed": section()}, OWN_KERNELS: {"chapters": own_kernels()}}


def replace_section(page: str, text: str, name: str = "speed") -> str:
    """A page's text with the section between the markers of this name replaced."""
    begin, end = BEGIN.format(name), END.format(name)
    before, found_begin, rest = page.partition(begin)
    _, found_end, after = rest.partition(end)
    if not found_begin or not found_end:
        raise ValueError(f"the page lacks the markers {begin!r} and {end!r}")
    return f"{before}{begin}\n{text}\n{end}{after}"


# ---- pictures ----------------------------------------------------------------------------------------------------


def stale(folder: Path = RESULTS, pictures: Path = PLOTS) -> list[str]:
    """Pictures that are not of these results, or not there, or too many; needs no matplotlib."""
    wanted = {f"{name}.svg": described for name, _, described in plots.drawings(drawn(reports(folder)))}
    there = {path.name: path.read_text() for path in pictures.glob("*.svg")}
    wrong = [name for name, described in wanted.items() if f">{described}<" not in there.get(name, "")]
    return sorted({*wrong, *(name for name in there if name not in wanted)})


def draw(folder: Path = RESULTS, pictures: Path = PLOTS) -> None:
    """Draw those that are stale, and remove those that nothing belongs to."""
    names = stale(folder, pictures)
    found = {f"{name}.svg": (make, described) for name, make, described in plots.drawings(drawn(reports(folder)))}
    for name in names:
        if name in found:
            make, described = found[name]
            plots.save(make(), pictures / name, described)
        else:
            (pictures / name).unlink()


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m bench.readme_table", description=__doc__.split("\n")[0])
    parser.add_argument("--write", action="store_true",
                        help="rewrite the pages' sections, docs/speed.md, docs/plots and results.md")
    if parser.parse_args(argv).write:
        for path, found in sections().items():
            for name, text in found.items():
                path.write_text(replace_section(path.read_text(), text, name))
        llama_page.main(["--write"])
        PAGE.write_text(page())
        (RESULTS / "results.md").write_text(summary.document(reports()))
        try:
            draw()
        except ImportError as problem:
            print(f"the pictures {', '.join(stale())} are of other results: {problem}; pip install matplotlib")
            return 1
    else:
        print(section())
    return 0


if __name__ == "__main__":
    sys.exit(main())
