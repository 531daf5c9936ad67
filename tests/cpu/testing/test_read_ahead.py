"""Machine code of several tests' kernels is read together, and each test fails by itself."""
import types

import pytest

from tests.helpers.process import read_ahead


class Item:
    def __init__(self, session, name, path="a.py", marked=True):
        self.session, self.path, self.config, self.marked = session, path, session.config, marked
        self.callspec = types.SimpleNamespace(params=dict(name=name))
        session.items.append(self)

    def get_closest_marker(self, name):
        return types.SimpleNamespace(kwargs=dict(recipe=recipe_of)) if self.marked else None


def recipe_of(name):
    if name == "no recipe":
        raise KeyError(name)
    return f"recipe of {name}"


@pytest.fixture
def session(monkeypatch):
    """A session without tests, whose ``read`` has what each run of nvdisasm read."""
    made = types.SimpleNamespace(items=[], config=types.SimpleNamespace(stash={}), read=[])

    def entry_of(recipe):
        if "wrong" in recipe:
            raise ValueError(recipe)
        return types.SimpleNamespace(path=recipe)

    def reports(several):
        made.read.append(several)
        if any("unreadable" in recipe for recipe in several):
            raise RuntimeError("unreadable")
        return [[f"report of {recipe}"] for recipe in several]

    monkeypatch.setattr(read_ahead.machine_code, "entry_of", entry_of)
    monkeypatch.setattr(read_ahead.sass, "reports", reports)
    monkeypatch.setattr(read_ahead.sass, "report", lambda recipe: reports([recipe])[0])
    return made


def test_those_behind_it_in_its_file_are_read_with_it(session):
    items = [Item(session, name) for name in "abc"]
    Item(session, "d", path="b.py"), Item(session, "e", marked=False)
    for item, name in zip(items, "abc"):
        assert read_ahead.reports(item) == [f"report of recipe of {name}"]
    assert session.read == [[f"recipe of {name}" for name in "abc"]]
    assert read_ahead.reports(items[2]) == ["report of recipe of c"], "once more, as another test may ask"


def test_as_many_as_are_allowed_and_no_kernel_twice(session):
    items = [Item(session, str(n // 2)) for n in range(2 * read_ahead.TOGETHER + 4)]
    read_ahead.reports(items[0])
    assert session.read == [[f"recipe of {n}" for n in range(read_ahead.TOGETHER)]]


@pytest.mark.parametrize("bad, error", [("wrong", ValueError), ("no recipe", KeyError), ("unreadable", RuntimeError)])
def test_what_fails_does_so_in_its_own_test(session, bad, error):
    first, wrong, last = (Item(session, name) for name in ("a", bad, "c"))
    assert read_ahead.reports(first) == ["report of recipe of a"]
    with pytest.raises(error):
        read_ahead.reports(wrong)
    assert read_ahead.reports(last) == ["report of recipe of c"]
