"""The README says what is so: its numbers come from results, and its code runs. tests/cpu/docs/test_docs.py has its
links, and its excerpts of examples."""

import dataclasses
import inspect
import json
import re
import runpy
from pathlib import Path

import pytest
import torch

import tkq
from bench.core import ops
from bench.core.results import Bound, Case, Cost, Environment, Report
from bench.report import overview, readme_table, summary, tables
from tests.helpers.process.markdown import is_excerpt
from tkq.testing.timing import Comparison, Timing

ROOT = Path(__file__).resolve().parents[3]
README = (ROOT / "README.md").read_text()
BLOCKS = re.findall(r"```python\n(.*?)```", README, re.DOTALL)


def test_is_excerpt_tells_a_copy_from_an_edit():
    source = "a = 1\nb = 2\n\ndef f():\n    return a\n"
    assert is_excerpt("b = 2\n\ndef f():\n", source)
    assert is_excerpt("a = 1\n...\n    return a\n", source)
    assert not is_excerpt("a = 1\n    return a\n", source)  # lines left out without saying so
    assert not is_excerpt("    return a\n...\na = 1\n", source)  # another order
    assert not is_excerpt("b = 3\n", source)
    assert not is_excerpt("\n", source)


def test_the_ten_lines_of_use_run(tmp_path):
    use = BLOCKS[0]
    assert len(use.strip().splitlines()) <= 12
    small = use.replace('"cuda"', '"cpu"').replace("4096", "32").replace("8192", "64")
    (tmp_path / "use.py").write_text(small)
    names = runpy.run_path(str(tmp_path / "use.py"))
    assert names["c"].shape == (4 * 32, 64)
    assert torch.isfinite(names["c"]).all()


def test_the_table_of_operations_has_them_all():
    head, _, rest = README.partition("| operation | inputs | features |")
    rows = re.findall(r"^\| ((?:`\w+`(?:, )?)+) \|", rest.partition("\n\n")[0], re.MULTILINE)
    names = [name for row in rows for name in re.findall(r"`(\w+)`", row)]
    assert head and sorted(names) == sorted(name for name in tkq.__all__ if inspect.isfunction(getattr(tkq, name)))


def test_what_deterministic_gradients_cost_is_what_the_results_say():
    """The docstring's figures: within 0.01 of the runs'."""
    ordered, grouped, wide, shared = (
        json.loads((ROOT / f"bench/results/h200/tuning/attention_backward_{name}.json").read_text())["times"]
        for name in ("ordered", "ordered_gqa", "wide_in_order", "wide_in_order_shared"))
    in_order = [x["plan"] / x["ordered"] for shape, x in (ordered | grouped).items() if "D256" not in shape]
    in_order_wide = [x["plan"] / x["32 MB"] for shape, x in wide.items() if "/" not in shape]
    apart = [x["plan"] / x["own kernel"] for shape, x in wide.items() if "/" in shape]
    apart += [x["any order"] / x["plan"] for shape, x in shared.items() if re.search("16/4|32/8", shape)]
    text = " ".join(inspect.getdoc(tkq.flash_attn).split())
    said = re.search(r"has (\S+) to (\S+) of its usual speed at D 64 and 128, shared K/V heads included; at D 256 to "
                     r"S 16384 (\S+) to (\S+), and (\S+) to (\S+) with shared K/V heads", text).groups()
    assert len(in_order) == 20 and len(in_order_wide) == 10 and len(apart) == 12
    found = [f(ratios) for ratios in (in_order, in_order_wide, apart) for f in (min, max)]
    assert [float(x) for x in said] == pytest.approx(found, abs=0.01)


