"""Functions in C of this folder, that calls go through: compiled once by the user's compiler, kept with kernels."""
from __future__ import annotations

import contextlib
import functools
import hashlib
import os
import pathlib
import platform
import subprocess
import tempfile

from . import build, keys, link

_FOLDER = pathlib.Path(__file__).parent
_FLAGS = ("-std=c11", "-O2", "-fPIC", "-fvisibility=hidden", "-shared", "-s")


def library(kind: str) -> pathlib.Path | None:
    """The shared object of the sources whose names begin so: in the cache, or in a folder that goes with the process
    where that cannot be written. None without a compiler, or where it fails."""
    texts = [path.read_bytes() for path in sorted(_FOLDER.glob(f"{kind}*.[ch]"))]
    facts = _FLAGS, texts, platform.machine(), keys.version("apache-tvm-ffi")
    name, store = f"{kind}-{hashlib.sha256(repr(facts).encode()).hexdigest()[:32]}.so", build.cache()
    with contextlib.suppress(OSError):  # a folder that may not be read has nothing
        found = store.find(name)
        if found is not None:
            return found.path
    data = _compiled(kind)
    if data is None:
        return None
    try:
        return store.put(name, data, {"kind": kind}).path
    except OSError:
        path = pathlib.Path(_private().name) / name
        path.write_bytes(data)
        return path


@functools.cache
def _private():
    return tempfile.TemporaryDirectory(prefix="tkq-")


def _compiled(kind) -> bytes | None:
    from tvm_ffi import libinfo

    if link.compiler() is None:
        return None
    with tempfile.TemporaryDirectory(prefix="tkq-native-") as folder:
        out = os.path.join(folder, "native.so")
        sources = map(str, sorted(_FOLDER.glob(f"{kind}*.c")))
        done = subprocess.run([link.compiler(), *_FLAGS, "-o", out, *sources,
                               *(f"-I{path}" for path in libinfo.include_paths())],
                              capture_output=True, stdin=subprocess.DEVNULL)
        return pathlib.Path(out).read_bytes() if done.returncode == 0 else None
