"""Which files name a kernel's cache entry: all that decide its machine code, and few others."""
import ast
import importlib
import json
import pathlib
import pickle

import pytest

from tests.helpers.lint.classes import statements
from tests.helpers.process import fresh
from tkq.runtime import Recipe
from tkq.runtime.compile import keys, sources
from tkq.warmup import catalog

CHECKOUT = pathlib.Path(__file__).resolve().parents[3]
# The only places that import a module by a name made at run time. What the kernels among them import so is in
# Recipe.sources; the others see no kernel.
DYNAMIC = {"tkq", "tkq.warmup.catalog", "tkq.runtime.compile.build", "tkq.runtime.compile.sources",
           "tkq.gemm.epilogue.spec",
           "tkq.integrations", "tkq.integrations.transformers_modules", "tkq.reduction.build", "tkq.reference",
           "tkq.nn", "tkq.rows.persistent.build", "tkq.runtime", "tkq.runtime.compile.values", "tkq.testing",
           "tkq.warmup.tune"}
# Builds each recipe of a pickle in a process of its own, which has the DSL and what counts for all recipes, and prints
# what it then has of tkq.
BUILD = """
import importlib, json, os, pickle, sys
import cutlass, cutlass.cute, torch
of_all, recipes = json.load(open(sys.argv[1]))
for module in of_all:
    importlib.import_module(module)
for module, function, args in recipes:
    sys.stdout.flush()
    if os.fork() == 0:
        getattr(importlib.import_module(module), function)(*pickle.loads(bytes.fromhex(args)))
        print(json.dumps(sorted(name for name in sys.modules if name.partition(".")[0] == "tkq")), flush=True)
        os._exit(0)
    assert os.wait()[1] == 0, module
"""


@pytest.fixture(autouse=True)
def clear():
    sources.clear()
    yield
    sources.clear()


def every_module():
    for top in ("tkq", "tests", "examples"):
        for path in sorted((CHECKOUT / top).rglob("*.py")):
            parts = path.relative_to(CHECKOUT).with_suffix("").parts
            yield ".".join(parts[:-1] if parts[-1] == "__init__" else parts), path