def test_what_float8_sums_lose_is_what_the_results_say():
    """The docstring's figures, at K = 16384: within a tenth of the run's."""
    errors = json.loads((readme_table.RESULTS / "fp8_sums.json").read_text())["errors"]
    of = {(x["operands"], x["way"]): x.get("mean_signed") for x in errors if x["K"] == 16384}
    text = " ".join(inspect.getdoc(tkq.fp8_gemm).split())
    said = re.search(r"\"fast\" (\S+) for normal a and b, (\S+) where all products are positive; \"fp32\" (\S+) and "
                     r"(\S+); torch's were the same", text).groups()
    ways = [(operands, way) for way in ("fast", "fp32") for operands in ("normal", "positive")]
    for (operands, way), number in zip(ways, map(float, said)):
        assert of[operands, f'tkq, "{way}"'] == pytest.approx(number, rel=0.1)
        theirs = of[operands, "torch, fast" if way == "fast" else "torch, not fast"]
        assert theirs == pytest.approx(number, rel=0.1)


def test_sections_between_markers_are_what_the_results_say():
    for path, found in readme_table.sections().items():
        page = path.read_text()
        for name, text in found.items():
            assert readme_table.replace_section(page, text, name) == page, (path.name, name)


def test_the_page_on_speed_is_what_the_results_say():
    assert readme_table.PAGE.read_text() == readme_table.page()


def test_the_table_of_all_that_was_measured_is_what_the_results_say():
    for folder in (readme_table.RESULTS, readme_table.OTHER):
        assert (folder / "results.md").read_text() == summary.document(readme_table.reports(folder)), folder


def test_the_pictures_are_of_the_results():
    assert readme_table.stale() == []
    shown = re.findall(r"!\[.*?\]\((plots/.*?)\)", readme_table.PAGE.read_text())
    assert shown and all((readme_table.PAGE.parent / path).exists() for path in shown)


# ---- the script that writes the section --------------------------------------------------------------------------


def report():
    def case(op, times, bound=None, **peers):
        timings = [Timing("tkq", "graph" if times else "failed", tuple(times))]
        timings += [Timing(name, "graph", tuple(t)) for name, t in peers.items()]
        return Case("s", op, "M1 N2", "GB/s", 3e9, Comparison(tuple(timings), 2, 1, 1), bound=bound)

    cases = [
        case("rmsnorm", [1.0] * 7, Bound(("QuACK",), 0.99), QuACK=[1.25] * 7, copy=[0.5] * 7, compiled=[1.2] * 7),
        case("layernorm", [], QuACK=[1.0] * 7),
        case("gemm", [2.0] * 7),
    ]
    costs = [Cost("eager call", 9.25, 9, 10, 31, 12.0), Cost("first call", 31400.0, 3e4, 4e4, 3, 5e4, "no cutlass")]
    return Report(
        Environment("H100", "580", "13.0", "9", "3.12", "2026-11-21T10:00:00+00:00", "x", {"torch": "2.13"}),
        cases,
        costs,
    )


def test_a_table_shows_the_fastest_rival_and_not_the_roof():
    text = tables.short(report())
    assert "| `rmsnorm` | M1 N2 | 3000 GB/s | compiled 2500 GB/s | 1.200 |" in text
    assert "| `layernorm` | M1 N2 | failed | none |  |" in text
    assert "| `gemm` | M1 N2 | 1500 GB/s | none |  |" in text
    assert "| eager call | 9.2 us |" in text
    assert "| first call | 31.4 ms (no cutlass) |" in text
    assert "Baselines: QuACK, compiled (`rmsnorm`)." in text
    where = "one H100 (driver 580, CUDA 13.0, cuDNN 9; torch 2.13)"
    assert tables.setting(report()) == tables.most_common_setting([report()]) == where
    assert tables.heading(report(), where) == "Measured 2026-11-21." and where in tables.heading(report(), "another")
    assert "not timed" not in text
    assert "Not run" not in text
    assert "Measured 2026-11-21 on one H100 (driver 580, CUDA 13.0, cuDNN 9; torch 2.13)" in text


