"""A kernel of a user's: what it imports counts wherever it lies, and the plain values that it reads count too."""
import importlib
import json
import os
import subprocess
import sys
import textwrap
import time

import pytest

from tkq.runtime import Recipe
from tkq.runtime.compile import keys, sources, values

TREE = {
    "kern.py": """
        import os, math
        import helper
        from helper import SIZE as size
        from pack.mod import thing
        import space.inner
        N = int(os.environ.get("KERN_N", 4))
        LITERAL = 7
        STARTED = os.getpid()          # no part of a kernel
        def build(): return helper.f(N) + size + LITERAL + thing()
    """,
    "helper.py": "from below import *\nimport later\ndef f(n): return n\nSIZE = 3\n",
    "below.py": "X = 1\n",
    "later.py": "def g():\n    import lazy\n    from pack import other\n",
    "lazy.py": "",
    "pack/__init__.py": "",
    "pack/mod.py": "from . import near\nfrom .relative import *\ndef thing(): return near.VALUE\n",
    "pack/near.py": "VALUE = 2\n",
    "pack/relative.py": "",
    "pack/other.py": "",
    "pack/unused.py": "",
    "space/inner.py": "",  # a package without __init__
    "unused.py": "",
    "site-packages/installed.py": "import unused\n",
}
BUILD = Recipe("kern:build")
COUNTED = set(TREE) - {"unused.py", "pack/unused.py", "site-packages/installed.py"}


@pytest.fixture
def tree(tmp_path, monkeypatch):
    for name, text in TREE.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(textwrap.dedent(text))
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.delenv("KERN_N", raising=False)
    before = set(sys.modules)
    yield tmp_path
    for name in set(sys.modules) - before:
        if getattr(sys.modules[name], "__file__", None) and str(tmp_path) in sys.modules[name].__file__:
            del sys.modules[name]


@pytest.fixture(autouse=True)
def clear():
    sources.clear()
    yield
    sources.clear()


def named():
    sources.clear()
    return keys.entry_name(BUILD), keys.bundled_name(BUILD)


@pytest.mark.parametrize("loaded", (False, True))
@pytest.mark.parametrize("name", sorted(TREE))
def test_each_file_that_is_imported_counts(tree, name, loaded):
    if loaded:
        importlib.import_module("kern")
    before = named()
    (tree / name).write_text((tree / name).read_text() + "EDITED = 1\n")
    changed = [one != other for one, other in zip(before, named())]
    assert changed == [name in COUNTED] * 2


def test_files_of_python_and_of_installed_packages_do_not_count(tree, monkeypatch):
    (tree / "kern.py").write_text("import json, installed, pytest, torch, numpy\n")
    monkeypatch.syspath_prepend(tree / "site-packages")
    found = {name for name in sources.reached(("kern",)) if not name.startswith("tkq")}
    assert found == {"kern"}
    versions = dict(pair for pair in sources.versions(("kern",)) if isinstance(pair[0], str))
    assert set(versions) == {"installed", "pytest"} and versions["pytest"] == pytest.__version__
    before = named()
    (tree / "site-packages/installed.py").write_text("__version__ = 2\n")
    after = named()
    assert before[0] != after[0] and before[1] == after[1]  # a bundle's machine may have another one, or none


def test_a_module_in_the_place_of_pythons_own_counts(tree):
    (tree / "kern.py").write_text("import this_is_no_module_of_python, colorsys\n")
    (tree / "this_is_no_module_of_python.py").write_text("")
    assert {"kern", "this_is_no_module_of_python"} == {n for n in sources.reached(("kern",)) if n[:3] != "tkq"}


def test_what_pip_has_put_beside_the_users_own_is_installed(tree):
    (tree / "kern.py").write_text("import six_of_ours, mine\n")
    (tree / "six_of_ours.py").write_text("")
    (tree / "mine.py").write_text("")
    (tree / "six.of-ours-1.2.dist-info").mkdir()
    (tree / "six.of-ours-1.2.dist-info/METADATA").write_text("Name: six.of-ours\nVersion: 1.2\n")
    assert {n for n in sources.reached(("kern",)) if n[:3] != "tkq"} == {"kern", "mine"}


