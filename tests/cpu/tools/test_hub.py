"""`make hub`: tkq as a kernel of the Hugging Face hub works under another name, where there is no tkq."""
import ast
import json
import os
import pathlib
import re
import subprocess
import sys

import pytest

from tkq.warmup import hub

NAME = "tkq_cuda_0"

LOADED = """
import importlib, importlib.util, json, pathlib, pkgutil, sys
import torch
variant = pathlib.Path(sys.argv[1])
name = json.loads((variant / "metadata.json").read_text())["id"]


class Refuse:
    def find_spec(self, wanted, path=None, target=None):
        if wanted.partition(".")[0] == "tkq":
            raise ImportError(f"{wanted}: looked for by this name")


def load(name, file):
    spec = importlib.util.spec_from_file_location(name, file)
    sys.modules[name] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(sys.modules[name])
    return sys.modules[name]


def check(tkq):
    assert torch.equal(tkq.rmsnorm(x, w), want)
    y = torch.compile(tkq.rmsnorm, backend="eager", fullgraph=True)(x, w)  # by the registered operator
    assert torch.equal(y, want)


sys.meta_path.insert(0, Refuse())
kernel = load(name, variant / "__init__.py")
x, w = torch.randn(4, 64), torch.randn(64)
want = kernel.rmsnorm(x, w)
torch.testing.assert_close(want, torch.nn.functional.rms_norm(x, (64,), w, 1e-6))
check(kernel)
norm = kernel.layers.RMSNorm()
norm.weight, norm.variance_epsilon = torch.nn.Parameter(w), 1e-6
assert torch.equal(norm(x), want)
earlier = load("kernel_of_an_earlier_version", variant / "tkq" / "__init__.py")
assert earlier.rmsnorm is kernel.rmsnorm and earlier.layers is kernel.layers
for module in pkgutil.walk_packages(kernel.__path__, f"{name}."):
    if module.name != f"{name}.tkq":
        importlib.import_module(module.name)
assert all(getattr(kernel, public) for public in kernel.__all__)
catalog = importlib.import_module(f"{name}.warmup.catalog")
report = importlib.import_module(f"{name}.testing.sass").report(catalog.select(["rmsnorm"])[0].recipe)
assert report[0].registers > 0, report
assert "tkq" not in sys.modules
sys.meta_path.pop(0)
import tkq  # beside it
check(tkq)
print("all is well")
"""


@pytest.fixture(scope="module")
def variant(tmp_path_factory):
    return hub.write(tmp_path_factory.mktemp("hub"))


@pytest.mark.slow
def test_it_works_under_another_name(variant, tmp_path):
    """Every module of it, its operators beside those of tkq, a kernel's compilation."""
    done = subprocess.run([sys.executable, "-c", LOADED, variant], capture_output=True, text=True, timeout=300,
                          cwd=tmp_path, env={**os.environ, "PYTHONPATH": str(pathlib.Path(hub.__file__).parents[2])})
    assert done.stdout.endswith("all is well\n"), done.stderr[-2000:]


def test_no_import_is_of_tkq(variant):
    """In functions neither; in docstrings it may stand."""
    looked = [path for path in variant.rglob("*.py") if re.search(r"^\s*(from|import) tkq\b", path.read_text(), re.M)]
    for path in looked:
        for node in ast.walk(ast.parse(path.read_text())):
            names = [part.name for part in node.names] if isinstance(node, ast.Import) else (
                [node.module or ""] if isinstance(node, ast.ImportFrom) and not node.level else [])
            assert all(name.partition(".")[0] != "tkq" for name in names), path


def test_the_folder(variant):
    given = json.loads((variant / "metadata.json").read_text())
    assert given["id"] == hub.identifier() and given["id"].isidentifier() and given["name"] == "tkq"
    assert isinstance(given["version"], int) and given["backend"]["type"] == "cuda"
    assert variant.parts[-2:] == ("build", "torch-cuda") and (variant.parents[1] / "README.md").is_file()
    there = {path.relative_to(variant).as_posix() for path in variant.rglob("*") if path.is_file()}
    assert {"layers.py", "tkq/__init__.py", "runtime/call/dispatch.c"} <= there
    assert not any(name.startswith(("cli/", "viz/", "integrations/transformers")) for name in there)
    kernels = pytest.importorskip("kernels._rust", reason="kernels is not installed")
    assert kernels.Metadata.read_from_file(variant / "metadata.json").name.python_name == "tkq"


@pytest.mark.parametrize("line, wanted", [
    ("from tkq import runtime", "from ... import runtime"),
    ("from tkq.runtime.call import check", "from ...runtime.call import check"),
    ("def f():\n    import tkq.tile as tk", "def f():\n    from ... import tile as tk"),
    ("import tkq.a.b as c", "from ...a import b as c"),
    ("import tkq", "from ... import _root as tkq"),
    ("x = 'tkq.norms.kernel:Norm', f'tkq.{x}', f'tkq::{x}', 'tkq'",
     f"x = '{NAME}.norms.kernel:Norm', f'{NAME}.{{x}}', f'{NAME}::{{x}}', '{NAME}'"),
    ("x = 'tkq: a word', 'tkq-kernels', b'tkq.', 'of tkq.x'", "x = 'tkq: a word', 'tkq-kernels', b'tkq.', 'of tkq.x'"),
    ('"""tkq.norms: what it is."""', '"""tkq.norms: what it is."""'),
    ("op = torch.ops.tkq.norm", f"op = torch.ops.{NAME}.norm"),
    ("from tkqx import y", "from tkqx import y"),
])
def test_what_is_renamed(line, wanted):
    assert hub.renamed(line + "\n", "norms/forward/kernel.py", NAME) == wanted + "\n"


def test_files_where_the_name_is_no_module():
    line = "folder = place / 'tkq'\n"
    assert hub.renamed(line, "runtime/compile/cache.py", NAME) == line
    assert hub.renamed("x = r'[ ]*tkq\\.x'\n", "runtime/compile/sources.py", NAME) == f"x = r'[ ]*{NAME}\\.x'\n"


@pytest.mark.parametrize("line", ["import tkq.tile", "import tkq, os"])
def test_imports_in_another_form_are_refused(line):
    with pytest.raises(ValueError, match=r"norms/x.py, line 1: allowed are"):
        hub.renamed(line, "norms/x.py", NAME)