@pytest.mark.parametrize("name, wanted", [
    ("CPU per eager call: fp8_gemm 1x128_1x128 tkq", "CPU per eager call: fp8_gemm, scales 1x128 on both, tkq"),
    ("CPU per eager call: quantize_fp8 128x128", "CPU per eager call: quantize_fp8, scales 128x128"),
    ("CPU per eager call: quantize_fp8 row transpose 1024x1024",
     "CPU per eager call: quantize_fp8, scales per row, transpose, 1024x1024"),
    ("CPU per eager call: grouped_gemm bf16 tkq", "CPU per eager call: grouped_gemm bf16 tkq"),
    ("CPU per eager call: x + x", "CPU per eager call: x + x"), ("first call", "first call")])
def test_costs_have_the_words_of_pages(name, wanted):
    assert ops.shown_cost(name) == wanted
    assert f"| {wanted} | 9.2 us |" in tables.short(Report(report().environment, costs=[Cost(name, 9.25, 9, 10, 31)]))


@pytest.mark.parametrize("bench, section, wanted", [
    ("fp8_gemm", "1x128_1x128", "fp8_gemm, scales 1x128 on both"),
    ("quantize", "128x128", "quantize_fp8, scales 128x128"),
    ("grouped_gemm", "gradient_1x128", "grouped_gemm, K-grouped, scales 1x128 on both"),
    ("attention_forward", "dense", "attention forward dense"), ("fp8_gemm", "few", "fp8 gemm few")])
def test_pictures_have_the_words_of_pages(bench, section, wanted):
    assert ops.shown_picture(bench, section) == wanted


def test_calls_are_shown_beside_x_plus_x_and_a_busy_host_is_named():
    of = lambda least: [Cost("CPU per eager call: x + x", 8.0, least, 14.0, 31),
                        Cost("CPU per eager call: gemm", 6.0, 6, 9, 31), Cost("first call", 9.0, 9, 9, 3)]
    quiet, loud = tables.costs(of(7.5)), tables.costs(of(6.5))
    assert "| cost | median | vs. `x + x` |" in quiet and "| CPU per eager call: gemm | 6.0 us | 0.75 |" in quiet
    assert "| first call | 9.0 us |  |" in quiet and "busy" not in quiet
    assert "The host was busy: `x + x` took 6.5 to 14.0 us, median 8.0 us." in loud
    dated = [dataclasses.replace(cost, date=f"2026-11-2{i}T10:00:00+00:00") for i, cost in enumerate(of(7.5))]
    assert tables.costs(dated) == f"{quiet}\n\nCosts measured 2026-11-20 to 2026-11-22."
    assert "Costs measured" not in quiet
    assert tables.costs(dated, "2026-11-20 to 2026-11-22") == quiet


def test_a_table_says_what_was_not_timed():
    partial = report()
    first = partial.cases[0]
    partial.cases[0] = dataclasses.replace(first, bound=Bound(("QuACK", "FA4"), 1.0))
    partial.problems.append("gemm 4096^3 a @ b: not run, the time is up")
    text = tables.short(partial)
    assert "| compiled 2500 GB/s (FA4 not timed) | 1.200 |" in text
    assert text.endswith("Not run: gemm 4096^3 a @ b.")


def test_a_table_says_what_was_timed_in_bursts():
    made = report()
    burst = dataclasses.replace(made.cases[0], idle_seconds=0.1, round_seconds=0.02)
    plain = dataclasses.replace(burst, section="few", idle_seconds=0.0)
    said = "Turns in bursts of 20 ms after 100 ms idle: s"
    for text in (tables.short, tables.whole):
        assert f"{said}; without idle time: few." in text(dataclasses.replace(made, cases=[burst, plain]))
        mixed = text(dataclasses.replace(made, cases=[burst, *made.cases]))
        assert f"{said}, in part; with unrecorded idle time: s, in part." in mixed
        assert "bursts" not in text(dataclasses.replace(made, cases=[plain, *made.cases]))