def test_classes_of_arguments_of_other_modules_count(tree):
    kern = importlib.import_module("below")
    kern.Spec = type("Spec", (), {"__module__": "below", "__repr__": lambda self: "Spec()"})
    recipe = Recipe("unused:build", (kern.Spec(),))
    assert keys.modules_of(recipe) == ("below", "unused")


def test_kernels_of_tkq_look_at_nothing_else():
    recipe = Recipe("tkq.norms.forward.kernel:PlainNorm", (1,))
    modules = keys.modules_of(recipe)
    assert sources.versions(modules) == sources.environment(modules) == values.of(recipe, modules) == ()
    keys.entry_name(recipe)
    began = time.process_time()
    for _ in range(100):
        sources.versions(modules), sources.environment(modules), values.of(recipe, modules)
    assert time.process_time() - began < 0.01


# ---- values ---------------------------------------------------------------------------------------------------------

NAME = """
import sys, json
if sys.argv[1] == "loaded": import kern
from tkq.runtime.compile import keys; from tkq.runtime import Recipe
print(json.dumps([keys.entry_name(Recipe("kern:build")), keys.bundled_name(Recipe("kern:build"))]))
"""


def of_process(tree, loaded, **environment):
    done = subprocess.run([sys.executable, "-c", NAME, "loaded" if loaded else ""], capture_output=True, text=True,
                          env={**os.environ, "PYTHONPATH": os.pathsep.join([str(tree), *sys.path]), **environment})
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


def test_a_value_that_comes_from_the_environment(tree):
    """In new processes, as they come: with the module loaded, and without."""
    for loaded in (False, True):
        four, again, eight = of_process(tree, loaded), of_process(tree, loaded), of_process(tree, loaded, KERN_N="8")
        assert four == again and four[0] != eight[0] and four[1] != eight[1]


def values_of(recipe=BUILD):
    sources.clear()
    return {f"{where}.{name}": text for where, name, text in values.of(recipe, keys.modules_of(recipe))}


def test_values_that_the_kernel_reads(tree):
    kern = importlib.import_module("kern")
    found = values_of()
    assert found == {"kern.N": "4", "kern.size": "3"}  # what the text has as a literal of that name counts by the text
    kern.N = 8
    kern.LITERAL = 9  # set from outside
    kern.helper.SIZE = 5  # not read
    sys.modules["pack.near"].VALUE = 6
    assert values_of() == {"kern.N": "8", "kern.size": "3", "kern.LITERAL": "9", "pack.near.VALUE": "6"}
    before = keys.entry_name(BUILD)
    kern.N = 4
    assert keys.entry_name(BUILD) != before


CLASS = """
import dataclasses, enum, functools, os
class Kind(enum.Enum):
    A = 1
    B = 2
@dataclasses.dataclass(frozen=True)
class Config:
    tile: tuple = (64, 64)
CHOSEN, CONFIG = Kind.A, Config()
TABLE = {"a": [1, 2.5], "b": None, "c": {3, 4}}
TENSOR = object()                       # no plain value
UNREAD = os.getpid()
def decorated(f):
    @functools.wraps(f)
    def wrapper(*a): return f(*a)
    return wrapper
def deep(x, n=UNREAD * 0 + 5, literal: int = 6, *, m=-1 / 2, other="a"): return x * SCALE
SCALE = float("2")
class Base:
    WIDTH = int("16")
    LITERAL = 3
    @decorated
    def kernel(self): return deep(CHOSEN, CONFIG), TENSOR, self.WIDTH, os.environ["KERN_FLAG"]
class Kernel(Base):
    @classmethod
    def launch(cls): return (lambda: TABLE)()
    @property
    def rows(self): return [OTHER for _ in "ab"]
OTHER = -1 + 0
"""