def parsed(name, path):
    """The modules of tkq and of the file's own package that a syntax tree shows."""
    package = name if path.name == "__init__.py" else name.rpartition(".")[0]
    for node in statements(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            origin = importlib.util.resolve_name("." * node.level + (node.module or ""), package)
            yield origin
            yield from (f"{origin}.{alias.name}" for alias in node.names)


@pytest.mark.parametrize("top", ("tkq", "tests", "examples"))
def test_no_import_is_overlooked(top):
    checked = 0
    for name, path in every_module():
        if name.partition(".")[0] != top:
            continue
        seen = set(sources._imports(name, str(path)))
        for module in parsed(name, path):
            if module.partition(".")[0] in ("tkq", top) and module != "tkq" and sources._file(module):
                assert module in seen, f"{name} imports {module}"
                checked += 1
    assert checked > {"tkq": 500, "tests": 100, "examples": 5}[top]


def test_modules_named_at_run_time_are_few():
    found = set()
    for name, path in every_module():
        text = path.read_text() if name.startswith("tkq") else ""
        named = "import_module" in text or "__import__" in text
        for node in ast.walk(ast.parse(text)) if named else ():
            called = isinstance(node, ast.Call) and ast.unparse(node.func).rpartition(".")[2]
            if called in ("import_module", "__import__") and not isinstance(node.args[0], ast.Constant):
                found.add(name)
    assert found == DYNAMIC


def one_of_each_builder():
    found = {}
    for kernel in catalog.select([]):
        found.setdefault((kernel.recipe.builder, kernel.recipe.sources), kernel.recipe)
    return list(found.values())


def test_what_a_builder_really_imports_counts(tmp_path):
    recipes = one_of_each_builder()
    counts = [set(sources.reached(keys.modules_of(recipe))) for recipe in recipes]
    given = json.dumps((sorted(set.intersection(*counts)), [
        (*recipe.builder.split(":"), pickle.dumps(recipe.args).hex()) for recipe in recipes]))
    (tmp_path / "given").write_text(given)
    done = fresh.run(BUILD, tmp_path / "given", imports="torch, cutlass.cute")
    assert done.returncode == 0, done.stderr
    imported = list(map(json.loads, done.stdout.splitlines()))
    assert len(imported) == len(recipes) > 15
    for recipe, names, counted in zip(recipes, imported, counts):
        assert recipe.module in names
        missing = {n for n in names if n not in counted and n != "tkq" and not sources._HOST_ONLY.fullmatch(n)}
        assert not missing, recipe.builder


def test_kernels_do_not_count_for_each_other():
    def of(*modules):
        return set(sources.reached(modules))

    attention, gemm = of("tkq.attention.forward.kernel"), of("tkq.gemm.dense.kernel")
    norm = of("tkq.norms.forward.kernel")
    assert {"tkq.tile", "tkq.tile.mma", "tkq.runtime.compile.fake"} <= attention & gemm & norm
    assert {"tkq.norms.forward.row_norm", "tkq.norms.forward.rmsnorm", "tkq.utils", "tkq.reduction_base"} <= norm
    for names, others in ((attention, ("gemm", "norms", "rows", "losses")), (gemm, ("attention", "norms", "rows")),
                          (norm, ("attention", "gemm", "rows.persistent", "losses", "pointwise"))):
        assert not [name for name in names for other in others if name.startswith(f"tkq.{other}.")]
    assert "tkq.norms.backward.kernel" not in of("tkq.rows.persistent.build")


def test_no_kernel_counts_what_only_pytorch_sees():
    for recipe in one_of_each_builder():
        for name in sources.reached(keys.modules_of(recipe)):
            assert not name.endswith(("_ops", ".ops", ".catalog", ".checks")), (recipe.builder, name)


def test_the_classes_of_arguments_count():
    from tkq.norms.backward.per_head_plan import PerHeadSpec

    spec = PerHeadSpec.__new__(PerHeadSpec)
    for name in PerHeadSpec.__dataclass_fields__:
        object.__setattr__(spec, name, 0)
    assert keys.modules_of(Recipe("tkq.norms.backward.per_head_kernel:PerHeadBackward", (1, (spec,)))) == (
        "tkq.norms.backward.per_head_kernel", "tkq.norms.backward.per_head_plan")


TREE = {
    "kernels/__init__.py": "from . import shared\n",
    "kernels/build.py": """
        from .near import (one,  # (a comment)
            two)
        from kernels \\
            import slash
        def build():
            if 1: from ..kernels.deep import inner as x; import kernels.semi, kernels.comma as c
            importlib.import_module("kernels.named")
            importlib.import_module('.relative', __package__)
            from .star import *
            import torch, os
            from .from_here import thing
    """,
    **{f"kernels/{name}.py": "" for name in ("shared", "near", "slash", "semi", "comma", "named", "relative",
                                           "from_here", "other")},
    "kernels/deep/__init__.py": "from .again import thing\n",
    "kernels/deep/inner.py": "",
    "kernels/deep/again.py": "from .. import build\n",  # in a circle
    "kernels/star/__init__.py": "__all__ = ['arm']\n",
    "kernels/star/arm.py": "from tkq.norms import spec\n",
}
COUNTED = {"kernels", "kernels.build", "kernels.shared", "kernels.near", "kernels.slash", "kernels.semi",
           "kernels.comma", "kernels.named", "kernels.relative", "kernels.from_here", "kernels.deep",
           "kernels.deep.inner", "kernels.deep.again", "kernels.star", "kernels.star.arm"}


@pytest.fixture
def tree(tmp_path, monkeypatch):
    for name, text in TREE.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(text)
    monkeypatch.syspath_prepend(tmp_path)
    return tmp_path


def test_imports_of_every_form(tree):
    found = sources.reached(("kernels.build",))
    assert {name for name in found if name.startswith("kernels")} == COUNTED
    assert {"tkq.norms", "tkq.norms.spec",
            "tkq.reduction.geometry"} <= set(found) and "tkq.norms.forward.row_norm" not in found


@pytest.mark.parametrize("name", sorted(TREE))
def test_each_file_that_counts_changes_the_digest_and_no_other_does(tree, name):
    before = sources.digest(("kernels.build",))
    (tree / name).write_text((tree / name).read_text() + "EDITED = 1\n")
    assert sources.digest(("kernels.build",)) == before  # read once a process
    sources.clear()
    assert (sources.digest(("kernels.build",)) == before) == (name == "kernels/other.py")


@pytest.mark.parametrize("line", ("import tkq", "import tkq as t", "import os, tkq.reduction.geometry  # binds tkq",
                                  "from tkq import ReductionBase",
                                  "import importlib; importlib.import_module('tkq')", "from tkq import *"))
def test_what_imports_tkq_itself_may_use_all_of_it(tmp_path, monkeypatch, line):
    (tmp_path / "whole_of_tkq.py").write_text(f"{line}\n")
    monkeypatch.syspath_prepend(tmp_path)
    found = set(sources.reached(("whole_of_tkq",)))
    every = {name for name, _ in every_module() if name.startswith("tkq.") and not sources._HOST_ONLY.fullmatch(name)}
    assert every <= found and "tkq.cli.doctor" not in found
    (tmp_path / "part_of_tkq.py").write_text("from tkq import tile as tk, utils\n"
                                             "import tkq.reduction.geometry as plan\n")
    part = set(sources.reached(("part_of_tkq",)))
    assert {"tkq.utils", "tkq.tile.mma", "tkq.reduction.geometry"} <= part and "tkq.norms.forward.row_norm" not in part


def test_a_module_that_lies_elsewhere(tmp_path, monkeypatch):
    (tmp_path / "moved").mkdir()
    (tmp_path / "elsewhere").mkdir()
    (tmp_path / "moved/__init__.py").write_text(f"__path__.append({str(tmp_path / 'elsewhere')!r})\n")
    (tmp_path / "elsewhere/builder.py").write_text("")
    monkeypatch.syspath_prepend(tmp_path)
    assert sources.reached(("moved.builder",))["moved.builder"] == str(tmp_path / "elsewhere/builder.py")
    with pytest.raises(ImportError, match=r"moved\.nothing: has no source file"):
        sources.digest(("moved.nothing",))
