"""A bundle: kernels in one library, which a process without the DSL, a compiler and a cache runs."""
import json
import os
import pathlib
import shutil
import subprocess

import pytest
import torch

from tests.helpers.process import fresh
from tests.helpers.process.kernels_for_tests import Scale
from tkq.runtime import Recipe, function
from tkq.runtime.call import dispatch
from tkq.runtime.compile import build, bundle, bundling, digests, keys, link
from tkq.runtime.compile.cache import Cache, packed, unpacked

CHECKOUT = pathlib.Path(__file__).resolve().parents[4]
BUILDER = "tests.helpers.process.kernels_for_tests:build_scale"
RECIPES = [Recipe(BUILDER, (Scale(factor=factor),)) for factor in (2.0, 3.0)]
WITHOUT_DSL = "import tests.helpers.process.without_dsl"
PROCESS = f"""
import json, sys, time
import torch
from tkq.runtime import Recipe, function
from tkq.runtime.call import dispatch as dispatcher
from tkq.runtime.compile import bundle, keys, link
class Scale:  # as the module has it that cannot be imported here
    def __init__(self, factor): self.dtype, self.factor, self.log = "fp32", factor, ""
    def __repr__(self): return f"Scale(dtype='fp32', factor={{self.factor}}, log='')"
def scaled(factor):
    x, y = torch.arange(3.0), torch.full((3,), float("nan"))
    function(Recipe("{BUILDER}", (Scale(factor),)))(x, y)
    return y.tolist()
seen = dict(two=scaled(2.0), three=scaled(3.0), dsl="cutlass" in sys.modules, compiler=link.compiler(),
            versions=[keys.version("nvidia-cutlass-dsl"), keys.flavour()], path=str(bundle.current().path),
            dispatcher=dispatcher._in_c() is not None)
try:
    scaled(4.0)
except RuntimeError as error:
    seen["error"] = str(error)
print(json.dumps(seen))
"""

pytestmark = pytest.mark.skipif(link.why_not() is not None or link.runtime_kind() != "static",
                                reason="no C compiler, or no static runtime of the DSL")


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    """A folder with a bundle of both kernels."""
    folder, before = tmp_path_factory.mktemp("bundle"), build._cache
    build._cache = Cache(tmp_path_factory.mktemp("cache"))
    try:
        first = {recipe: bundling.compiled(recipe) for recipe in RECIPES}
        again = {recipe: bundling.compiled(recipe) for recipe in RECIPES}
        assert all(first[r] == (*again[r][:2], True) and again[r][2] is False for r in RECIPES)  # objects are cached
        bundling.write(folder, {recipe: found[:2] for recipe, found in again.items()})
    finally:
        build._cache = before
    return folder


@pytest.fixture(autouse=True)
def asked_anew(monkeypatch, tmp_path):
    monkeypatch.setattr(build, "_functions", {})
    monkeypatch.setattr(build, "_cache", Cache(tmp_path / "cache"))
    bundle.current.cache_clear()
    yield
    bundle.current.cache_clear()


def test_what_was_compiled_for_it_serves_without_it(monkeypatch):
    """The cache's object file is linked, and not compiled again."""
    symbol, *_ = bundling.compiled(RECIPES[0])
    monkeypatch.setattr(build, "compile_recipe", lambda *a, **b: pytest.fail("it was compiled again"))
    assert build.ensure(RECIPES[0]) and not build.ensure(RECIPES[0])
    note = build.entry_of(RECIPES[0]).note
    assert (note["kind"], note["symbol"]) == ("static", symbol) and "dynamic_smem" in note
    build.function(RECIPES[0])


def test_no_source_is_parsed_for_it(made, monkeypatch):
    """Its note has the digests: a machine with the same files may have no cache to remember them in."""
    monkeypatch.setenv("TKQ_BUNDLE", str(made))
    keys.sources.clear()
    digests.clear()
    held = bundle.current()
    monkeypatch.setattr(keys.sources, "_normalised", None)  # would raise if called
    assert {keys.bundled_name(recipe) for recipe in RECIPES} == set(held.note["kernels"])
    keys.sources.clear()


def test_a_process_without_the_dsl_runs_it(made, tmp_path):
    path = made / bundle.NAME
    environment = {**os.environ, "TKQ_BUNDLE": str(made), "TKQ_CACHE_DIR": str(tmp_path / "none"), "PATH": ""}
    done = fresh.run(PROCESS, before=WITHOUT_DSL, env=environment)
    assert done.returncode == 0, done.stderr
    seen = json.loads(done.stdout)
    error = seen.pop("error")
    assert seen == dict(two=[0, 2, 4], three=[0, 3, 6], dsl=False, compiler=None, versions=[None, None],
                        path=str(path), dispatcher=True)
    assert f"not in the bundle {path}, nor in {tmp_path / 'none'}, and cutlass" in error and "factor=4.0" in error
    assert not done.stderr


HOST_PATHS = """
import json, sys
from tests.helpers.ops import smoke
from tkq.runtime.compile import keys
recipes = smoke.recipes()
print(json.dumps([len(set(map(keys.bundled_name, recipes))), len(recipes), "cutlass" in sys.modules]))
"""


