"""Pictures of results: what is drawn, by what the figures hold; the same results make the same bytes."""
import dataclasses
import math

import pytest

from bench.core.results import Case, Environment, Reading, Report
from bench.report import plots, readme_table
from tkq.testing.timing import Comparison, Timing

pytest.importorskip("matplotlib")

HERE = Environment("H100", "580", "13.0", "9", "3.12", "2026-11-21T10:00:00+00:00", "x", {"torch": "2.13"}, 132)


def case(op, shape, section="forward", unit="GB/s", work=4e9, readings=(), **times):
    timings = tuple(Timing(name, "graph" if ms else "failed", tuple(ms)) for name, ms in times.items())
    return Case(section, op, shape, unit, work, Comparison(timings, 2, 1, 1), readings={"tkq": tuple(readings)})


def times(ms):
    return [ms] * 5 + [ms * 1.5] * 2


NORMS = Report(HERE, [
    case("rmsnorm", "M4 N1", tkq=times(1.0), QuACK=times(2.0), copy=times(0.8)),
    case("rmsnorm", "M4 N2", tkq=times(2.0), QuACK=times(2.0), copy=times(1.6)),
    case("rmsnorm", "M4 N4", tkq=times(4.0), QuACK=[], copy=times(3.2)),
    case("rmsnorm", "M4 N1 with bias", tkq=times(1.0)),
    case("rmsnorm", "M4 N2 with bias", tkq=times(1.0)),
    case("rmsnorm heads", "B1 S2 H3 D4", section="heads", tkq=times(1.0)),
    case("rmsnorm heads", "B1 S2 H5 D4", section="heads", tkq=times(1.0)),
], copy_gbs=5000.0)
GEMM = Report(HERE, [case("fp8_gemm row" if fp8 else "gemm", f"{n}x{n}x{n}", section="large", unit="TFLOP/s", work=4e12,
                          readings=[Reading(1700 + 10 * n, 1.0, 1), Reading(None, None, None)], tkq=times(10.0))
                     for fp8 in (False, True) for n in (1, 2)])


def lines(ax):
    return {line.get_label(): list(line.get_ydata()) for line in ax.get_lines()}


def test_a_panel_for_each_operation_and_kind_with_a_line_for_each_peer_and_the_roofs():
    figure = plots.figure(plots.panels(NORMS, "forward"))
    plain, with_bias, spare = [*figure.axes, None][:3]
    assert spare is None and plain.get_title() == "rmsnorm" and with_bias.get_title() == "rmsnorm with bias"
    drawn = lines(plain)
    assert list(drawn) == ["tkq", "QuACK", "copy of the same bytes", "device copy"]
    assert drawn["tkq"] == [4000.0, 2000.0, 1000.0] and drawn["QuACK"][:2] == [2000.0, 2000.0]
    assert math.isnan(drawn["QuACK"][2])  # not timed there: a gap, no zero
    assert drawn["copy of the same bytes"] == [5000.0, 2500.0, 1250.0] and drawn["device copy"] == [5000.0] * 3
    assert [t.get_text() for t in plain.get_xticklabels()] == ["M4 N1", "M4 N2", "M4 N4"]
    assert plain.get_ylabel() == "GB/s" and plain.get_ylim()[0] == 0
    legend, = figure.legends  # one for all panels, tkq first
    assert [t.get_text() for t in legend.get_texts()] == list(drawn) and plain.get_legend() is None
    assert len(plain.collections) == 2  # a band for each that was timed


def test_shapes_of_one_kind_each_are_one_panel():
    panel, = plots.panels(NORMS, "heads")
    assert panel.title == "rmsnorm, per head" and panel.sizes == ("B1 S2 H3 D4", "B1 S2 H5 D4")


