"""Configurations that were measured to be the fastest: what ``tkq.tune`` found, on disk.

One JSON file a problem, in the folder ``tuned`` of the kernel cache, and of those folders that are read before it. Host
functions look here once for each new kind of call, behind their tables of launchers, and take the plan's configuration
where nothing is found. A file counts for one state of tkq's GEMM sources and one kind of GPU; what cannot be read, or
does not fit today's kernels, counts as not there. Delete the folder to forget everything. A process that is to run what
is planned says ``ignore_tuned()``.
"""
from __future__ import annotations

import dataclasses
import functools
import hashlib
import json
import os
import pathlib
import warnings
from typing import Any

from ...version import __version__
from ..system import trusted
from .build import cache

FOLDER = "tuned"
_SOURCES = pathlib.Path(__file__).resolve().parents[2] / "gemm"
_unwritten: dict = {}  # path -> what could not be written there: it counts for this process
_ignored = False


@dataclasses.dataclass(frozen=True)
class Problem:
    """op: the public function's name. spec: what it compiles for; its repr is complete. sizes: all that the plan
    sees beside it. gpu: the kind of device, see ``arch.model``."""

    op: str
    spec: Any
    sizes: tuple
    gpu: str

    @property
    def words(self) -> dict:
        return {"op": self.op, "spec": repr(self.spec), "sizes": list(self.sizes), "gpu": self.gpu,
                "version": __version__, "sources": _digest()}

    @property
    def path(self) -> pathlib.Path:
        """Where it is written."""
        return cache().folder / FOLDER / self.name

    @property
    def name(self) -> str:
        digest = hashlib.sha256(json.dumps(self.words, sort_keys=True).encode()).hexdigest()
        return f"{self.op}-{digest[:32]}.json"


@functools.cache
def _digest() -> str:
    """Of the sources of all products: read once a process."""
    texts = [(path.relative_to(_SOURCES).as_posix(), hashlib.sha256(path.read_bytes()).hexdigest())
             for path in sorted(_SOURCES.rglob("*.py"))]
    return hashlib.sha256(repr(texts).encode()).hexdigest()[:32]


def ignore_tuned(yes: bool = True) -> None:
    """Whether this process's calls take the planned configurations, whatever ``tkq.tune`` found, here or in another
    process. For tests and benchmarks of the plans: say it before the first call, since kinds of calls that have come
    keep their kernels. ``ignore_tuned(False)`` takes it back."""
    global _ignored
    _ignored = bool(yes)


def anything() -> bool:
    """May there be something to find for a call? Whether the folder is there is looked up once, until ``clear``."""
    return not _ignored and (bool(_unwritten) or any(_is_there(folder / FOLDER) for folder in _folders()))


def _folders():
    return *cache().before, cache().folder


@functools.cache
def _is_there(folder) -> bool:
    return os.path.isdir(folder)  # where it may not be looked for, it is not there


def clear() -> None:
    """Look anew whether the folder is there."""
    _is_there.cache_clear()


def read(problem: Problem) -> dict | None:
    """What ``write`` was given for a problem; None where there is nothing, or nothing that can be read."""
    name = problem.name
    for folder in _folders():
        path = folder / FOLDER / name
        try:
            found = _unwritten[path] if path in _unwritten else json.loads(trusted.file(path).bytes())
            if found["problem"] == problem.words:
                return found
        except (OSError, ValueError, TypeError, KeyError):
            continue
    return None


def config(found: dict | None, spec, classes: dict):
    """The configuration in what was read: an instance of one of ``classes`` {name: class}, checked for the spec. None
    where there is none that today's kernels take: all fields, each of its default's type."""
    try:
        made, fields = classes[found["class"]], found["config"]
        types = {field.name: type(field.default) for field in dataclasses.fields(made)}
        if {name: type(value) for name, value in fields.items()} != types:
            return None
        return made(**fields).check(spec)
    except Exception:  # a file may say anything, and a configuration of no sense may raise anything
        return None


def write(problem: Problem, chosen, notes: dict) -> pathlib.Path:
    """Store a configuration, a dataclass of numbers, strings and booleans, with whatever else is to be remembered. The
    file is replaced in one step; where that cannot be, a warning says so and it counts for this process."""
    path = problem.path
    found = {"problem": problem.words, "class": type(chosen).__name__, "config": dataclasses.asdict(chosen), **notes}
    try:
        trusted.folder(path.parent, make=True).put(path.name, json.dumps(found, indent=1).encode())
        _unwritten.pop(path, None)
    except OSError as problem_with_it:
        _unwritten[path] = found
        warnings.warn(f"tkq: what was tuned counts for this process alone, {path} cannot be written: "
                      f"{problem_with_it}", stacklevel=2)
    clear()
    return path

