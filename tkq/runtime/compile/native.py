"""Functions in C of ``tkq/runtime/call``, that calls go through: compiled once by the user's compiler, cached
with kernels."""
from __future__ import annotations

import hashlib

from . import build, bundle, keys, link
from .cache import Entry

_FLAGS = ("-std=c11", "-O2", "-fPIC", "-fvisibility=hidden", "-shared", "-s")


def load(kind: str, load):
    """load(path) of the shared object of one of ``bundle.NATIVE``; None without one. Raises what load raises."""
    entry = library(kind)
    if entry is None:
        return None
    try:
        return entry.loaded(load)
    except (OSError, RuntimeError):  # from a machine whose loader differs: compiled again
        build.cache().leave(entry)
        entry = library(kind)
        return None if entry is None else entry.loaded(load)


def library(kind: str) -> Entry | None:
    """The shared object of one of ``bundle.NATIVE``: the bundle, or an entry of the cache. None without a compiler, or
    where it fails."""
    held = bundle.current()
    if held is not None and held.has_native(kind):
        return held.entry
    facts = _FLAGS, bundle.digest(kind), keys.machine(), keys.version("apache-tvm-ffi")
    name, store = f"{kind}-{hashlib.sha256(repr(facts).encode()).hexdigest()[:32]}.so", build.cache()
    found = store.find(name)
    if found is not None or link.compiler() is None:
        return found
    with build.writable(name) as store:  # one process compiles it, and none replaces a file that others have loaded
        found = store.find(name)
        data = None if found is not None else _compiled(kind)
        return found if data is None else store.put(name, data, {"kind": kind})


def _compiled(kind) -> bytes | None:
    from .ffi import tvm_ffi

    words = [*_FLAGS, *(str(path) for path in bundle.native_sources(kind) if path.suffix == ".c"),
             *(f"-I{path}" for path in tvm_ffi.libinfo.include_paths())]
    return link.attempted(lambda folder: link.compiled(words, folder), *build.places())
