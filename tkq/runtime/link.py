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
import subprocess
import sys
import tempfile

from . import keys

_SHIM = pathlib.Path(__file__).with_name("shim.c")
_SHIMMED = {b"CuteDSLRT_TVMFFISetRaisedCudaError"}
# Lazy: on a machine without CUDA a kernel still loads and checks its arguments. Bsymbolic: kernels of the same name in
# two objects stay apart.
_FLAGS = ("-O1", "-fPIC", "-shared", "-s", "-Wl,-z,lazy", "-Wl,-Bsymbolic", "-Wl,--exclude-libs,ALL",
          "-Wl,--gc-sections")


@functools.cache
def compiler() -> str | None:
    """The path of a C compiler; None where there is none."""
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
        return "no C compiler (cc, gcc or clang) is on PATH"
    if runtime_kind() is None:
        return f"the runtime libraries of nvidia-cutlass-dsl-libs-{keys.flavour() or 'cu13'} are not installed"
    return None


def link(data: bytes) -> tuple[bytes, str] | None:
    """(a shared object from an object file's bytes, the runtime kind it needs); None where that cannot be done here."""
    if why_not() is not None:
        return None
    # The shim stands for one function of the shared runtime. Switches of the DSL can make a kernel call others.
    static = runtime_kind() == "static" and set(re.findall(rb"CuteDSLRT_\w+", data)) <= _SHIMMED
    with tempfile.TemporaryDirectory(prefix="tkq-link-") as folder:
        source, out = os.path.join(folder, "kernel.o"), os.path.join(folder, "kernel.so")
        pathlib.Path(source).write_bytes(data)
        command = [compiler(), *_FLAGS, "-o", out, source]
        if static:
            command += [str(_SHIM), str(dsl_folder() / "libcuda_dialect_runtime_static.a")]
        done = subprocess.run(command, capture_output=True, stdin=subprocess.DEVNULL)
        if done.returncode:
            return None
        return pathlib.Path(out).read_bytes(), "static" if static else "shared"


@functools.cache
def prepare(kind: str) -> None:
    """Make visible what a shared object of this runtime kind leaves open. Once a process.

    Raises:
        RuntimeError: there is a GPU driver but no CUDA runtime of the flavour in use: a launch would end the process.
            Without a driver there are no CUDA tensors, and argument checks end every call before.
    """
    import tvm_ffi  # noqa: F401  (loads libtvm_ffi for all)

    if kind == "shared":  # has a CUDA runtime in it
        ctypes.CDLL(str(dsl_folder() / "libcute_dsl_runtime.so"), mode=ctypes.RTLD_GLOBAL)
    elif cudart() is None and keys.driver_cuda() is not None:
        raise RuntimeError(f"the CUDA runtime, {cudart_name()}, was not found: PyTorch has not loaded it, no package "
                           "has it; `python -m tkq doctor` says which packages go together")


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
