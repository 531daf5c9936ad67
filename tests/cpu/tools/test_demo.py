"""The demo without a GPU: its checks can fail, one failure hides nothing else, and the exit status says so."""

import dataclasses
import io
import math

import pytest
import torch

from tkq.cli import demo
from tkq.testing import console
from tkq.warmup import catalog


def run(monkeypatch, capsys, *, kernels=None, examples=None):
    """(exit status, what was printed) of the demo on a machine without a GPU."""
    monkeypatch.setattr(demo, "_hopper", lambda: (False, "PyTorch finds no GPU"))
    monkeypatch.setattr(demo, "kernels", lambda: kernels or {})
    if examples is not None:
        monkeypatch.setattr(demo, "examples", lambda large: examples)
    return demo.main([]), capsys.readouterr().out


def test_every_operation_passes_on_the_cpu_and_nothing_is_said_to_be_timed(monkeypatch, capsys):
    status, text = run(monkeypatch, capsys)
    assert status == 0
    assert "Nothing was timed" in text
    for op in ("flash_attn", "rmsnorm", "layernorm", "gemm"):
        assert f"\n{op} " in text
    assert "WRONG" not in text and "PROBLEM" not in text
    assert "TFLOP/s" not in text and "GB/s" not in text


@pytest.mark.parametrize("flaw", ["wrong", "row", "nan", "unwritten", "raises"])
def test_a_flawed_operation_is_a_problem_and_status_1(monkeypatch, capsys, flaw):
    good, victim = demo.examples(large=False)[2:4]

    def ours(x, *rest):
        if flaw == "raises":
            raise RuntimeError("no such path")
        y = victim.eager(x, *rest)
        if flaw == "wrong":
            return y * 1.02
        if flaw == "row":  # one of 64, too little to be seen in the whole
            y[3] *= 1.02
            return y
        y[3, 5] = math.nan
        return y if flaw == "nan" else torch.full_like(y, math.nan)

    status, text = run(monkeypatch, capsys, examples=[dataclasses.replace(victim, ours=ours), good])
    assert status == 1
    assert "PROBLEM layernorm" in text
    assert text.count("ok\n") == 1  # the other one was still run and passed


def test_a_kernel_that_does_not_compile_is_a_problem_and_status_1(monkeypatch, capsys):
    def broken(recipe, instructions):
        raise RuntimeError("does not fit")

    monkeypatch.setattr(demo.sass, "report", broken)
    recipe = next(iter(demo.kernels().values()))
    status, text = run(monkeypatch, capsys, kernels={"flash_attn causal": recipe}, examples=[])
    assert status == 1
    assert "PROBLEM flash_attn causal: RuntimeError: does not fit" in text


def test_code_that_is_not_as_expected_is_a_problem(monkeypatch, capsys):
    recipe = demo.kernels()["flash_attn full"]
    spilled = demo.sass.KernelReport("k", 168, 0, 1024, 0, 128, opcodes={"LDL": 3, "STL": 2, "HGMMA.64x128x16.F32": 99})
    monkeypatch.setattr(demo.sass, "report", lambda _, instructions: [spilled])
    status, text = run(monkeypatch, capsys, kernels={"flash_attn full": recipe}, examples=[])
    assert status == 1
    assert "3 local loads and 2 local stores" in text
    row = next(line.split() for line in text.splitlines() if line.startswith("flash_attn full  "))
    assert row[2:] == ["WRONG", "168", "1024", "5", "99", "0", "104"]


def test_the_demo_s_kernels_are_shipped():
    shipped = {kernel.recipe for kernel in catalog.shipped()}
    assert {name for name, recipe in demo.kernels().items() if recipe not in shipped} == set()


def test_one_row_does_not_hide_in_the_whole():
    wanted = torch.randn(64, 256)
    out = wanted.clone()
    out[7] *= 1.02
    errors = demo.Errors(demo.relative_error(out, wanted), 2e-3, demo.worst_row(out, wanted), 2e-3)
    assert demo.passes(errors.ours, errors.eager) and not errors.ok
    assert errors.our_row == pytest.approx(0.02, rel=1e-3)
    out[0, 0] = math.nan
    assert math.isnan(demo.worst_row(out, wanted))


@pytest.mark.parametrize(
    ("error", "eager", "good"),
    [(2e-3, 2e-3, True), (5.9e-3, 2e-3, True), (6e-3, 2e-3, False), (math.nan, 2e-3, False), (math.inf, 2e-3, False)],
)
def test_the_rule_for_errors(error, eager, good):
    assert demo.passes(error, eager) is good


def test_another_gpu_is_named_with_its_capability(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda: (8, 0))
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda: "A100")
    assert demo._hopper() == (False, "A100 has compute capability 8.0")
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda: (9, 0))
    assert demo._hopper()[0] is True


def test_progress_is_lines_in_a_file_and_one_bar_on_a_terminal():
    out = io.StringIO()
    steps = console.Progress(2, out)
    steps.step("first")
    steps.step("second")
    steps.end()
    assert out.getvalue() == "[1/2] first\n[2/2] second\n"
    terminal = io.StringIO()
    terminal.isatty = lambda: True
    steps = console.Progress(2, terminal)
    steps.step("first")
    steps.step("second")
    steps.end()
    assert "\n" not in terminal.getvalue()
    assert f"[{'#' * 10}{'.' * 10}] 1/2 first" in terminal.getvalue()
    assert f"[{'#' * 20}] 2/2 second" in terminal.getvalue()


def test_table_aligns_words_left_and_numbers_right():
    text = console.table(("op", "shape", "ms"), [("a", "bb", "1.5"), ("long", "c", "12.25")])
    assert text.splitlines() == ["op    shape     ms", "a     bb       1.5", "long  c      12.25"]
