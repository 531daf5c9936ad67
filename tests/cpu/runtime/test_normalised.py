"""What of a source file is part of a kernel's name: what it means, not how it is written."""
import ast
import pathlib
import re
import shutil

import pytest

from tkq.runtime.compile import keys, normalised, sources
from tkq.warmup import catalog

CHECKOUT = pathlib.Path(__file__).resolve().parents[3]
SOURCE = '''"""Module."""
import functools, dataclasses
# a comment
@dataclasses.dataclass(frozen=True)
class Config:
    """A class."""
    m: int = 128
    n: int = 256
    """About n."""
    def rows(self, at: int, *more: int, last: "int" = 3) -> int:
        """A method."""
        found: int = self.m + self.n * 2
        return (found, "text", at)
@functools.cache
def function(x): return x
'''


def digest(text, own=True, name="tkq.some.plan", others=()):
    files = [(name, text if isinstance(text, bytes) else text.encode(), own), *others]
    return normalised.digest([normalised.read(*file) for file in files])


@pytest.mark.parametrize("old, new", [
    ('"""Module."""', '"""Another\n\ntext."""'), ('"""Module."""\n', ""), ('"""A class."""', "# none"),
    ('        """A method."""\n', ""), ('    """About n."""\n', ""), ("# a comment", "# another"),
    ("# a comment\n", "\n\n\n"), ("self.n * 2", "( self.n*2 )"), ('"text"', "'text'"), ('"text"', '"te" "xt"'),
    ("    m: int = 128\n", "    m: int = 128  # wide\n\n"), ("256", "0x100"),
    ("self.m + self.n", "self.m + \\\n self.n"),
])
def test_comments_docstrings_and_layout_do_not_count(old, new):
    assert old in SOURCE
    for own in (True, False):
        assert digest(SOURCE.replace(old, new, 1), own) == digest(SOURCE, own)


@pytest.mark.parametrize("old, new", [
    ("self.m + self.n", "self.m - self.n"), ("self.n * 2", "self.n * 2.0"), ("self.n * 2", "self.n * True"),
    ("* 2", "* -2"), ('"text"', '"Text"'), ('"text"', 'b"text"'), ('"text"', 'f"text{at}"'),
    ("m: int = 128", "m: int = 64"), ("m: int = 128", "m: int"), ("last: \"int\" = 3", "last: \"int\" = 4"),
    ("@functools.cache", "@functools.lru_cache"),
    ("@functools.cache\n", ""), ("(frozen=True)", "(frozen=False)"), ("def function(x)", "def function(x, /)"),
    ("def rows", "def columns"), ("found", "sum_"), ("*more", "**more"), ("import functools, dataclasses",
                                                                         "import dataclasses, functools"),
    ("    m: int = 128\n    n: int = 256\n", "    n: int = 256\n    m: int = 128\n"), ("return x", "return None"),
    ("return x", "return"), ("return x", "yield x"), ("m: int = 128", "m: ClassVar[int] = 128"),
    ("m: int = 128", "m: 'InitVar[int]' = 128"), ("m: int = 128", "m: made() = 128"), ("return x", "..."),
])
def test_what_it_means_counts(old, new):
    assert old in SOURCE
    for own in (True, False):
        assert digest(SOURCE.replace(old, new), own) != digest(SOURCE, own)


ANNOTATED = [("at: int", "at: float"), ("-> int", "-> float"), ("-> int", ""), ("*more: int", "*more"),
             ("found: int", "found: float"), ("m: int", "m: object"), ('last: "int"', "last")]


@pytest.mark.parametrize("old, new", ANNOTATED)
def test_annotations_count_where_they_may_mean_something(old, new):
    """Not in a plan of tkq's; in a user's file, in one of the DSL's, and where annotations are read."""
    assert digest(SOURCE.replace(old, new)) == digest(SOURCE)
    assert digest(SOURCE.replace(old, new), own=False) != digest(SOURCE, own=False)
    for line in ("import cutlass.cute as cute", "from cutlass import Constexpr", "from ..tile import x",
                 "from .a import *", "from typing import get_type_hints", "import inspect; inspect.get_annotations",
                 "from . import tile"):
        whole = f"{SOURCE}{line}\n"
        assert digest(whole.replace(old, new)) != digest(whole), line
    assert digest(SOURCE, name="tkq.tile.sync") != digest(SOURCE.replace(old, new), name="tkq.tile.sync")