def test_values_of_every_kind_and_way(tree, monkeypatch):
    monkeypatch.setenv("KERN_FLAG", "fast")
    (tree / "kern.py").write_text(CLASS)
    kern = importlib.import_module("kern")
    recipe = Recipe("tkq.rows.persistent.build:build", (Named("kern", "Kernel"),), sources=("kern",))
    assert values_of(recipe) == {
        "kern.CHOSEN": "<Kind.A: 1>", "kern.CONFIG": "Config(tile=(64, 64))", "kern.SCALE": "2.0", "kern.OTHER": "-1",
        "kern.Base.WIDTH": "16", "kern.deep(n)": "5", "kern.deep(m)": "-0.5", "environment.KERN_FLAG": "fast"}
    kern.TABLE["a"].append(3)
    assert values_of(recipe)["kern.TABLE"] == "{'a': [1, 2.5, 3], 'b': None, 'c': {3, 4}}"
    kern.Kernel.WIDTH = 32
    assert values_of(recipe)["kern.Kernel.WIDTH"] == "32"


class Named:
    """As RowSpec and ReductionSpec name a class."""

    __dataclass_fields__ = ("module", "qualname")

    def __init__(self, module, qualname):
        self.module, self.qualname = module, qualname

    def __repr__(self):
        return f"Named({self.module}, {self.qualname})"


def test_a_kernel_in_an_installed_package(tree, monkeypatch):
    """Its own package counts, wherever it lies."""
    package = tree / "site-packages/kernels"
    package.mkdir()
    (package / "__init__.py").write_text("")
    (package / "kern.py").write_text("from . import sizes\ndef build(): return sizes.N\n")
    (package / "sizes.py").write_text("import os\nN = int(os.environ.get('KERN_N', 4))\n")
    monkeypatch.syspath_prepend(tree / "site-packages")
    importlib.import_module("kernels.kern")
    recipe = Recipe("kernels.kern:build")
    assert values_of(recipe) == {"kernels.sizes.N": "4"}
    assert sources.environment(keys.modules_of(recipe)) == (("KERN_N", None),)
    assert {"kernels", "kernels.kern", "kernels.sizes"} <= set(sources.reached(keys.modules_of(recipe)))


def test_types_and_aliases(tree):
    text = ("import numpy as np, torch\nfrom cutlass import Float32, Int32\n"
            "A, B, C = np.float32(0.5), torch.float16, np.dtype('int8')\n"
            "ACC = {1: Float32, 2: Int32}[%s]\ndef relu(x): return x\ndef gelu(x): return x\n"
            "ACT = [None, relu, gelu][%s]\ndef build(): return ACT(ACC(A)), B, C, Float32\n")
    (tree / "kern.py").write_text(text % (1, 2))
    importlib.import_module("kern")
    found = values_of()
    assert found.pop("kern.ACC").endswith(".Float32") and found.pop("kern.A") in ("0.5", "np.float32(0.5)")
    assert found == {"kern.B": "torch.float16", "kern.C": "dtype('int8')", "kern.ACT": "kern.gelu"}


OBJECTS = """
import argparse, collections, dataclasses, functools, os, threading, types
import numpy as np
E = os.environ
Z = int(E.get("KERN_" + "Z", "1"))
@dataclasses.dataclass
class Config:
    n: int = 0
    lock: object = dataclasses.field(default_factory=threading.Lock)
class Sizes:
    __slots__ = ("n", "again")
    def __init__(self, n): self.n, self.again = n, self
    def method(self): return self.n
class Meta(type):
    WIDTH = Z
class OfMeta(metaclass=Meta): pass
def one(n=0): return 1
def two(n=0): return 2
def with_n(n):
    def decorator(f):
        @functools.wraps(f)
        def wrapper(): return f() + n
        return wrapper
    return decorator
@with_n(Z)
def decorated(): return 1
exec("def executed(): return %d" % Z)
Pair = collections.namedtuple("Pair", "a b")
THINGS = dict(
    config=Config(Z), sizes=Sizes(Z), method=Sizes(Z).method, space=types.SimpleNamespace(n=Z), pair=Pair(1, Z),
    namespace=argparse.Namespace(n=Z), partial=functools.partial(one, Z), keyword=functools.partial(one, n=Z),
    function={"x": [one, two][Z - 1]}, deep=[[[[[[[Z]]]]]]], proxy=types.MappingProxyType({"n": Z}),
    array=np.array([Z]), range=range(Z), slice=slice(Z),
    set=({"a", "b", "c", str(Z)}, {frozenset(("x", "y", "z")): Z}), meta=OfMeta, decorated=decorated, executed=executed)
THING = THINGS[E["KERN_THING"]]
def build(): return THING
"""
THINGS = ("config", "sizes", "method", "space", "namespace", "pair", "partial", "keyword", "function", "deep", "proxy",
          "array", "range", "slice", "set", "meta", "decorated", "executed")


