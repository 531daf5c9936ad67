"""Snapshots of machine code: equal where only names differ, unequal where an instruction or a constant does."""
import pathlib

import pytest

from tests import machine_code
from tests.helpers.process import kernels_for_tests
from tests.helpers.process.kernels_for_tests import Scale
from tkq.runtime import Recipe
from tkq.runtime.compile import build
from tkq.warmup import catalog


@pytest.fixture(autouse=True, scope="module")
def own_cache(tmp_path_factory):
    old = build._cache
    build.configure(tmp_path_factory.mktemp("cache"))
    yield
    build._cache = old


@pytest.fixture
def moved(tmp_path, monkeypatch):
    """The test's kernels in a module of another name, the class too."""
    text = pathlib.Path(kernels_for_tests.__file__).read_text()
    assert "class ScaleOnGpu" in text
    (tmp_path / "kernels_elsewhere.py").write_text(text.replace("ScaleOnGpu", "Scaled"))
    monkeypatch.syspath_prepend(tmp_path)
    return "kernels_elsewhere:build_gpu_scale"


def test_names_do_not_count_and_what_is_computed_does(moved):
    here = f"{kernels_for_tests.__name__}:build_gpu_scale"
    one, = machine_code.functions(Recipe(here, (Scale(),)))
    assert one["bytes"] > 500 and one["threads"] == 32 and one["registers"] > 7
    assert machine_code.functions(Recipe(moved, (Scale(),))) == [one]
    other, = machine_code.functions(Recipe(here, (Scale(factor=3.0),)))
    assert other["code"] != one["code"]
    assert machine_code.differences({"k": [one]}, {"k": [other]}) == ["k: other instructions"]


def test_compare_says_what_differs(tmp_path, capsys):
    one = {"code": "a", "bytes": 640, "registers": 32}
    a = {"same": [one], "gone": [one], "changed": [one, one], "fewer": [one, one]}
    b = {"same": [one], "new": [one], "changed": [one, {**one, "code": "b", "registers": 40}], "fewer": [one]}
    assert machine_code.differences(a, b) == [
        "gone: only in the first", "new: only in the second", "changed: registers 32, then 40",
        "fewer: 2 functions, then 1"]
    assert machine_code.differences(a, a) == []
    for name, found in (("a", a), ("b", b)):
        (tmp_path / name).mkdir()
        (tmp_path / name / machine_code.FILE).write_text(machine_code.json.dumps(found))
    assert machine_code.main(["compare", str(tmp_path / "a"), str(tmp_path / "a")]) == 0
    assert machine_code.main(["compare", str(tmp_path / "a"), str(tmp_path / "b")]) == 1
    assert capsys.readouterr().out.splitlines()[-1] == "5 kernels: 1 equal, 4 not"


class Kernel:
    def __init__(self, name, builder, *args):
        self.name, self.recipe = name, Recipe(builder, args)


def test_a_snapshot_of_some(tmp_path, monkeypatch, capsys):
    builder = f"{kernels_for_tests.__name__}:build_gpu_scale"
    kernels = [Kernel("x-1", builder, Scale()), Kernel("x-2", builder, Scale(factor=3.0)),
               Kernel("y-1", "no.such:build"), Kernel("y-2", builder, (Scale(),))]
    monkeypatch.setattr(catalog, "shipped", lambda: kernels)
    names = lambda *words: [k.name for k in machine_code.chosen(machine_code.parsed(["snapshot", "d", *words]))]
    assert names() == ["x-1", "x-2", "y-1", "y-2"] and names("y") == ["y-1", "y-2"] and names("--every", "3") == [
        "x-1", "y-2"]
    assert names("--of-each") == ["x-1", "y-1", "y-2"] and names("--of-each", "--every", "2") == ["x-1", "y-1", "y-2"]
    assert machine_code.main(["snapshot", str(tmp_path / "x"), "x"]) == 0
    assert list(machine_code.read(tmp_path / "x")) == ["x-1", "x-2"]
    assert names("--like", str(tmp_path / "x")) == ["x-1", "x-2"]
    assert machine_code.main(["snapshot", str(tmp_path / "y"), "y-1"]) == 1
    assert "PROBLEM y-1: ImportError" in capsys.readouterr().out
    for wrong in (["--every", "0"], ["no_such"], ["--like", str(tmp_path / "none")]):
        with pytest.raises(SystemExit):
            machine_code.main(["snapshot", str(tmp_path / "z"), *wrong])