def test_annotations_of_what_is_decorated_or_derived_count():
    for whole in ("@jit\ndef f(x: int): pass\n", "@made.by(1)\nclass A:\n    x: int = 1\n",
                  "class A(Base):\n    x: int = 1\n",
                  "@jit\ndef f():\n    x: int = 1\n", "class A(Base):\n    def f(self, x: int): pass\n"):
        assert digest(whole.replace(": int", ": float")) != digest(whole), whole
    for whole in ("@property\ndef f(x: int): pass\n", "class A(NamedTuple):\n    x: int\n",
                  "class A:\n    x: int = 1\n"):
        assert digest(whole.replace(": int", ": float")) == digest(whole), whole


ADDED = SOURCE.replace("    n: int = 256\n", "    n: int = 256\n    new: int = 0\n")


def test_a_field_that_nothing_reads_does_not_count():
    assert digest(ADDED) == digest(SOURCE) == digest(ADDED.replace("new: int = 0", "new: int = 1"))
    assert digest(ADDED, own=False) != digest(SOURCE, own=False)
    more = ADDED.replace("new: int = 0", "new: int = 0\n    newer: str = 'new'")  # a default that is the name
    assert digest(more) != digest(SOURCE) and digest(more.replace("'new'", "'a'")) == digest(SOURCE)
    for line in ("Config().new", "getattr(Config(), 'new')", "Config(new=1)", "Config(1, 2, 3)", "Config(*x)",
                 "cls(1, 2, 3)", "class Other(Config): pass\nOther(1)", "class Config: pass"):
        other = [("tkq.some.kernel", line.encode(), True)]
        assert digest(ADDED, others=other) != digest(SOURCE, others=other), line
    for line in ("Config(1, 2)", "class Other(Config):\n    more: int = 1\nOther(more=1)", "'''new'''", "# new"):
        other = [("tkq.some.kernel", line.encode(), True)]
        assert digest(ADDED, others=other) == digest(SOURCE, others=other), line
    middle = SOURCE.replace("    n: int = 256\n", "    new: int = 0\n    n: int = 256\n")
    assert digest(middle) != digest(SOURCE)  # n's place is another
    for default in ("made()", "N", "[]"):
        assert digest(ADDED.replace("new: int = 0", f"new: int = {default}")) != digest(SOURCE)


@pytest.mark.parametrize("reads", ["print(__doc__)", "x.__doc__", "inspect.getsource(f)", "f.__code__.co_firstlineno",
                                   "sys._getframe().f_lineno", "getattr(f, '__doc__')", "open(__file__)"])
def test_where_text_is_data_all_of_it_counts(reads):
    """In each of the files: one may read another's."""
    other = [("kern", reads.encode(), False)]
    assert digest(SOURCE + "\n", others=other) != digest(SOURCE, others=other)
    assert digest(SOURCE + "# comment\n", others=other) != digest(SOURCE, others=other)


def test_what_cannot_be_parsed_counts_by_its_text():
    for text in ("def f(:\n", b"\xff\xfe", "x = 1\0", "(" * 5000, "x = " + "-" * 60_000 + "1"):
        data = text if isinstance(text, bytes) else text.encode()
        assert digest(data) == digest(data) != digest(data + b" # comment")


def test_the_form_is_the_same_in_each_version_of_python(monkeypatch):
    """Fields that are empty are left out: a version that adds one finds the same digest."""
    before = digest(SOURCE)
    for node in (ast.FunctionDef, ast.ClassDef, ast.Call):
        monkeypatch.setattr(node, "_fields", (*node._fields, "added", "added_list"))
        monkeypatch.setattr(node, "added", None, raising=False)
        monkeypatch.setattr(node, "added_list", [], raising=False)
    assert digest(SOURCE) == before


def test_a_warning_of_a_text_is_not_repeated(recwarn):
    digest("x = '\\d'\n")
    assert not recwarn.list


# ---- of the shipped kernels -----------------------------------------------------------------------------------------


def shipped(*builders):
    found = {kernel.recipe.builder: kernel.recipe for kernel in catalog.select([])}
    return [found[builder] for builder in builders] if builders else list(found.values())


RECIPES = ("tkq.gemm.dense.kernel:DenseGemm", "tkq.attention.forward.kernel:AttentionForward",
           "tkq.norms.forward.kernel:PlainNorm")


@pytest.fixture(scope="module")
def copied(tmp_path_factory):
    copy = tmp_path_factory.mktemp("copy") / "tkq"
    shutil.copytree(CHECKOUT / "tkq", copy, ignore=shutil.ignore_patterns("__pycache__"))
    return copy


