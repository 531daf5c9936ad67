"""`make lint` can fail: each contract of imports, the spelling; and ruff's exceptions are needed."""
import json
import shutil
import subprocess
import sys
from fnmatch import fnmatchcase
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[3]
LIMITS = ("C901", "PLR0911", "PLR0912", "PLR0913", "PLR0915")

# What breaks each contract: {contract: {new file: its source}, what is reported}
BAD = {
    "Layers: each imports only those below": (
        {"tkq/tile/sees_above.py": "import tkq.viz.grid"}, "tkq.tile.sees_above -> tkq.viz.grid"),
    "Layers of tkq.attention": (
        {"tkq/attention/common/up.py": "from ..forward import plan"},
        "tkq.attention.common.up -> tkq.attention.forward.plan"),
    "Layers of tkq.gemm": (
        {"tkq/gemm/dense/up.py": "from ..fp8 import spec"}, "tkq.gemm.dense.up -> tkq.gemm.fp8.spec"),
    "Layers of tkq.rows": (
        {"tkq/rows/one_pass/aside.py": "from ..persistent import plan"},
        "tkq.rows.one_pass.aside -> tkq.rows.persistent.plan"),
    "Layers of tkq.runtime": (
        {"tkq/runtime/system/up.py": "from ..compile import keys"},
        "tkq.runtime.system.up -> tkq.runtime.compile.keys"),
    "No circles between modules, nor between packages": (
        {"tkq/softmax/there.py": "def f():\n    from . import back", "tkq/softmax/back.py": "from . import there"},
        "No cycles are allowed in tkq.softmax"),
    "Kernels import no torch": (
        {"tkq/softmax/kernel_of_torch.py": "import cutlass\nfrom ..runtime.call import check"},
        "tkq.softmax.kernel_of_torch -> tkq.runtime.call.check -> torch"),
    "Host functions import no kernels": (
        {"tkq/softmax/host.py": "import torch\nfrom . import forward"}, "tkq.softmax.host -> tkq.softmax.forward -> "),
    "Specs, plans and configs are pure Python": (
        {"tkq/softmax/other_plan.py": "def f():\n    import cutlass"}, "tkq.softmax.other_plan -> cutlass"),
    "tkq imports no benchmark, no test, no peer": (
        {"tkq/softmax/peer.py": "from quack import softmax"}, "tkq.softmax.peer -> quack"),
    "The public face is for users": (
        {"tkq/softmax/face.py": "from tkq import softmax_of"}, "tkq.softmax.face -> tkq"),
}


def test_new_imports_break_the_contracts(tmp_path):
    pytest.importorskip("importlinter", reason="import-linter is not installed")
    for part in ("tkq", "tests/helpers/lint"):
        shutil.copytree(ROOT / part, tmp_path / part, ignore=shutil.ignore_patterns("__pycache__"))
    for file in ("pyproject.toml", "tests/__init__.py", "tests/helpers/__init__.py"):
        shutil.copy(ROOT / file, tmp_path / file)
    before = run("tests.helpers.lint", cwd=tmp_path)
    assert before.returncode == 0, before.stdout
    for files, _ in BAD.values():
        for file, source in files.items():
            (tmp_path / file).write_text(source)
    after = run("tests.helpers.lint", cwd=tmp_path)
    assert after.returncode == 1
    said = " ".join(after.stdout.split())
    for contract, (_, report) in BAD.items():
        assert f"{contract} KEPT" in " ".join(before.stdout.split())
        assert f"{contract} BROKEN" in said
        assert report in said
    assert f"Contracts: 0 kept, {len(BAD)} broken." in said, "a contract without a violation in BAD"


def test_no_import_is_excepted_from_the_contracts():
    tomllib = pytest.importorskip("tomllib", reason="Python 3.10 has no tomllib")
    contracts = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["importlinter"]["contracts"]
    excepted = [contract["name"] for contract in contracts if "ignore_imports" in contract]
    assert len(contracts) == len(BAD) and not excepted, "move what is imported to where all may import it"


def test_sources_of_a_contract_mean_modules():
    grimp = pytest.importorskip("grimp", reason="import-linter is not installed")
    from tests.helpers.lint.reach import matched
    graph = grimp.ImportGraph()
    for module in ("a.spec", "a.my_plan", "a.plans"):
        graph.add_module(module)
    graph.add_import(importer="a.plans", imported="torch")
    assert matched(graph, "importers of torch") == {"a.plans"}
    assert matched(graph, "modules *plan") == {"a.my_plan"}
    for nothing in ("importers of numpy", "modules config", "a.spec"):
        with pytest.raises(ValueError, match=nothing):
            matched(graph, nothing)


def test_misspelt_words_are_found(tmp_path):
    pytest.importorskip("codespell_lib", reason="codespell is not installed")
    shutil.copy(ROOT / "pyproject.toml", tmp_path)
    (tmp_path / "docs").mkdir()
    for file in ("docs/page.md", "module.py"):
        (tmp_path / file).write_text("# The " + "ad" + "ress of a subtile.\n")
    found = run("codespell_lib", cwd=tmp_path)
    assert found.returncode and len(found.stdout.splitlines()) == 2, found.stdout + found.stderr
    (tmp_path / "docs/page.md").write_text("The address of a subtile.\n")
    (tmp_path / "module.py").unlink()
    assert run("codespell_lib", cwd=tmp_path).returncode == 0


def test_exceptions_from_limits_are_needed():
    pytest.importorskip("ruff", reason="ruff is not installed")
    tomllib = pytest.importorskip("tomllib", reason="Python 3.10 has no tomllib")
    listed = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["ruff"]["lint"]["per-file-ignores"]
    allowed = {(pattern, rule) for pattern, rules in listed.items() for rule in rules if rule in LIMITS}
    assert allowed
    found = run("ruff", "check", "--no-cache", "--output-format=json", f"--select={','.join(LIMITS)}",
                "--config=lint.per-file-ignores={}", cwd=ROOT)
    above = {(Path(one["filename"]).relative_to(ROOT).as_posix(), one["code"]) for one in json.loads(found.stdout)}
    unneeded = [f"{pattern}: {rule}" for pattern, rule in sorted(allowed)
                if not any(code == rule and fnmatchcase(file, pattern) for file, code in above)]
    assert not unneeded, f"within the limits, moved or gone: take these off pyproject.toml: {unneeded}"


def run(module, *arguments, cwd):
    command = [sys.executable, "-m", module, *arguments]
    return subprocess.run(command, cwd=cwd, capture_output=True, text=True, timeout=60)
