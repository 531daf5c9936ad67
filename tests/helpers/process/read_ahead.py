"""The machine code of one test's kernel, read together with that of tests behind it.

nvdisasm takes 0.28 s to begin and 0.01 s for a kernel. A test says which recipe it reads, by its parameters' names, and
has its reports as the fixture `machine_code`:

    @pytest.mark.machine_code(recipe=lambda name: KERNELS[name])
    def test_no_spills(name, machine_code):
        kernel, = machine_code

It fails by itself: what keeps another's kernel from being compiled or read is seen when that one's turn comes.
"""
import contextlib
import inspect
import time

import pytest

from tests.helpers.process import machine_code
from tkq.testing import sass

TOGETHER = 12
SECONDS = 6.0  # so long is compiled ahead: these tests are no other worker's to take
_read = pytest.StashKey[dict]()


def reports(item) -> list:
    """Of the item's recipe. Those of other tests of its file are compiled into the cache, and read with it."""
    recipe = _recipe(item)
    found = item.config.stash.setdefault(_read, {})
    if recipe not in found:
        items = item.session.items
        others = [_recipe_or_none(other) for other in items[items.index(item) + 1:][:4 * TOGETHER]
                  if other.path == item.path]
        found.update(_together(recipe, [other for other in others if other is not None and other not in found]))
    return found.pop(recipe)


def _together(recipe, others):
    began, entries = time.process_time(), {recipe: machine_code.entry_of(recipe).path}
    for other in others:
        if len(entries) == TOGETHER or time.process_time() - began > SECONDS:
            break
        if other not in entries:
            with contextlib.suppress(Exception):
                entries[other] = machine_code.entry_of(other).path
    try:
        return dict(zip(entries, sass.reports([*entries.values()])))
    except Exception:
        return {recipe: sass.report(entries[recipe])}


def _recipe(item):
    made = item.get_closest_marker("machine_code").kwargs["recipe"]
    return made(*(item.callspec.params[name] for name in inspect.signature(made).parameters))


def _recipe_or_none(item):
    try:
        return _recipe(item) if item.get_closest_marker("machine_code") else None
    except Exception:
        return None
