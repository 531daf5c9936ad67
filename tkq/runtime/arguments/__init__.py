"""The arguments of every public function in one table, and what comes from it.

``table("softmax")`` is the function's arguments, frozen dataclasses: kind, dtypes, range, is None allowed. From them
come the checks and their words (``checker``), the docstrings' "Raises" (``raises``; a test compares), and the bad
values of the fuzz tests.
"""
from .kinds import Argument, came
from .tables import REQUIRED, TABLES
from .words import raises
from .written import checker, checker_of

__all__ = ["REQUIRED", "Argument", "came", "checker", "checker_of", "names", "raises", "table"]


def table(name: str) -> tuple[Argument, ...]:
    """The arguments of ``tkq.<name>``, in the order of its signature."""
    return TABLES[name]


def names() -> tuple[str, ...]:
    """The functions that have a table."""
    return tuple(TABLES)