def test_pages_say_which_rows_are_bursts_and_what_seconds_give():
    made = report()
    case = dataclasses.replace(made.cases[0], section="large", op="gemm", idle_seconds=0.1, round_seconds=0.02)
    of = lambda *cases: {"gemm": dataclasses.replace(made, cases=list(cases))}
    said = "Timed in bursts of 20 ms after 100 ms idle, at full clock: `gemm`"
    assert summary.at_full_clock(of(case)) == f"{said}."
    assert summary.at_full_clock(of(case, dataclasses.replace(case, idle_seconds=None))) == f"{said}, in part."
    assert summary.at_full_clock(of(dataclasses.replace(case, idle_seconds=None))) == ""
    times = {"tkq": (1.0, 2.0, 4.0), "QuACK": (3.0, 1.0, 1.0)}
    long = dataclasses.replace(case, section="sustained", op="gemm bf16", shape="8192^3 sustained", round_seconds=1.0,
                               comparison=Comparison(tuple(Timing(n, "graph", t) for n, t in times.items()), 1, 1, 1))
    assert long.ratios() == {"QuACK": 0.5}  # of medians: turns are no rounds
    sustained = {**of(case), "gemm_sustained": dataclasses.replace(made, cases=[long])}
    assert summary.at_full_clock(sustained) == f"{said}." and summary.sustained(of(case)) == ""
    text = summary.sustained(sustained)
    assert text.startswith("Sustained: each large GEMM runs for 2 s by itself ")
    rate = f"{long.rate('tkq'):.0f} {long.unit}"
    assert text.splitlines()[-1].startswith(f"| `gemm`, bf16 | QuACK | 1 | 0.500 | 0.500 | 0.500 | {rate} |")
    unknown = {"gemm_sustained": dataclasses.replace(made, cases=[dataclasses.replace(long, round_seconds=None)])}
    assert summary.sustained(unknown).startswith("Sustained: each large GEMM runs for seconds by itself ")
    faster = {"tkq": (1.0,), "QuACK": (3.0,), "torch": (1.5,)}
    more = dataclasses.replace(long, shape="4096^3 sustained", comparison=Comparison(
        tuple(Timing(n, "graph", t) for n, t in faster.items()), 1, 1, 1))
    sustained["gemm_sustained"] = dataclasses.replace(made, cases=[long, more])
    text = summary.sustained(sustained)
    assert "| `gemm`, bf16 | QuACK, torch | 2 | 0.866 | 0.500 | 1.500 | " in text and "No sustained" not in text
    without = [dataclasses.replace(each, missing={"QuACK": "failed here alone", "QuACK tuned": "left out (--without)"})
               for each in (long, more)]
    sustained["gemm_sustained"] = dataclasses.replace(made, cases=without)
    assert summary.sustained(sustained).endswith("\n\nNo sustained run: QuACK tuned for `gemm`, bf16.")


def test_cases_of_joined_files_keep_their_date():
    made = report()
    old, new = (dataclasses.replace(made.cases[0], section=s, date=f"2026-11-2{d}T10:00:00+00:00")
                for s, d in (("forward", 0), ("residual", 3)))
    found = {"norms": dataclasses.replace(made, cases=[old, new])}
    assert tables.heading(found["norms"]).startswith("Measured 2026-11-20 to 2026-11-23 on")
    assert summary.timings_of_which_run({**found, "gemm": found["norms"], "softmax": dataclasses.replace(
        made, cases=[new])}) == "The timings come from several runs, from 2026-11-20 to 2026-11-23."
    assert summary.timings_of_which_run({**found, "softmax": dataclasses.replace(made, cases=[new])}) == (
        "From an earlier run than the other timings: norms, in part.")
    assert summary.of_which_run(found) == "From an earlier run than the other rows: `rmsnorm`."


