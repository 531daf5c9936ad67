"""Functions in C of this folder, that calls go through: compiled once by the user's compiler, kept with kernels."""
from __future__ import annotations

import contextlib
import hashlib
import os
import pathlib
import subprocess
import tempfile

from . import build, bundle, keys, link

_FLAGS = ("-std=c11", "-O2", "-fPIC", "-fvisibility=hidden", "-shared", "-s")


def library(kind: str) -> pathlib.Path | None:
    """The shared object of one of ``bundle.NATIVE``: the bundle, or an entry of the cache. None without a compiler, or
    where it fails."""
    held = bundle.current()
    if held is not None and held.has_native(kind):
        return held.path
    facts = _FLAGS, bundle.digest(kind), keys.machine(), keys.version("apache-tvm-ffi")
    name, store = f"{kind}-{hashlib.sha256(repr(facts).encode()).hexdigest()[:32]}.so", build.cache()
    with contextlib.suppress(OSError):  # a folder that may not be read has nothing
        found = store.find(name)
        if found is not None:
            return found.path
    data = _compiled(kind)
    return None if data is None else store.put(name, data, {"kind": kind}).path


def _compiled(kind) -> bytes | None:
    if link.compiler() is None:
        return None
    from .ffi import tvm_ffi

    with tempfile.TemporaryDirectory(prefix="tkq-native-") as folder:
        out = os.path.join(folder, "native.so")
        sources = [str(path) for path in bundle.native_sources(kind) if path.suffix == ".c"]
        done = subprocess.run([link.compiler(), *_FLAGS, "-o", out, *sources,
                               *(f"-I{path}" for path in tvm_ffi.libinfo.include_paths())],
                              capture_output=True, stdin=subprocess.DEVNULL)
        return pathlib.Path(out).read_bytes() if done.returncode == 0 else None
