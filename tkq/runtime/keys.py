"""The name of a cache entry: all that can change a kernel's machine code, found out without importing the DSL."""
import ctypes
import functools
import hashlib
import importlib.util
import os
import pathlib
import platform
import sys
from importlib import metadata

TARGET = "sm_90a"
OPTIONS = "--enable-tvm-ffi"

_PACKAGE = pathlib.Path(__file__).resolve().parent.parent
# The kernels and what they are made with. Not runtime/recipe.py and the like: they see no kernel.
_KERNEL_SOURCES = ("reduction_*.py", "row_kernel.py", "rows/**/*.py", "utils.py", "tile/**/*.py", "norms/**/*.py",
                   "attention/**/*.py", "gemm/**/*.py", "pointwise/**/*.py", "quantize/**/*.py", "row_pass.py",
                   "softmax/**/*.py", "losses/**/*.py", "row_*.py", "runtime/build.py", "runtime/fake.py",
                   "runtime/link.py", "runtime/shim.c")
# Switches of the DSL that say where files go, what is printed, or the default architecture (ours is always explicit).
_HARMLESS = ("CUTE_DSL_ARCH", "CUTE_DSL_CACHE_DIR", "CUTE_DSL_DUMP_DIR", "CUTE_DSL_KEEP", "CUTE_DSL_LIBS",
             "CUTE_DSL_LOG_LEVEL", "CUTE_DSL_LOG_TO_CONSOLE", "CUTE_DSL_LOG_TO_FILE", "CUTE_DSL_SHOW_STACKTRACE")


def entry_name(recipe, arch: str = TARGET, options: str = OPTIONS) -> str:
    """``module-digest``: the same name for the same machine code, whichever process asks."""
    parts = (recipe.builder, repr(recipe.args), recipe.options, arch, options, platform.machine(), toolchain(),
             switches(), kernel_sources(), tuple(map(module_sources, (recipe.module, *recipe.sources))))
    stem = recipe.module.rpartition(".")[2].strip("_") or "kernel"
    return f"{stem}-{hashlib.sha256(repr(parts).encode()).hexdigest()[:32]}"


def version(distribution: str) -> str | None:
    """The installed version of a package; None where it is not installed."""
    try:
        return metadata.version(distribution)
    except metadata.PackageNotFoundError:
        return None


@functools.cache
def toolchain() -> tuple:
    """Versions of what compiles and calls, and the CUDA flavour."""
    names = ["nvidia-cutlass-dsl", "nvidia-cutlass-dsl-libs-core", "nvidia-cutlass-dsl-libs-base", "apache-tvm-ffi"]
    if flavour():
        names.append(f"nvidia-cutlass-dsl-libs-{flavour()}")
    return tuple((name, version(name)) for name in names)


@functools.cache
def flavours() -> tuple:
    """The CUDA flavours of the DSL that are installed, newest first."""
    return tuple(f for f in ("cu13", "cu12") if version(f"nvidia-cutlass-dsl-libs-{f}"))


@functools.cache
def flavour() -> str | None:
    """The one that the DSL takes: the newest that the GPU driver can run; without a driver the newest."""
    driver = driver_cuda()
    return next((f for f in flavours() if driver is None or int(f[2:]) <= driver[0]), None)


@functools.cache
def driver_cuda() -> tuple | None:
    """(major, minor) of the CUDA version that the GPU driver offers; None without a driver. Needs no device."""
    try:
        driver = ctypes.CDLL("libcuda.so.1")
    except OSError:
        return None
    number = ctypes.c_int(0)
    if driver.cuDriverGetVersion(ctypes.byref(number)) or not number.value:
        return None
    return number.value // 1000, number.value % 1000 // 10


def switches() -> tuple:
    """The DSL's environment switches that may change code. Read here, and nowhere deeper."""
    return tuple(sorted((k, v) for k, v in os.environ.items() if k.startswith("CUTE_DSL_") and k not in _HARMLESS))


@functools.cache
def kernel_sources() -> str:
    """A digest of tkq's kernel sources, read once a process: edit them and start anew."""
    return _digest(_PACKAGE, sorted({p for pattern in _KERNEL_SOURCES for p in _PACKAGE.glob(pattern)}))


@functools.cache
def module_sources(module: str) -> str:
    """The same for a module outside tkq: its file, and its folder's where it is in a package."""
    if module.partition(".")[0] == "tkq":
        return ""
    path = _source_file(module)
    return _digest(path.parent, sorted(path.parent.glob("*.py")) if "." in module else [path])


def _source_file(module: str) -> pathlib.Path:
    loaded = sys.modules.get(module)
    spec = None if loaded else importlib.util.find_spec(module)
    file = getattr(loaded, "__file__", None) if loaded else spec and spec.origin
    if not file or not os.path.isfile(file):
        raise ImportError(f"{module}: has no source file; the cache needs one to notice changes, the DSL to compile")
    return pathlib.Path(file).resolve()


def _digest(root: pathlib.Path, paths) -> str:
    h = hashlib.sha256()
    for path in paths:
        text = path.read_bytes()
        h.update(f"{path.relative_to(root)} {len(text)}\0".encode() + text)
    return h.hexdigest()
