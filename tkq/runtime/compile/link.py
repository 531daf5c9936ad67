"""Compiled kernels as shared objects, so that a process that finds one in the cache need not import the DSL.

Nothing of the machine is written into them: the CUDA runtime, tvm-ffi and (where there is no static one) the DSL's
runtime stay open symbols, and ``prepare`` makes them visible before a kernel is loaded.
"""
from __future__ import annotations

import ctypes
import functools
import importlib.util
import os
import pathlib
import re
import shutil
import sys

from ..system import scratch
from . import keys
from .cache import say_once

_SHIM = pathlib.Path(__file__).with_name("shim.c")
_SHIMMED = {b"CuteDSLRT_TVMFFISetRaisedCudaError"}
# Lazy: on a machine without CUDA a kernel still loads and checks its arguments. Bsymbolic: kernels of the same name in
# two objects stay apart.
_CODE = "-O1", "-fPIC"
_FLAGS = (*_CODE, "-shared", "-s", "-Wl,-z,lazy", "-Wl,-Bsymbolic", "-Wl,--exclude-libs,ALL", "-Wl,--gc-sections")
_shims: dict = {}  # path of a C compiler -> the shim as an object file's bytes: most of a link is its compilation
_unending: list = []  # what is to be said of a C compiler that did not end: it is not asked again


class NoRuntime(RuntimeError):
    """No kernel can be loaded here, whichever."""


def compiler() -> str | None:
    """The path of a C compiler; None where there is none, or it did not end in time (in this process)."""
    return None if _unending else _on_path()


@functools.cache
def _on_path():
    return next(filter(None, map(shutil.which, ("cc", "gcc", "clang"))), None)


@functools.cache
def dsl_folder() -> pathlib.Path | None:
    """Where the DSL's libraries for the CUDA flavour in use are; None where it is not installed."""
    spec = importlib.util.find_spec("nvidia_cutlass_dsl")
    for root in (spec.submodule_search_locations or ()) if spec and keys.flavour() else ():
        folder = pathlib.Path(root) / keys.flavour() / "lib"
        if folder.is_dir():
            return folder
    return None


def runtime_kind() -> str | None:
    """Which runtime of the DSL a kernel is linked for: "static" (52 KB, becomes part of it), "shared" (44 MB, found
    when it is loaded), None: neither is there."""
    folder = dsl_folder()
    for kind, name in (("static", "libcuda_dialect_runtime_static.a"), ("shared", "libcute_dsl_runtime.so")):
        if folder and (folder / name).is_file():
            return kind
    return None


def why_not() -> str | None:
    """Why kernels cannot be linked here, in words; None where they can."""
    if compiler() is None:
        return _unending[0] if _unending else "no C compiler (cc, gcc or clang) is on PATH"
    if runtime_kind() is None:
        return f"the runtime libraries of nvidia-cutlass-dsl-libs-{keys.flavour() or 'cu13'} are not installed"
    return None


def link(data: bytes, *places) -> tuple[bytes, str] | None:
    """(a shared object from an object file's bytes, the runtime kind it needs); None where that cannot be done here.

    places: folders for temporary files where the system's has no room."""
    if why_not() is not None:
        return None
    # The shim stands for one function of the shared runtime. Switches of the DSL can make a kernel call others.
    static = runtime_kind() == "static" and set(re.findall(rb"CuteDSLRT_\w+", data)) <= _SHIMMED

    def linked(folder):
        source = os.path.join(folder, "kernel.o")
        pathlib.Path(source).write_bytes(data)
        parts = [_shim(folder), str(dsl_folder() / "libcuda_dialect_runtime_static.a")] if static else []
        return compiled([*_FLAGS, source, *parts], folder)

    found = attempted(linked, *places)
    return None if found is None else (found, "static" if static else "shared")