def test_no_host_function_needs_the_dsl():
    """Every op's, forward and backward, up to the launch: see tests/helpers/ops/smoke.py."""
    done = fresh.run(HOST_PATHS, before=WITHOUT_DSL, env={**os.environ, "PATH": ""})
    assert done.returncode == 0, done.stderr
    names, recipes, dsl = json.loads(done.stdout)
    assert names == recipes > 50 and not dsl


def test_it_is_found_beside_the_package_and_comes_before_the_cache(made, monkeypatch):
    assert bundle.ADJACENT == CHECKOUT / "tkq_bundle" and not bundle.ADJACENT.exists()
    monkeypatch.delenv("TKQ_BUNDLE", raising=False)
    assert bundle.current() is None
    bundle.current.cache_clear()
    monkeypatch.setattr(bundle, "ADJACENT", made)
    monkeypatch.setattr(keys, "entry_name", None)  # would raise if the cache were asked
    x, y = torch.arange(3.0), torch.empty(3)
    function(RECIPES[1])(x, y)
    assert y.tolist() == [0, 3, 6] and all(map(bundle.current().has_native, bundle.NATIVE))
    assert dispatch._in_c.__wrapped__() is not None and not build.cache().folder.exists()


def test_what_it_lacks_comes_from_elsewhere(made, monkeypatch):
    monkeypatch.setenv("TKQ_BUNDLE", str(made / bundle.NAME))  # the file itself
    asked = []
    monkeypatch.setattr(build, "function", lambda recipe: asked.append(recipe) or "compiled")
    other = Recipe(BUILDER, (Scale(factor=5.0),))
    assert function(other) == "compiled" and asked == [other]
    assert function(RECIPES[0]) != "compiled" and len(asked) == 1


@pytest.mark.parametrize("damage, words", (
    (lambda data: data[:1000], "damaged"),
    (lambda data: data[:200] + bytes([data[200] ^ 1]) + data[201:], "damaged"),
    (lambda data: packed(b"", {"kind": "static"}), "no bundle"),
    (lambda data: packed(unpacked(data)[0], {**unpacked(data)[1], "arch": "sm_100a"}), "sm_100a"),
    (lambda data: packed(unpacked(data)[0], {**unpacked(data)[1], "machine": "aarch64"}), "aarch64"),
    (None, "No such file"),
))
def test_one_that_cannot_be_used_is_named_and_left(made, tmp_path, monkeypatch, damage, words):
    if damage:
        (tmp_path / bundle.NAME).write_bytes(damage((made / bundle.NAME).read_bytes()))
    monkeypatch.setenv("TKQ_BUNDLE", str(tmp_path))
    with pytest.warns(UserWarning, match=words):
        assert bundle.current() is None
    assert bundle.current() is None  # said once


def test_one_that_everybody_may_write_is_refused(made, tmp_path, monkeypatch):
    shutil.copy(made / bundle.NAME, tmp_path)
    tmp_path.chmod(0o777)
    monkeypatch.setenv("TKQ_BUNDLE", str(tmp_path))
    with pytest.warns(UserWarning, match="written by everybody.*TKQ_BUNDLE"):
        assert bundle.current() is None


def test_the_names_in_it_are_of_sources_and_arguments_alone(monkeypatch):
    named = [keys.bundled_name(recipe) for recipe in RECIPES]
    for part in ("toolchain", "flavour"):
        monkeypatch.setattr(keys, part, lambda: "another")
    assert [keys.bundled_name(recipe) for recipe in RECIPES] == named and named[0] != named[1]
    monkeypatch.setattr(keys.sources, "digest", lambda modules, as_text: "edited")
    assert keys.bundled_name(RECIPES[0]) != named[0]


def test_the_library_shows_its_functions_alone_and_no_machine(made):
    path = made / bundle.NAME
    data, note = unpacked(path.read_bytes())
    assert len(note["kernels"]) == 2 and path.stat().st_mode & 0o777 == 0o644
    assert str(CHECKOUT).encode() not in data and b"/nvidia/" not in data and b"/site-packages/" not in data
    if shutil.which("nm"):
        listed = subprocess.run(["nm", "-D", "--defined-only", path], capture_output=True, text=True, check=True).stdout
        shown = {line.split()[-1] for line in listed.splitlines()}
        kernels = {f"__tvm_ffi_{symbol}" for symbol in note["kernels"].values()}
        assert shown == {"__tvm_ffi_added", "tkq_add", "tkq_functions", "tkq_new", "tkq_prepare", "tkq_route", *kernels}


def test_what_cannot_be_linked_says_why(made, tmp_path, monkeypatch):
    with pytest.raises(RuntimeError, match=r"cannot be linked: kernels call .*CuteDSLRT_Other"):
        bundling.write(tmp_path, {RECIPES[0]: ("tkq_x", b"CuteDSLRT_Other")})
    with pytest.raises(RuntimeError, match="cannot be linked: .*tkq_x"):
        bundling.write(tmp_path, {RECIPES[0]: ("tkq_x", b"no object")})
    monkeypatch.setattr(link, "compiler", lambda: None)
    with pytest.raises(RuntimeError, match="no C compiler"):
        bundling.write(tmp_path, {})
    assert not list(tmp_path.glob("*.so"))
