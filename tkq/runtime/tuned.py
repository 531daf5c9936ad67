"""Configurations that were measured to be the fastest: what ``tkq.tune`` found, on disk.

One JSON file a problem, in the folder ``tuned`` of the kernel cache. Host functions look here once for each new kind of
call, behind their tables of launchers, and take the plan's configuration where nothing is found. A file counts for one
version of tkq and one kind of GPU; what cannot be read, or does not fit today's kernels, counts as not there. Delete
the folder to forget everything.
"""
from __future__ import annotations

import dataclasses
import hashlib
import json
import os
import pathlib
import tempfile
from typing import Any

from .. import __version__
from .build import cache

FOLDER = "tuned"


@dataclasses.dataclass(frozen=True)
class Problem:
    """op: the public function's name. spec: what it compiles for; its repr tells everything. sizes: all that the plan
    sees beside it. gpu: the kind of device, see ``arch.model``."""

    op: str
    spec: Any
    sizes: tuple
    gpu: str

    @property
    def words(self) -> dict:
        return {"op": self.op, "spec": repr(self.spec), "sizes": list(self.sizes), "gpu": self.gpu,
                "version": __version__}

    @property
    def path(self) -> pathlib.Path:
        digest = hashlib.sha256(json.dumps(self.words, sort_keys=True).encode()).hexdigest()
        return cache().folder / FOLDER / f"{self.op}-{digest[:32]}.json"


def read(problem: Problem) -> dict | None:
    """What ``write`` was given for a problem; None where there is nothing, or nothing that can be read."""
    try:
        found = json.loads(problem.path.read_text())
        return found if found["problem"] == problem.words else None
    except (OSError, ValueError, TypeError, KeyError):
        return None


def config(found: dict | None, spec, classes: dict):
    """The configuration in what was read: an instance of one of ``classes`` {name: class}, checked for the spec. None
    where there is none that today's kernels take."""
    try:
        return classes[found["class"]](**found["config"]).check(spec)
    except (TypeError, KeyError, ValueError):
        return None


def write(problem: Problem, chosen, notes: dict) -> pathlib.Path:
    """Keep a configuration, a dataclass of numbers, strings and booleans, with whatever else is to be remembered. The
    file is replaced in one step."""
    cache().make()
    path = problem.path
    path.parent.mkdir(mode=0o700, exist_ok=True)
    text = json.dumps({"problem": problem.words, "class": type(chosen).__name__, "config": dataclasses.asdict(chosen),
                       **notes}, indent=1)
    handle, temporary = tempfile.mkstemp(prefix=".new-", dir=path.parent)
    with os.fdopen(handle, "w") as file:
        file.write(text)
    os.replace(temporary, path)
    return path