@pytest.fixture
def tkq(copied, monkeypatch):
    """A copy of tkq that kernels' sources are looked for in."""
    monkeypatch.setattr(sources, "_TKQ", copied)
    sources.clear()
    yield copied
    for path in CHECKOUT.joinpath("tkq").rglob("*.py"):
        if path.read_bytes() != (copied / path.relative_to(CHECKOUT / "tkq")).read_bytes():
            shutil.copy(path, copied / path.relative_to(CHECKOUT / "tkq"))
    monkeypatch.undo()
    sources.clear()


def names():
    sources.clear()
    return [(keys.entry_name(recipe), keys.bundled_name(recipe)) for recipe in shipped(*RECIPES)]


def edit(path, pattern, new):
    text = path.read_text()
    changed = re.sub(pattern, new, text, count=1, flags=re.S)
    assert changed != text
    path.write_text(changed)


def test_only_what_the_tile_layer_means_changes_kernels(tkq):
    before = names()
    sync = tkq / "tile/sync.py"
    edit(sync, r'\A""".*?"""', '"""Something else."""')
    edit(sync, r"\n(@|class |def )", r"\n# a comment\n\n\n\1")
    edit(sync, r'(\n    """)\w', r"\1Said otherwise: ")
    assert names() == before
    edit(sync, r" \+ 1\b", " - 1")
    after = names()
    assert all(a[0] != b[0] and a[1] != b[1] for a, b in zip(before, after))


def test_a_field_added_to_a_config_changes_nothing_until_a_kernel_reads_it(tkq):
    before = names()
    edit(tkq / "gemm/dense/config.py", r"    wave_sync: int = 0\n", "    wave_sync: int = 0\n    untried: int = 0\n")
    assert names() == before
    edit(tkq / "gemm/dense/kernel.py", r"\Z", "\ndef more(config): return config.untried\n")
    after = names()
    assert [a != b for a, b in zip(before, after)] == [True, False, False]


def test_a_default_counts(tkq):
    before = names()
    edit(tkq / "gemm/dense/config.py", r"    raster_group: int = 8\n", "    raster_group: int = 4\n")
    assert [a != b for a, b in zip(before, names())] == [True, False, False]


def test_no_shipped_kernel_counts_by_its_text():
    """As it would if one of its files read documentation or line numbers."""
    files = {name: path for recipe in shipped() for name, path in sources.reached(keys.modules_of(recipe)).items()}
    assert len(files) > 100
    for name, path in files.items():
        words = sources._parsed(name, path).words & normalised._READS_TEXT
        assert not words, (name, words)


def test_where_fields_are_gone_over():
    """A field that is gone over with the others is read without its name. These copy all fields from one object to
    another, go over structures of the DSL's modules, of which no field is left out, look at users' functions, or say in
    an error which names there are."""
    found = set()
    for path in CHECKOUT.joinpath("tkq").rglob("*.py"):
        name = ".".join(path.relative_to(CHECKOUT).with_suffix("").parts)
        words = sources._parsed(name, str(path)).words if not sources._HOST_ONLY.fullmatch(name) else ()
        if {"fields", "asdict", "astuple", "__dataclass_fields__", "vars", "__dict__"} & {*words} and re.search(
                r"(?<!\.)\b(fields|asdict|astuple|vars)\(|__dataclass_fields__|__dict__", path.read_text()):
            found.add(name)
    assert found == GONE_OVER


GONE_OVER = {
    "tkq.attention.backward.kernel", "tkq.attention.backward.producer", "tkq.attention.backward.tile_scheduler",
    "tkq.attention.flex.functions.captures", "tkq.attention.flex.functions.graph", "tkq.attention.forward.producer",
    "tkq.attention.wide.producer", "tkq.reduction.signature", "tkq.rows.persistent.elements",
    "tkq.rows.persistent.engine", "tkq.rows.persistent.launch", "tkq.rows.persistent.returned",
}


def test_line_numbers_count_where_they_are_compiled_in(tkq, monkeypatch):
    recipe = shipped("tkq.softmax.forward:Softmax")[0]
    lines, asserts, plain = (type(recipe)(recipe.builder, recipe.args, option, recipe.sources) for option in (
        "--generate-line-info", "--enable-assertions", "--opt-level 3"))

    def found():
        sources.clear()
        with monkeypatch.context() as patch:
            patch.setenv("CUTE_DSL_LINEINFO", "1")
            switched = keys.entry_name(recipe)
        return [switched, *map(keys.entry_name, (lines, asserts, recipe, plain))]

    before = found()
    edit(tkq / "tile/sync.py", r"\Z", "\n# a comment\n")
    assert [a != b for a, b in zip(before, found())] == [True, True, True, False, False]
