"""The list of mutants cannot rot: each line stands where it is said to, each test exists. And what its runner says."""
import ast
import collections
import os
import pathlib
import re
import shlex
import subprocess
import sys
import time

import pytest
import torch

from tests.helpers.process import fresh
from tests.mutants import __main__ as runner
from tests.mutants.every import MUTANTS
from tests.mutants.mutant import Mutant

ROOT = pathlib.Path(__file__).resolve().parents[3]
COLLECTED = """
import sys
import pytest

# asserts are not rewritten, which takes half of the time
sys.exit(pytest.main(["--collect-only", "-q", "--slow", "--assert=plain", "-p", "no:cacheprovider", "tests/gpu"]))
"""
FAMILIES = {"conv", "attention", "flex", "packed", "backward", "gemm", "few", "fp8", "grouped", "rows", "softmax",
            "loss", "norm", "quantize", "rope", "gated", "linear", "based", "step", "tile", "scan", "decode", "fft",
            "wide", "mla", "chunked"}


def bare(lines):
    """Without layout and comments."""
    return re.sub(r"\s+|#[^\n]*", "", lines)


@pytest.mark.parametrize("mutant", MUTANTS, ids=lambda m: m.name)
def test_each_line_stands_once_where_it_is_said_to(mutant):
    for edit in mutant.edits:
        text = (ROOT / edit[0]).read_text()
        changed = mutant.with_edit(text, *edit)  # raises where it does not
        assert changed != text and (edit[0].endswith(".c") or ast.parse(changed))
        assert bare(edit[1]) != bare(edit[2]), "a fault that changes nothing but the layout"


def test_there_are_enough_of_each_family_and_names_are_unique():
    names = collections.Counter(m.name for m in MUTANTS)
    assert len(MUTANTS) >= 40 and max(names.values()) == 1
    assert {m.family for m in MUTANTS} == FAMILIES
    of_races = [m for m in MUTANTS if any(kind in test for kind in ("[reads", "[loads", "[stores") for test in m.tests)]
    assert len(of_races) >= 10


def test_each_test_exists():
    """And the GPU suite is collected without an error, which a run of all tests does not do where there is no GPU."""
    wanted = {word for m in MUTANTS for test in m.tests for word in shlex.split(test)[:1]}
    found = fresh.run(COLLECTED, imports="torch, cutlass.cute", env={**os.environ, "PYTHONPATH": str(ROOT)})
    assert found.returncode == 0, found.stdout[-2000:] + found.stderr
    collected = set(re.findall(r"^tests/gpu/\S+::.+$", found.stdout, re.M))
    assert len(collected) > 4000
    functions = {test.partition("[")[0] for test in collected}
    files = {test.partition("::")[0] for test in collected}
    compiled = {test for test in wanted if test.startswith("tests/cpu/")}  # what only the machine code shows
    assert all((ROOT / test).is_file() for test in compiled) and compiled
    assert not wanted - collected - functions - files - compiled


def test_what_is_not_there_or_there_twice_is_refused():
    text = "def f():\n    a = 1\n    b = 2\n    a = 1\n"
    with pytest.raises(ValueError, match="x: stands in f.py 2 times"):
        Mutant("x", "f.py", "a = 1", "a = 2", ()).changed(text)
    with pytest.raises(ValueError, match="0 times"):
        Mutant("x", "f.py", "a = 3", "", ()).changed(text)
    both = Mutant("x", "f.py", "\n  a = 1\n  b = 2\n", "\n  if a:\n      b = 3\n", ())
    assert both.changed(text) == "def f():\n    if a:\n        b = 3\n    a = 1\n"


def test_a_change_beside_the_fault(tmp_path):
    for name in "fg":
        (tmp_path / f"{name}.py").write_text("a = 1\nb = 2\n")
    Mutant("x", "f.py", "a = 1", "a = 2", (), (("g.py", "b = 2", ""), ("f.py", "b = 2", "b = 3"))).apply(tmp_path)
    assert [(tmp_path / f"{name}.py").read_text() for name in "fg"] == ["a = 2\nb = 3\n", "a = 1\n"]


@pytest.mark.parametrize("status, output, verdict", (
    (1, "1 failed", "caught"), (None, "", "caught (time)"), (-11, "", "caught (signal 11)"),
    (0, "2 passed", "SURVIVED"), (0, "3 skipped", "NOT JUDGED"),
    (1, "E   NameError: name 'x'\n1 failed", "NOT JUDGED"), (1, "cutlass.DSLRuntimeError: x\n1 failed", "NOT JUDGED"),
    (1, "E   AssertionError: TypeError: x\n1 failed", "caught"), (5, "no tests ran", "NOT JUDGED"),
    (2, "1 error", "NOT JUDGED")))
