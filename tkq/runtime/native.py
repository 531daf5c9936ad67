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


def library(source: str) -> pathlib.Path | None:
    """The shared object of a source file: in the cache, or in a folder that goes with the process where that cannot be
    written. None without a compiler, or where it fails."""
    text = (_FOLDER / source).read_bytes()
    digest = hashlib.sha256(repr((text, platform.machine(), keys.version("apache-tvm-ffi"))).encode()).hexdigest()
    kind, store = source.removesuffix(".c"), build.cache()
    name = f"{kind}-{digest[:32]}.so"
    with contextlib.suppress(OSError):  # a folder that may not be read has nothing
        found = store.find(name)
        if found is not None:
            return found.path
    data = _compiled(source)
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


def _compiled(source) -> bytes | None:
    from tvm_ffi import libinfo

    if link.compiler() is None:
        return None
    with tempfile.TemporaryDirectory(prefix="tkq-native-") as folder:
        out = os.path.join(folder, "native.so")
        done = subprocess.run([link.compiler(), "-std=c11", "-O2", "-fPIC", "-shared", "-s", "-o", out,
                               str(_FOLDER / source), *(f"-I{path}" for path in libinfo.include_paths())],
                              capture_output=True, stdin=subprocess.DEVNULL)
        return pathlib.Path(out).read_bytes() if done.returncode == 0 else None