@pytest.mark.parametrize("thing", THINGS)
def test_objects_that_hold_values(tree, monkeypatch, thing):
    """What they hold counts; where nothing changes, the next process asks for the same."""
    (tree / "kern.py").write_text(OBJECTS)
    monkeypatch.setenv("KERN_THING", thing)

    def found(z):
        monkeypatch.setenv("KERN_Z", z)
        sys.modules.pop("kern", None)
        importlib.import_module("kern")
        return values_of()

    assert found("1") == found("1") and found("1") != found("2")


def test_a_set_within_has_one_text_in_every_process(tree):
    (tree / "kern.py").write_text(OBJECTS)
    for thing in ("set", "config"):
        one, other = (of_process(tree, True, KERN_THING=thing, PYTHONHASHSEED=seed) for seed in "12")
        assert one == other


@pytest.mark.parametrize("line", [
    "import importlib\nmodule = importlib.import_module('loaded' + '_late')",
    "from importlib import util\ns = util.spec_from_file_location('any', __file__.replace('kern', 'loaded_late'))\n"
    "module = util.module_from_spec(s)\ns.loader.exec_module(module)",
    "import helper as module\nmodule.f = __import__('loaded_' + 'late').f"])
def test_files_that_no_import_names(tree, line):
    """By a name or a path that is made up, or put in the place of another function."""
    (tree / "kern.py").write_text(f"{line}\nf = module.f\ndef build(): return f()\n")
    (tree / "helper.py").write_text("def f(): return 0\n")
    found = []
    for n in "12":
        (tree / "loaded_late.py").write_text(f"def f(): return {n}\n")
        found.append(of_process(tree, True))
    assert found[0][0] != found[1][0]


def test_a_module_is_imported_for_values_that_its_text_does_not_show(tree):
    (tree / "kern.py").write_text("import os\nKEY = 'KERN_' + 'Z'\nN = os.environ.get(KEY)\ndef build(): return N\n")
    assert of_process(tree, False) == of_process(tree, True)
    assert of_process(tree, False, KERN_Z="1")[0] != of_process(tree, False, KERN_Z="2")[0]


def test_long_chains_of_functions(tree):
    lines = [f"def f{i}(): return f{i + 1}()" for i in range(3000)]
    lines += ["def f3000(): return N", "N = 1 + 1", "def build(): return f0()\n"]
    (tree / "kern.py").write_text("\n".join(lines))
    importlib.import_module("kern")
    assert values_of() == {"kern.N": "2"}


def test_an_epilogues_function(tree):
    (tree / "kern.py").write_text("ALPHA, B = float(0.5), 1 + 2\ndef act(x): return ALPHA * x\ndef b(): return B\n")
    importlib.import_module("kern")
    recipe = Recipe("tkq.gemm.dense.kernel:DenseGemm", (("kern:act",),), sources=("kern",))
    assert values_of(recipe) == {"kern.ALPHA": "0.5"}


def test_variables_of_a_process_do_not_count(tree, monkeypatch):
    (tree / "kern.py").write_text('import os\nos.environ["RANK"], os.getenv("SLURM_JOB_ID")\n'
                                  'os.environ["LOCAL_RANK"], os.environ.get("TUNE_IT")\nos.environ.get(\n    "MORE")\n')
    monkeypatch.setenv("MORE", "1")
    assert sources.environment(("kern",)) == (("MORE", "1"), ("TUNE_IT", None))


def test_the_tests_own_kernels():
    """What the DSL's decorators have wrapped is seen through."""
    from tests.helpers.rows import reduction_kernels

    found = values._Found()
    found.visit(reduction_kernels.RowReduce)
    assert "OPS" in [name for _, name, _ in found.values]