def test_problems_that_are_no_sizes_are_not_joined_by_lines():
    named = [case("gemm", f"8x8x8 bias {name}", tkq=times(1.0), plain=times(1.0)) for name in ("relu", "silu")]
    ax, = plots.figure(plots.panels(Report(HERE, named), "forward")).axes
    assert [line.get_linestyle() for line in ax.get_lines()] == ["None", "None"] and not ax.collections
    assert list(lines(ax)) == ["tkq", "tkq, plain"]
    roofed = Report(HERE, named, copy_gbs=5000.0)
    roof = plots.figure(plots.panels(roofed, "forward")).axes[0].get_lines()[-1]
    assert (roof.get_label(), roof.get_linestyle(), roof.get_marker()) == ("device copy", "None", "_")
    sizes = plots.figure(plots.panels(GEMM, "large")).axes[0]
    assert {line.get_linestyle() for line in sizes.get_lines()} == {"-", "--"}


def test_a_panel_has_the_name_of_the_function():
    found = [case("attention_forward", "B1 S2 H3 D4 full", section=section, unit="TFLOP/s", tkq=times(1.0))
             for section in ("dense", "varlen")]
    titles = [panel.title for section in ("dense", "varlen") for panel in plots.panels(Report(HERE, found), section)]
    assert titles == ["flash_attn", "flash_attn_varlen"]


def test_bands_are_quartiles():
    line = plots.panels(NORMS, "forward")[0].lines[0]
    assert line.high[0] == pytest.approx(4000.0) and line.low[0] == pytest.approx(4000.0 / 1.25)


def test_the_tensor_cores_roof_is_at_the_clock_that_was_read():
    bf16, fp8 = plots.panels(GEMM, "large")
    assert (bf16.title, fp8.title) == ("gemm", "fp8_gemm, scales per row")
    peak = bf16.roofs["tensor-core peak at the measured clock"]
    assert peak == (pytest.approx(132 * 4096 * 1710e6 / 1e12), pytest.approx(132 * 4096 * 1720e6 / 1e12))
    assert fp8.roofs["tensor-core peak at the measured clock"] == tuple(pytest.approx(2 * x) for x in peak)
    unread = dataclasses.replace(GEMM, environment=dataclasses.replace(HERE, processors=0))
    assert plots.panels(unread, "large")[0].roofs == {}


def test_the_overview_has_a_row_for_each_operation():
    found = plots.overview({"norms": NORMS, "gemm": GEMM})
    assert found == {"rmsnorm": [2.0, 1.0]}  # what has a peer, copies are none
    ax, = plots.overview_figure(found).axes
    assert [t.get_text() for t in ax.get_yticklabels()] == ["rmsnorm"]
    assert list(ax.get_lines()[0].get_xdata()) == [2.0, 1.0]
    assert list(ax.get_lines()[1].get_xdata()) == [pytest.approx(math.sqrt(2.0))]


def test_the_same_results_make_the_same_bytes_and_say_what_they_are_of(tmp_path):
    some = dataclasses.replace(NORMS, cases=NORMS.cases[:5])
    first, second = (plots.write({"norms": some}, tmp_path / str(i)) for i in range(2))
    assert [p.name for p in first] == [f"{name}.{ending}" for name in ("norms_forward", "overview")
                                       for ending in ("svg", "png")]
    assert all(a.read_bytes() == b.read_bytes() for a, b in zip(first, second))
    text = first[0].read_text()
    assert ">rmsnorm with bias<" in text and f">{plots.digest(plots.panels(NORMS, 'forward'))}<" in text
    assert first[1].read_bytes().startswith(b"\x89PNG")


def test_stale_pictures_are_drawn_again(tmp_path):
    results, pictures = tmp_path / "results", tmp_path / "plots"
    NORMS.save(results / "norms.json")
    assert readme_table.stale(results, pictures, results) == ["norms_forward.svg", "norms_heads.svg", "overview.svg"]
    readme_table.draw(results, pictures, results)
    assert readme_table.stale(results, pictures, results) == []
    other = [case("rmsnorm", "M4 N1", tkq=times(1.5), QuACK=times(2.0)), *NORMS.cases[1:5]]
    dataclasses.replace(NORMS, cases=other).save(results / "norms.json")
    assert readme_table.stale(results, pictures, results) == ["norms_forward.svg", "norms_heads.svg", "overview.svg"]
    readme_table.draw(results, pictures, results)
    assert sorted(p.name for p in pictures.iterdir()) == ["norms_forward.svg", "overview.svg"]
