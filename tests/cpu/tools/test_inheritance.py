"""Kernels are composed: a class of tkq has one of tkq above it at most. What is deeper today is listed."""
import functools
from pathlib import Path

import pytest

from tests.helpers.lint.classes import chains

ROOT = Path(__file__).parents[3]
LIMIT = 2
USERS = ("tkq.rows.persistent.kernel.RowKernel", "tkq.reduction_base.ReductionBase")  # one class may stand on these two

# This list shrinks: a class is mended, its line goes. No line is added, no number grows.
DEEPER = {
    "tkq.viz.layouts.TVPicture": 3,
    "tkq.viz.tiles.TilePicture": 3,
}


@functools.cache  # once a process, in whatever order it has these tests
def classes():
    return chains(ROOT)


def test_no_class_inherits_deeper_than_two():
    deeper = {name: len(chain) for name, chain in classes().items() if too_deep(chain)}
    new = [" -> ".join(classes()[name]) for name, depth in deeper.items() if depth > DEEPER.get(name, 0)]
    assert not new, f"compose these of parts instead, depth {LIMIT} is the limit:\n" + "\n".join(new)


def test_the_list_shrinks():
    today = {name: len(classes()[name]) for name in DEEPER if name in classes() and too_deep(classes()[name])}
    assert today == DEEPER, "less deep, moved or gone: change their lines in DEEPER"


def too_deep(chain):
    return len(chain) > LIMIT + (chain[1:] == USERS)


def test_what_is_found():
    import tkq.rows.persistent.kernel as kernel
    mro = [f"{cls.__module__}.{cls.__qualname__}" for cls in kernel.RowKernel.__mro__]
    assert classes()["tkq.rows.persistent.kernel.RowKernel"] == tuple(name for name in mro if name.startswith("tkq."))


def test_bases_are_followed_through_imports(tmp_path):
    write(tmp_path, "__init__", "")
    write(tmp_path, "base", "import abc\nclass Base(abc.ABC): ...\nclass Alone: ...")
    write(tmp_path, "passes", "from .base import Base as Renamed")
    write(tmp_path, "room/__init__", "from ..passes import Renamed")
    write(tmp_path, "room/user", "from . import Renamed\nfrom .. import base as b\nclass Two(Renamed[int]): ...\n"
                                 "class Three(b.Alone, Two): ...")
    found = chains(tmp_path, "house")
    assert found["house.base.Base"] == ("house.base.Base",)
    assert found["house.room.user.Three"] == ("house.room.user.Three", "house.room.user.Two", "house.base.Base")
    assert [too_deep(found[f"house.room.user.{name}"]) for name in ("Two", "Three")] == [False, True]


def test_a_users_class_may_stand_on_the_two_of_the_card():
    assert not too_deep(("user", *USERS))
    assert too_deep(("more", "user", *USERS))
    assert too_deep(("user", USERS[1], "other"))


def test_a_base_that_is_not_found_is_an_error(tmp_path):
    write(tmp_path, "lost", "from house.nowhere import Base\nclass A(Base): ...")
    with pytest.raises(LookupError, match="house.nowhere.Base"):
        chains(tmp_path, "house")


def write(root, module, source):
    path = root / "house" / f"{module}.py"
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(source)
