"""Digests of normalised sources are remembered in the cache's folder: no first call parses sources that another had."""
import dataclasses
import os
import subprocess
import sys
from typing import Any

import pytest

from tkq.runtime import Recipe
from tkq.runtime.compile import build, digests, keys, sources
from tkq.runtime.compile.cache import DIGESTS, Cache, packed

RECIPE = Recipe("kern:build")


@pytest.fixture
def folder(tmp_path, monkeypatch):
    (tmp_path / "kern.py").write_text("def build(): return 1\n")
    monkeypatch.syspath_prepend(tmp_path)
    fresh()
    yield tmp_path / "cache"
    fresh()


def fresh():
    """As a new process begins."""
    sources.clear()
    digests.clear()


@pytest.fixture
def parsed(monkeypatch):
    """How many times sources were parsed."""
    times, normalised = [], sources._normalised
    monkeypatch.setattr(sources, "_normalised", lambda files: times.append(1) or normalised(files))
    return times


def name(*folders):
    fresh()
    digests.recall(*folders)
    found = keys.entry_name(RECIPE)
    digests.keep(folders[-1])
    return found


def test_a_second_process_parses_nothing(folder, parsed, tmp_path):
    first = name(folder)
    assert len(parsed) == 1 and os.listdir(folder) == [DIGESTS]
    assert name(folder) == first and len(parsed) == 1
    (tmp_path / "kern.py").write_text("def build(): return 2\n")
    assert name(folder) != first and len(parsed) == 2
    (tmp_path / "kern.py").write_text("def build(): return 1\n")
    assert name(folder) == first and len(parsed) == 2  # both are remembered


def test_another_way_to_normalise_finds_nothing_remembered(folder, parsed, monkeypatch, tmp_path):
    name(folder)
    other = tmp_path / "normalised.py"
    other.write_text("another way")
    monkeypatch.setattr(sources, "_NORMALISED", str(other))
    name(folder)
    assert len(parsed) == 2


NEW_PROCESS = """
import sys
from tkq.runtime.compile import build, digests, keys; from tkq.runtime import Recipe
from tkq.softmax.plan import plan
from tkq.softmax.spec import SoftmaxSpec
spec = SoftmaxSpec(4096, "bf16", 8)
store = build.recall()
name = keys.entry_name(Recipe("tkq.softmax.forward:Softmax", (spec, plan(spec))))
print(name, "tkq.runtime.compile.normalised" in sys.modules)
digests.keep(store.folder)
"""


def test_new_processes_of_any_hash_seed_agree(tmp_path):
    def ran(folder, seed):
        environment = {**os.environ, "TKQ_CACHE_DIR": str(tmp_path / folder), "PYTHONHASHSEED": seed}
        return subprocess.run([sys.executable, "-c", NEW_PROCESS], env=environment, capture_output=True, text=True,
                              check=True).stdout.split()

    first, again, other = ran("a", "1"), ran("a", "2"), ran("b", "3")
    assert first[0] == again[0] == other[0] and [first[1], again[1], other[1]] == ["True", "False", "True"]


@pytest.mark.parametrize("damage", [
    lambda path: path.write_bytes(b""), lambda path: path.write_bytes(path.read_bytes()[:-1]),
    lambda path: path.write_bytes(path.read_bytes().replace(b"digests", b"digestS")),
    lambda path: path.write_bytes(packed(b"", {"digests": [1]})),
    lambda path: path.write_bytes(packed(b"", {"digests": dict.fromkeys(digests.all_known(), 1)})),
    lambda path: path.chmod(0o666), lambda path: (path.unlink(), path.symlink_to("/dev/zero")),
    lambda path: (path.unlink(), os.mkfifo(path)), lambda path: path.parent.chmod(0o777)])
def test_what_is_damaged_or_not_trusted_is_computed_again(folder, parsed, damage):
    first = name(folder)
    damage(folder / DIGESTS)
    assert name(folder) == first and len(parsed) == 2
    folder.chmod(0o700)
    name(folder)
    assert name(folder) == first and len(parsed) <= 3  # it was written anew where it could be
    assert (folder / DIGESTS).is_file() and not (folder / DIGESTS).is_symlink()


def test_a_folder_that_is_only_read_is_read_and_not_written(folder, parsed, tmp_path):
    own = tmp_path / "own"
    first = name(folder)
    assert name(folder, own) == first and len(parsed) == 1 and not own.exists()
    (folder / DIGESTS).unlink()
    assert name(folder, own) == first and len(parsed) == 2
    assert os.listdir(folder) == [] and os.listdir(own) == [DIGESTS]


def test_one_that_cannot_be_written_costs_only_time(folder, parsed, tmp_path, recwarn):
    blocked = tmp_path / "blocked"
    blocked.write_text("no folder")
    assert name(blocked) == name(blocked) and len(parsed) == 2 and not recwarn.list


def test_two_processes_add_to_one_file_which_stays_small(folder, monkeypatch):
    digests.add("a", "1")
    digests.keep(folder)
    digests.clear()
    digests.add("b", "2")
    digests.keep(folder)
    digests.clear()
    digests.recall(folder)
    assert (digests.find("a"), digests.find("b")) == ("1", "2")
    monkeypatch.setattr(digests, "_MOST", 2)
    digests.add("c", "3")
    digests.keep(folder)
    digests.clear()
    digests.recall(folder)
    assert [digests.find(key) for key in "abc"] == [None, "2", "3"]