def test_verdicts(status, output, verdict):
    ran = runner.Ran(status, output, 1.0)
    assert ran.verdict() == verdict and ran.passed == (verdict == "SURVIVED")


def test_the_list_and_unknown_names(capsys):
    assert runner.main(["--list", "gemm", "rope_sign_of_the_sine"]) == 0
    shown = capsys.readouterr().out.splitlines()
    assert len(shown) == 1 + sum(m.family == "gemm" for m in MUTANTS)
    assert [m.name for m in runner.chosen(["attention_no_wait_for_k"])] == ["attention_no_wait_for_k"]
    with pytest.raises(SystemExit, match="no_such"):
        runner.main(["no_such"])


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_without_a_gpu_nothing_is_judged():
    with pytest.raises(SystemExit, match="needs an sm_90 GPU"):
        runner.main(["rope_sign"])


def test_a_mutant_is_run_in_a_copy_of_the_tree(tmp_path):
    """One that needs no GPU."""
    of_rule = Mutant("rule", "tkq/testing/rule.py", "allowed = 2 * theirs + ulps * eps * blocks.largest(wanted) + rest",
                     "allowed = 999 * theirs", ("tests/cpu/testing/test_testing.py -k late_row",))
    found = runner.Runner(tmp_path, 100).mutant(of_rule)
    assert found.verdict() == "caught" and "DID NOT RAISE" in found.output
    assert list(tmp_path.iterdir()) == []


@pytest.mark.slow
def test_the_tree_is_judged_with_what_a_mutant_changes_beside_its_fault(tmp_path):
    """Which is to be no fault: one that is not passes for nothing."""
    rule, tests = "tkq/testing/rule.py", ("tests/cpu/testing/test_testing.py -k late_row",)
    harmless = (rule, "allowed = 2 * theirs + ulps * eps * blocks.largest(wanted) + rest",
                "allowed = 2 * theirs + (ulps * eps * blocks.largest(wanted) + rest)")
    harmful = (*harmless[:2], "allowed = 999 * theirs")
    of = runner.Runner(tmp_path, 1e-3)  # seconds: those of a baseline hold
    assert of.baseline(0, tests, (harmless,)).passed
    assert not of.baseline(1, tests, (harmful,)).passed


def test_a_test_under_pressure_is_run_without_pytest():
    assert runner.program(("tests/gpu/testing/test_naps.py::test_under_pressure[naps-gemm]",)) == [
        "tests.helpers.sanitizer.pressed", "naps", "gemm"]
    assert "--slow" not in runner.program(("tests/gpu/pointwise/test_rope.py",))
    assert "--slow" in runner.program(("tests/gpu/pointwise/test_rope.py::test_x[1]",))  # by name, slow or not
    assert runner.program(("tests/gpu/pointwise/test_rope.py -k 'a b'",))[-3:] == ["tests/gpu/pointwise/test_rope.py",
                                                                                   "-k", "a b"]


OF_A_RUNNER = """
import os, pathlib, sys
from tests.mutants import fork
if __name__ == "__main__":
    root = pathlib.Path(sys.argv[1])
    fork.run(["sleeper"], root, {**os.environ, "PYTHONPATH": str(root)}, root / "out", 100)
"""


def test_what_runs_ends_with_its_runner(tmp_path):
    """As a kernel that waits forever has to, which would take its share of the GPU."""
    (tmp_path / "sleeper.py").write_text("import os, time; print(os.getpid(), flush=True); time.sleep(100)")
    (tmp_path / "runner.py").write_text(OF_A_RUNNER)
    (tmp_path / "out").touch()
    started = subprocess.Popen([sys.executable, str(tmp_path / "runner.py"), str(tmp_path)], cwd=tmp_path,
                               env={**os.environ, "PYTHONPATH": str(ROOT)})
    until(lambda: (tmp_path / "out").read_text().strip())
    child = int((tmp_path / "out").read_text())
    started.kill()
    started.wait()
    until(lambda: not running(child))


def until(there):
    for _ in range(600):
        if there():
            return
        time.sleep(0.1)
    raise AssertionError("a minute is over")


def running(process):
    """Zombies are not."""
    try:
        return pathlib.Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False