def test_the_same_shape_in_two_sections_has_their_names():
    first, *others = report().cases
    both = dataclasses.replace(report(), cases=[first, dataclasses.replace(first, section="backward"), *others])
    for text in (tables.short(both), tables.whole(both)):
        assert f"| `rmsnorm`, {first.section} | M1 N2 |" in text and "| `rmsnorm`, backward | M1 N2 |" in text
        assert "| `gemm` | M1 N2 |" in text


def test_the_section_has_a_row_for_each_operation(tmp_path):
    assert readme_table.section(tmp_path) == "Not measured yet."
    cases = [dataclasses.replace(case, section="forward") for case in report().cases]
    more = dataclasses.replace(cases[0], shape="M3 N4", roof=Bound(("copy",), 0.9))
    dataclasses.replace(report(), cases=[*cases, more]).save(tmp_path / "norms.json")
    report().save(tmp_path / "foundation.json")  # its cases are other files' too
    text, family, ratios = readme_table.card("H100", tmp_path), readme_table.section(tmp_path), "1.20 | 1.20 | 1.20"
    assert ("| `rmsnorm` | QuACK, compiled; not run: torch.compile, Liger, Liger CuTe | 2 | "
            f"{ratios} | 0.50 (1 of 2) | 2026-11-21 |") in text
    assert f"| `rmsnorm`, `layernorm`, float8 outputs | QuACK, compiled | 2 | {ratios} | 0.50 (1 of 3) |" in family
    assert text.count("| `") == family.count("| `") == 1  # beside the others' cases nothing was timed
    assert "Compared only with other forms of tkq itself, and so not in the table: `layernorm`." in text


def test_the_readmes_table_has_every_row_of_the_summary_once():
    titles = [title for row in overview.ROWS.values() for title in row]
    assert len(overview.ROWS) <= 25 and len(titles) == len(set(titles))
    for folder in (readme_table.RESULTS, readme_table.OTHER):
        found = summary.grouped(readme_table.drawn(readme_table.reports(folder)))
        assert {name for name, cases in found.items() if summary.strongest(case for _, case in cases)} <= set(titles)


def test_what_is_older_and_what_was_not_timed_follow_from_the_files(tmp_path):
    case, *_ = report().cases
    of = lambda section, time, **more: dataclasses.replace(
        report(), environment=dataclasses.replace(report().environment, date=f"2026-11-21T{time}:00+00:00"),
        cases=[dataclasses.replace(case, section=section, **more)])
    norms = of("forward", "10:00", bound=Bound(("QuACK", "FA4", "copy"), 1.0))
    found = {"norms": norms, "gemm": of("large", "10:50", op="gemm", shape="1x2x3"),
             "softmax": of("forward", "10:20", op="softmax")}
    assert summary.are_of_one_run(found)
    assert summary.of_which_run(found) == "All rows come from one run."
    assert summary.timings_of_which_run(found) == "All timings come from one run."
    of("sustained", "08:00", op="gemm bf16", shape="8192^3 sustained").save(tmp_path / "gemm_sustained.json")
    assert not summary.are_of_one_run({**found, **readme_table.reports(tmp_path)})  # the second table is of another
    (tmp_path / "gemm_sustained.json").unlink()
    assert "| `rmsnorm` | QuACK, compiled; not run: FA4, torch.compile, " in summary.summary(found)  # of its bound
    found["gemm"] = of("few", "11:10", op="gemm", shape="1x2x3")
    assert summary.of_which_run(found) == "From an earlier run than the other rows: `rmsnorm`."
    assert summary.timings_of_which_run(found) == "From an earlier run than the other timings: norms."
    found["gemm"] = of("few", "12:10", op="gemm", shape="1x2x3")
    said = "The rows come from several runs, on 2026-11-21."
    assert summary.of_which_run(found) == said
    for name, each in found.items():
        each.save(tmp_path / f"{name}.json")
    section = readme_table.section(tmp_path)
    assert summary.of_which_run(found) in section
    assert ", in each run\nwith " in section
    page = readme_table.page(tmp_path)
    assert "The timings come from several runs, on 2026-11-21." in page
    assert "checks a bound for each shape. On the H100 all hold." in page and ", bound " not in page
    of("forward", "10:00", bound=Bound(("QuACK",), 99.0)).save(tmp_path / "norms.json")
    page = readme_table.page(tmp_path)
    assert "a bound for each shape. Missed:" in page and "M1 N2: " in page and ", bound 99" in page