def test_it_is_no_entry_and_is_shared_with_them(folder):
    name(folder)
    store = Cache(folder)
    assert store.entries() == [] and store.bytes() == 0 and store.share() == []
    assert (folder / DIGESTS).stat().st_mode & 0o777 == 0o644
    digests.add("more", "1")
    digests.keep(folder)
    assert (folder / DIGESTS).stat().st_mode & 0o777 == 0o644
    store.put("one-1.so", b"1", {})
    assert (folder / DIGESTS).exists()


def test_a_call_looks_for_it_and_leaves_it(folder, parsed, monkeypatch):
    monkeypatch.setattr(build, "_cache", Cache(folder))
    store = build.cache()
    fresh()
    found = keys.entry_name(RECIPE)
    store.put(found + ".so", b"1", {"symbol": ""})
    fresh()
    assert build.entry_of(RECIPE).path.stem == found and len(parsed) == 2
    fresh()
    assert build.entry_of(RECIPE).path.stem == found and len(parsed) == 2


def test_a_bundle_has_those_of_its_kernels(parsed, folder):
    bundled = keys.bundled_name(RECIPE)
    note = {"digests": digests.all_known()}
    fresh()
    digests.learn(note["digests"])
    assert keys.bundled_name(RECIPE) == bundled and len(parsed) == 1
    for foreign in (None, [1], {"a": 1}):  # of a bundle of an older version, say
        digests.learn(foreign)
    assert digests.find("a") is None


# ---- arguments ------------------------------------------------------------------------------------------------------


def of_tkq(cls):
    cls.__module__ = "tkq.some.config"
    return cls


@of_tkq
@dataclasses.dataclass(frozen=True)
class Config:
    m: int
    n: int = 256
    hold: bool = True
    scale: float = 0.0
    inner: Any = None
    made: tuple = dataclasses.field(default_factory=tuple)


@of_tkq
@dataclasses.dataclass(frozen=True)
class More(Config):
    added: int = 0


More.__qualname__ = Config.__qualname__


@dataclasses.dataclass(frozen=True)
class Users:
    n: int = 1
    hidden: Any = dataclasses.field(default=0, repr=False)
    cached: Any = dataclasses.field(default=0, repr=False, compare=False)


@of_tkq
@dataclasses.dataclass(frozen=True)
class Own:
    n: int = 1

    def __repr__(self):
        return f"all of {self.n}"


CONFIG = "tkq.some.config.Config"


def test_fields_that_have_their_defaults_do_not_count():
    assert keys.text_of(Config(1)) == f"{CONFIG}(m=1, made=())" == keys.text_of(More(1))
    assert keys.text_of((Config(1, 128), "a", None)) == f"({CONFIG}(m=1, n=128, made=()), 'a', None)"
    assert keys.text_of(Config(1, inner=Config(2, 3))) == f"{CONFIG}(m=1, inner={CONFIG}(m=2, n=3, made=()), made=())"
    assert keys.text_of(More(1, added=1)) == f"{CONFIG}(m=1, made=(), added=1)"
    assert keys.text_of(("a",)) == "('a',)" and keys.text_of(()) == "()"


def test_two_classes_of_one_name_are_two():
    one, other = (of_tkq(dataclasses.make_dataclass("Config", [("n", int, n)], frozen=True)) for n in (1, 2))
    other.__module__ = "tkq.other.config"
    assert keys.text_of(one()) != keys.text_of(other())


def test_values_that_are_equal_and_not_the_same_count():
    texts = {keys.text_of(Config(1, **given)) for given in (
        {}, {"hold": 1}, {"hold": False}, {"hold": 0}, {"scale": -0.0}, {"scale": 0}, {"n": 256.0}, {"inner": ()})}
    assert len(texts) == 8


def test_of_a_users_classes_all_fields_count():
    """Their defaults may come from anywhere."""
    assert keys.text_of(Users()) == "Users(n=1, hidden=0)" and keys.text_of(Own()) == "all of 1"
    assert keys.text_of(Users(hidden="a", cached=3)) == "Users(n=1, hidden='a')"
    assert keys.text_of(Users(hidden=object())) == "Users(n=1)"


def test_all_defaults_of_shipped_arguments_are_plain():
    """They count by the class's source: none comes from elsewhere than tkq's constants."""
    from tkq.runtime.compile import plain
    from tkq.warmup import catalog

    seen = set()

    def look(value):
        for item in value if isinstance(value, tuple) else ():
            look(item)
        for field in getattr(value, "__dataclass_fields__", {}).values():
            seen.add(type(value).__name__)
            assert field.default is dataclasses.MISSING or plain.Texts().of(field.default) is not None
            look(getattr(value, field.name))

    for kernel in catalog.select([]):
        look(kernel.recipe.args)
        assert keys.text_of(kernel.recipe.args)
    texts = {(k.recipe.builder, keys.text_of(k.recipe.args)) for k in catalog.select([])}
    assert len(texts) == len({(k.recipe.builder, repr(k.recipe.args)) for k in catalog.select([])}) and len(seen) > 20