def _shim(folder):
    """The shim's object file, in the folder; compiled by the first that asks. Raises what ``scratch.run`` does."""
    path, used = pathlib.Path(folder, "shim.o"), compiler()
    if used not in _shims:
        scratch.run([used, *_CODE, "-c", str(_SHIM), "-o", str(path)], folder)
        _shims[used] = path.read_bytes()
    path.write_bytes(_shims[used])
    return str(path)


def compiled(words: list, folder: str) -> bytes:
    """The shared object that the C compiler makes of files. Raises what ``scratch.run`` does, and OSError where the
    result is no shared object for this machine."""
    out = os.path.join(folder, "made.so")
    scratch.run([compiler(), *words, "-o", out], folder)
    found = pathlib.Path(out).read_bytes()
    if not _is_shared_object(found):
        raise OSError(f"{compiler()}: what it makes is no shared object for this machine")
    return found


def attempted(work, *places) -> bytes | None:
    """work(a temporary folder), in which ``compiled`` is called; None where it fails, which a warning says, once."""
    used = compiler()
    try:
        return scratch.worked(work, *places)
    except OSError as error:
        if isinstance(error, scratch.NoEnd):
            _unending.append(str(error))
        say_once("C compiler", f"tkq: the C compiler {used} cannot be used ({error}): calls cost the CPU more, and a "
                 "process that finds a kernel in the cache imports the DSL.")
        return None


def _is_shared_object(data):
    """By its header: class, byte order and machine of ELF as this process's own program has them."""
    try:
        with open("/proc/self/exe", "rb") as file:
            mine = file.read(20)
    except OSError:
        mine = data
    return data[:4] == b"\x7fELF" and data[16:18] in (b"\3\0", b"\0\3") and (data[4:6], data[18:20]) == (
        mine[4:6], mine[18:20])


@functools.cache
def prepare(kind: str) -> None:
    """Make visible what a shared object of this runtime kind leaves open. Once a process.

    Raises:
        NoRuntime: there is a GPU driver but no CUDA runtime of the flavour in use: a launch would end the process.
            Without a driver there are no CUDA tensors, and argument checks end every call before.
    """
    import tvm_ffi  # noqa: F401  (loads libtvm_ffi for all)

    if kind == "shared":  # has a CUDA runtime in it
        ctypes.CDLL(str(dsl_folder() / "libcute_dsl_runtime.so"), mode=ctypes.RTLD_GLOBAL)
    elif cudart() is None and keys.driver_cuda() is not None:
        raise NoRuntime(f"the CUDA runtime, {cudart_name()}, was not found: PyTorch has not loaded it, no package "
                           "has it; `python -m tkq doctor` says which packages go together")


def load(path: str):
    """A shared object as a module of tvm-ffi's, for as long as the process lasts. Its name may be any: tvm-ffi's own
    ``load_module`` takes those that end with .so. Raises RuntimeError."""
    import tvm_ffi

    module = tvm_ffi.get_global_func("ffi.Module.load_from_file.so")(path, "so")
    tvm_ffi.get_global_func("ffi.ModuleGlobalsAdd")(module)
    return module


def cudart_name() -> str:
    """The file name of the CUDA runtime that goes with the flavour in use."""
    return f"libcudart.so.{(keys.flavour() or 'cu13')[2:]}"


@functools.cache
def cudart() -> str | None:
    """Load the CUDA runtime of the flavour in use so that all see it; where it was found. None: nowhere."""
    name, major = cudart_name(), cudart_name().rpartition(".")[2]
    # First the one that torch has loaded, wherever it lies; then the wheels that torch brings; then the system's.
    attempts = [(name, os.RTLD_NOLOAD)]
    for root in sys.path:
        for part in (f"nvidia/cu{major}/lib", "nvidia/cuda_runtime/lib"):
            path = os.path.join(root or ".", part, name)
            if os.path.isfile(path):
                attempts.append((path, 0))
    for path, mode in (*attempts, (name, 0)):
        try:
            ctypes.CDLL(path, mode=ctypes.RTLD_GLOBAL | mode)
            return path
        except OSError:
            continue
    return None
