"""Kernels linked into one shared library: a machine runs them with torch, libcudart and tvm-ffi alone.

A bundle is one file, ``tkq-kernels.so``: the library and, behind it, where a loader of ELF files does not look, a note
of what is in it and a checksum of both, as in an entry of the cache. It is looked for once a process: ``$TKQ_BUNDLE``
names the file or its folder; else it lies in the folder ``tkq_bundle`` beside the package ``tkq``, or in the package
``tkq_kernels_cu13`` or ``_cu12``. ``bundling`` makes them.
"""
from __future__ import annotations

import ctypes
import dataclasses
import functools
import hashlib
import importlib.util
import os
import pathlib
import warnings

from ..system.trusted import shown
from . import digests, keys, link
from .cache import Entry, read_entry

NAME = "tkq-kernels.so"
PACKAGE = "tkq_kernels_cu{cuda}"  # of a wheel with a bundle
NATIVE = ("replay", "dispatch")  # what calls go through in C: sources of this folder whose names begin so
_FOLDER = pathlib.Path(__file__).parents[1] / "call"
ADJACENT = pathlib.Path(__file__).resolve().parents[3] / "tkq_bundle"


@dataclasses.dataclass(frozen=True)
class Bundle:
    """note: kernels {the kernel's name, see ``keys.bundled_name``: its symbol}, native {one of ``NATIVE``: the digest
    of its sources}, digests (of normalised sources, see ``digests``), cuda (the major version of its runtime), and
    what made it from what."""

    entry: Entry
    problem: list = dataclasses.field(default_factory=list, compare=False)  # why it turned out not to load here

    @property
    def path(self) -> pathlib.Path:
        return self.entry.path

    @property
    def note(self) -> dict:
        return self.entry.note

    def function(self, recipe):
        """The kernel, as ``kernels.function`` gives it; None where the bundle lacks it, or does not load here."""
        symbol = self.note["kernels"].get(keys.bundled_name(recipe))
        return None if symbol is None or self.library is None else self.library[symbol]

    def has_native(self, kind: str) -> bool:
        """Has the library, which is loaded then, today's functions in C of this kind?"""
        return self.note["native"].get(kind) == digest(kind) and self.library is not None

    @functools.cached_property
    def library(self):
        """Loaded; None where that cannot be: it is for another version of CUDA, say."""
        from . import ffi  # noqa: F401  (imports tvm-ffi as it has to be)

        runtime = f"libcudart.so.{self.note['cuda']}"
        try:
            if link.cudart_name() == runtime:
                link.prepare("static")
            else:  # the DSL that is here is for another CUDA, or there is none: torch has loaded what it needs itself
                ctypes.CDLL(runtime, mode=ctypes.RTLD_GLOBAL)
            return self.entry.loaded(link.load)
        except (OSError, RuntimeError) as error:
            self.problem.append(f"it is for CUDA {self.note['cuda']}: {error}")
            return _unusable(self.path, self.problem[0])


def native_sources(kind: str) -> list:
    """The files in C of one of ``NATIVE``."""
    return sorted(_FOLDER.glob(f"{kind}*.[ch]"))


@functools.cache
def digest(kind: str) -> str:
    """Of the sources of one of ``NATIVE``."""
    return hashlib.sha256(repr([path.read_bytes() for path in native_sources(kind)]).encode()).hexdigest()[:32]


@functools.cache
def current() -> Bundle | None:
    """The bundle in use; None without one. A warning names one that cannot be used."""
    named = os.environ.get("TKQ_BUNDLE")
    try:
        path = pathlib.Path(named).expanduser().absolute() if named else _installed()
    except (RuntimeError, OSError) as error:  # ~ of no user; a relative one, where the working folder is gone
        return _unusable(named, error)
    if path is None:
        return None
    try:
        path = path / NAME if path.is_dir() else path
        found = read_entry(path)
    except OSError as error:
        return _unusable(path, error.strerror or error)
    if found is None or not _is_bundle(found.note):
        return _unusable(path, "it is damaged, or no bundle")
    if found.note["arch"] != keys.TARGET or found.note["machine"] != keys.machine():
        return _unusable(path, f"it is for {found.note['arch']} on {found.note['machine']}")
    digests.learn(found.note.get("digests"))
    return Bundle(found)


def _installed() -> pathlib.Path | None:
    """The folder of an installed bundle, which no variable names; None without one. Of two packages the one for the
    DSL's CUDA, or, without the DSL, for PyTorch's."""
    if (ADJACENT / NAME).is_file():
        return ADJACENT
    found = {cuda: importlib.util.find_spec(PACKAGE.format(cuda=cuda)) for cuda in ("13", "12")}
    found = {cuda: spec.submodule_search_locations for cuda, spec in found.items() if spec is not None}
    for cuda in sorted(found, key=lambda cuda: cuda != _cuda()) if found else ():
        for folder in map(pathlib.Path, found[cuda] or ()):  # one without it is a folder that has the name by chance
            if (folder / NAME).is_file():
                return folder
    return None


def _cuda():
    if keys.flavour():
        return keys.flavour()[2:]
    import torch

    return (torch.version.cuda or "13").partition(".")[0]


def _is_bundle(note):
    types = {"kernels": dict, "native": dict, "cuda": str, "arch": str, "machine": str}
    return note.get("kind") == "bundle" and all(isinstance(note.get(name), of) for name, of in types.items())


def _unusable(path, why):
    warnings.warn(f"tkq: the bundle {shown(path)} cannot be used ({why}); kernels come from the cache, or are "
                  "compiled.", stacklevel=3)
