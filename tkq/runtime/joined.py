"""Kernels know rows of matrices; what is called has any number of dimensions. `joined` makes one of the other.

A view by torch costs 0.8 us, and a tensor of three dimensions would need two of them. So this is done between the call
and the kernel, by a small function in C (joined.c) that looks at what tvm-ffi hands over. It is compiled once, where
there is a C compiler, and kept with the kernels. Without one the same is done here with views.
"""
from __future__ import annotations

import functools
import hashlib
import os
import pathlib
import platform
import subprocess
import tempfile
import threading
import warnings

from . import build, keys, link, new

MOST = 1 << 30  # elements: more may need several launches, which is the caller's business
_SOURCE = pathlib.Path(__file__).with_name("joined.c")
_AS_IT_IS, _RESULT = -1, 16
_one_at_a_time = threading.Lock()


def joined(run, count: int, inputs: dict, results: dict):
    """run, as a function of the same `count` arguments, of which some may have any leading dimensions.

    run: a kernel as `runtime.function` gives it. inputs, results: {place of an argument: dimensions that stay}; those
    before are made one, also where there are none. None stays None, as do all other arguments.

    Inputs must have the same leading dimensions. A ValueError without words for a user, before anything is launched,
    where they have not, where no stride describes those of a tensor as one, and for no elements or more than `MOST`."""
    ways = [_AS_IT_IS] * count
    for place, kept in inputs.items():
        ways[place] = kept
    for place, kept in results.items():
        ways[place] = _RESULT + kept
    made = _in_c()
    # What is not a function of tvm-ffi's is one of Python's around it.
    return _in_python(run, ways) if made is None or not isinstance(run, type(made)) else made(run, *ways)


def _in_python(run, ways):
    """The same with views."""
    def call(*args):
        given, lead = list(args), None
        for i, way in enumerate(ways):
            t = given[i]
            if way == _AS_IT_IS or t is None:
                continue
            kept = way % _RESULT
            if way < _RESULT:
                here = t.shape[:t.dim() - kept]
                if lead is None and not 0 < t.numel() <= MOST or here != (here if lead is None else lead):
                    raise ValueError("joined: nothing, too much, or leading dimensions differ")
                lead = here
            if t.dim() != kept + 1:
                given[i] = new.folded(t, kept)
                if given[i] is None:
                    raise ValueError("joined: no stride describes the leading dimensions as one")
        return run(*given)

    return call


@functools.cache
def _in_c():
    """What makes such functions; None where it can be neither found nor compiled."""
    import tvm_ffi

    with _one_at_a_time:
        try:
            path = _library()
            return None if path is None else tvm_ffi.load_module(str(path))["joined"]
        except (OSError, RuntimeError, AttributeError, ValueError) as error:
            warnings.warn(f"tkq: calls of more than two dimensions take a slower way ({error})", stacklevel=2)
            return None


def _library():
    """The compiled file: in the cache, or in a folder that goes with the process where that cannot be written."""
    text = _SOURCE.read_bytes()
    digest = hashlib.sha256(repr((text, platform.machine(), keys.version("apache-tvm-ffi"))).encode()).hexdigest()
    name, store = f"joined-{digest[:32]}.so", build.cache()
    found = None
    try:
        found = store.find(name)
    except OSError:  # a folder that may not be read has nothing
        pass
    if found is not None:
        return found.path
    data = _compiled()
    if data is None:
        return None
    try:
        return store.put(name, data, {"kind": "joined", "source": _SOURCE.name}).path
    except OSError:
        path = pathlib.Path(_folder().name) / name
        path.write_bytes(data)
        return path


@functools.cache
def _folder():
    return tempfile.TemporaryDirectory(prefix="tkq-")


def _compiled() -> bytes | None:
    """The shared object; None without a compiler, or where it fails."""
    from tvm_ffi import libinfo

    if link.compiler() is None:
        return None
    with tempfile.TemporaryDirectory(prefix="tkq-joined-") as folder:
        out = os.path.join(folder, "joined.so")
        done = subprocess.run([link.compiler(), "-std=c11", "-O2", "-fPIC", "-shared", "-s", "-o", out, str(_SOURCE),
                               *(f"-I{path}" for path in libinfo.include_paths())],
                              capture_output=True, stdin=subprocess.DEVNULL)
        return pathlib.Path(out).read_bytes() if done.returncode == 0 else None
