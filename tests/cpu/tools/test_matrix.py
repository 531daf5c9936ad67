"""`make test-matrix`: which cells there are, what is installed for them, what is said of those that cannot be had."""
import pathlib
import types

import pytest

from tests import matrix
from tests.matrix import Cell, Pair

ROOT = pathlib.Path(__file__).parents[3]
LOW, HIGH = Pair("4.8.0", "0.1.11"), Pair("4.9.2", "0.1.20.post1")
PYPROJECT = 'dependencies = ["torch>=2.9", "nvidia-cutlass-dsl>=4.8.0,<5", "apache-tvm-ffi>=0.1.11,<0.2"]'
CONSTRAINTS = ("torch==2.13.0\nnvidia-cutlass-dsl==4.9.2\nnvidia-cutlass-dsl-libs-base==1.0\n"
               "apache-tvm-ffi==0.1.20.post1\n")


def test_pairs_are_the_lowest_allowed_and_the_pinned_one():
    assert matrix.pairs(PYPROJECT, CONSTRAINTS) == [LOW, HIGH]
    assert matrix.pairs(PYPROJECT, "nvidia-cutlass-dsl==4.8.0\napache-tvm-ffi==0.1.11\n") == [LOW]
    own = matrix.pairs(*((ROOT / name).read_text() for name in ("pyproject.toml", "constraints.txt")))
    assert len(own) == 2 and own[0] < own[1]


def test_each_python_and_each_torch_has_both_pairs():
    found = matrix.cells([LOW, HIGH], "2.13")
    assert len(found) == len(set(found)) == 2 * (len(matrix.PYTHONS) + len(matrix.TORCHES) - 1)
    for pair in (LOW, HIGH):
        assert {cell.python for cell in found if cell.pair == pair} == set(matrix.PYTHONS)
        assert {cell.torch for cell in found if cell.pair == pair} == set(matrix.TORCHES)
    every = matrix.cells([LOW, HIGH], "2.13", every=True)
    assert set(found) < set(every) and len(every) == 2 * len(matrix.PYTHONS) * len(matrix.TORCHES)


def test_chosen_by_words(capsys):
    assert matrix.main(["--list", "--only", "3.12", "2.9", "4.8.0"]) == 0
    assert capsys.readouterr().out.splitlines() == [str(Cell("3.12", "2.9", LOW))]
    assert matrix.main(["--list", "--here"]) == 0
    assert capsys.readouterr().out.splitlines() == [str(matrix.here(LOW))]


def test_what_borrows_gets_all_parts_of_the_dsl():
    """One part of another version would be a mixture of both."""
    packages = ["torch", "nvidia-cutlass-dsl", "nvidia-cutlass-dsl-libs-core", "nvidia-cuda-nvdisasm", "apache-tvm-ffi"]
    assert matrix.borrowed(packages, LOW) == [
        "nvidia-cutlass-dsl==4.8.0", "nvidia-cutlass-dsl-libs-core==4.8.0", "apache-tvm-ffi==0.1.11"]


def test_what_cannot_be_had_is_named(monkeypatch, capsys, tmp_path):
    with pytest.raises(matrix.CannotBeHad, match="torch 2.9 with CUDA .*nvidia-cudnn-cu12==9.*--large"):
        matrix.refuse_cuda(["torch==2.9.1", "nvidia-cudnn-cu12==9.1", "sympy==1.14"], "2.9")
    matrix.refuse_cuda(["torch==2.13.0+cpu", "sympy==1.14"], "2.13")
    with pytest.raises(matrix.CannotBeHad, match="no python9.99"):
        matrix.interpreter("9.99")
    assert matrix.last("WARNING: a\nERROR: no matching torch\nERROR: more\n") == "ERROR: no matching torch"
    monkeypatch.setattr(matrix, "PYTHONS", ("9.99",))
    monkeypatch.setattr(matrix, "MIDDLE", "9.99")
    assert matrix.main(["--write", str(tmp_path / "table.md"), "--folder", str(tmp_path)]) == 0
    assert capsys.readouterr().out.count("not run: there is no python9.99") == 2 * len(matrix.TORCHES)
    assert f"| 9.99 | 2.9 | {LOW.dsl} | {LOW.ffi} | not run | there is no python9.99 |" in (
        tmp_path / "table.md").read_text()


@pytest.mark.parametrize("failing", [None, "demo", "pytest"])
def test_a_failure_is_the_exit_status(monkeypatch, failing):
    def run(words, **_):
        bad = failing in words
        said = "1 failed in 2s" if bad else "9 passed in 2s"
        return types.SimpleNamespace(returncode=int(bad), stdout=said, stderr="")

    monkeypatch.setattr(matrix, "environment", lambda cell, folder, large: "python")
    monkeypatch.setattr(matrix.subprocess, "run", run)
    assert matrix.main(["--here", "--smoke"]) == int(failing is not None)


def test_files_of_the_smoke_subset_are_there():
    assert all((ROOT / name).is_file() for name in matrix.SMOKE)
