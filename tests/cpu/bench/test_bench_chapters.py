"""bench.studies.chapters without a GPU: its cases, what it judges, and its table."""
import dataclasses

import pytest
import torch

from bench.core import ops
from bench.core.results import Case, Report
from bench.peers import common
from bench.report import readme_table
from bench.studies import chapters
from tests.cpu.bench.test_bench_plots import HERE
from tkq.testing.timing import Comparison, Timing


def case(section="attention", op="flash_attn", ours=1.0, example=1.25, errors=(1e-3, 1e-3), **more):
    timings = [Timing("tkq", "graph", (ours,) * 7, error=errors[0])]
    if example:
        timings.append(Timing("example", "graph", (example,) * 7, error=errors[1]))
    timings += [Timing(name, "graph", (ms,) * 7) for name, ms in more.items()]
    return Case(section, op, "S8", "TFLOP/s", 1e9, Comparison(tuple(timings), 2, 1, 1))


def test_every_section_has_jobs_whose_peers_are_there():
    names = set()
    for section, make in chapters.BENCH.sections.items():
        jobs = list(make(chapters.BENCH.shapes[section]))
        assert jobs and section in chapters.FILES
        for job in jobs:
            found, missing = common.find(job.peer_op, job.peer_names, **job.peer_options)
            assert not missing and set(found) == set(job.peer_names)
            names |= {name for name in found if ops.is_rival(name)}
    assert names == {"cuBLAS"}  # an example is tkq's own


def test_softmax_of_the_chapter_is_tkqs_with_its_scale():
    x = torch.randn(2, 5)
    job = next(chapters.reduction_jobs(((2, 5),)))
    assert torch.allclose(job.ours(x), torch.softmax(x / chapters.TEMPERATURE, -1))
    assert job.error("tkq", (x,), job.ours(x)) < 1e-6 and job.error("copy", (x,), x) is None


def test_the_backward_of_rows_is_judged_by_autograd():
    job = next(chapters.row_jobs(((4, 8),)))
    module = chapters.example("write_a_row_kernel")
    given = module.inputs(4, 8, "cpu")
    x, weight = (t.float().requires_grad_() for t in given[1:3])
    y = torch.nn.functional.silu(torch.nn.functional.rms_norm(x, (8,), weight, module.EPS))
    wanted, = torch.autograd.grad(y, (x,), given[0].float())
    with torch.no_grad():  # as cases are timed
        assert job.error("tkq", given, (wanted, None)) < 1e-6
        assert job.error("tkq", given, (2 * wanted, None)) == pytest.approx(1.0)


def test_an_example_that_is_slow_or_wrong_is_named():
    assert chapters.judge([case(example=1 / 0.86), case("gemm", "gemm", example=2.0), case(example=None)]) == []
    assert chapters.judge([case(example=1 / 0.84)]) == [
        "flash_attn S8: the example has 0.840x tkq's speed, bound 0.85"]
    assert "error is 4.0e-03" in chapters.judge([case(example=1.0, errors=(1e-3, 4e-3))])[0]
    assert chapters.judge([case(example=1.0, errors=(1e-3, float("nan")))])


def test_the_table_has_what_the_examples_reach(tmp_path):
    rows = dataclasses.replace(case("rows", "silu(rmsnorm) backward", example=None, add=0.5), unit="GB/s", work=1e6)
    report = Report(HERE, [case(), rows, case("gemm", "gemm", cuBLAS=2.5)])
    report.save(tmp_path / "chapters.json")
    text = readme_table.own_kernels(tmp_path)
    assert "| `write_a_flash_attention.py` | S8 | 1 TFLOP/s | 0.800x `tkq.flash_attn` |" in text
    assert "| `write_a_row_kernel.py` | S8 | 1 GB/s | 0.500x `torch.add` |" in text
    assert "| `write_a_gemm.py` | S8 | 1 TFLOP/s | 0.800x `tkq.gemm`, 2.000x cuBLAS |" in text
    assert chapters.table(report) in readme_table.page(tmp_path)
    assert readme_table.own_kernels(tmp_path / "nothing") == "Not measured yet."


def test_what_was_measured_reaches_what_the_chapters_promise():
    report = readme_table.reports()["chapters"]
    assert {case.section for case in report.cases} == set(chapters.FILES)
    assert chapters.judge(report.cases) == [] and not any(case.holds() is False for case in report.cases)
    assert all(case.accurate() is not False for case in report.cases)