def test_another_cards_results_have_a_table_of_their_own(tmp_path):
    assert readme_table.card("H200", tmp_path) == ""
    cases = [dataclasses.replace(case, section="forward") for case in report().cases]
    dataclasses.replace(report(), cases=cases).save(tmp_path / "norms.json")
    text = readme_table.card("H200", tmp_path)
    assert text.startswith("## On an H200\n") and " on one H100 (" in text
    assert summary.summary(readme_table.reports(tmp_path)) in text
    assert "- All rows come from one run." in text and "docs/" not in text
    assert readme_table.card("H200", readme_table.OTHER) in readme_table.PAGE.read_text()
    assert readme_table.card("H100", readme_table.RESULTS) in readme_table.PAGE.read_text()


def test_another_cards_bounds_are_counted(tmp_path):
    assert readme_table.missed_there(tmp_path) == ""
    bounds = dict(bound=Bound(("QuACK",), 99.0), roof=Bound(("copy",), 99.0))
    cases = [dataclasses.replace(case, **bounds) for case in report().cases[:1]]
    dataclasses.replace(report(), cases=cases, costs=[]).save(tmp_path / "other.json")
    text = readme_table.missed_there(tmp_path)
    assert "2 bounds are missed, and 0 are undecided" in text and "1 of those that are\nmissed" in text
    assert readme_table.missed_there() in readme_table.PAGE.read_text()


def test_the_page_has_a_table_for_each_file(tmp_path):
    report().save(tmp_path / "norms.json")
    report().save(tmp_path / "foundation.json")
    (tmp_path / "linear_memory.json").write_text('{"M1": {"tkq": 1048576, "torch": 10485760}, "M2": {"tkq": 2097152}, '
                                                '"run": {"date": "2026-11-20T09:00:00"}}')
    (tmp_path / "llama_learning.json").write_text(
        '{"losses": {"torch": [8.0, 4.0, 2.0], "tkq": [8.0, 4.0, 2.001]}, "apart": {"torch": 0, "tkq": 0.0005}, '
        '"at_most": 0.005}')
    (tmp_path / "llama_profile.json").write_text(
        '{"torch": {"ms": {"products": 2.0}, "all": 3.0, "launches": 7}}')
    text = readme_table.page(tmp_path)
    assert "## norms" in text and "| `rmsnorm` | M1 N2 | 3000 GB/s | compiled 2500 GB/s | 1.200 |" in text
    assert "Measured 2026-11-20. Peak memory beyond inputs and gradients." in text
    assert "Date not recorded. Kernel time of one training step in milliseconds." in text
    assert "| shape | tkq | torch | tkq / torch |" in text
    assert "| M1 | 1 MB | 10 MB | 0.100 |" in text and "| M2 | 2 MB |  |  |" in text
    assert "at most 0.5 %" in text and "| tkq | 8.000 | 4.000 | 2.001 | 0.050 % |" in text
    assert "| GEMM | 2.0 |" in text and "| sum (launches) | 3.0 (7) |" in text
    assert text.index("## norms") < text.index("## foundation")


def test_replacing_the_section_leaves_the_rest():
    of = lambda inside: f"before\n{readme_table.BEGIN.format('x')}\n{inside}\n{readme_table.END.format('x')}\nafter"
    assert readme_table.replace_section(of("old"), "new", "x") == of("new")
    with pytest.raises(ValueError, match="lacks the markers"):
        readme_table.replace_section("nothing here", "new")
