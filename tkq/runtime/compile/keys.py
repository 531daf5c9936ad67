"""The name of a cache entry: all that can change a kernel's machine code, found out without importing the DSL."""
import ctypes
import dataclasses
import functools
import hashlib
import os
import platform
import re
from importlib import metadata

from . import plain, pressure, sources, values

TARGET = "sm_90a"
OPTIONS = "--enable-tvm-ffi"

# Options with which line numbers are in the machine code, or may be.
_SAYS_WHERE = re.compile(r"line|debug|assert|\s-g\b", re.IGNORECASE)
# Switches of the DSL that say where files go, what is printed, or the default architecture (ours is always explicit).
_HARMLESS = ("CUTE_DSL_ARCH", "CUTE_DSL_CACHE_DIR", "CUTE_DSL_DUMP_DIR", "CUTE_DSL_KEEP", "CUTE_DSL_LIBS",
             "CUTE_DSL_LOG_LEVEL", "CUTE_DSL_LOG_TO_CONSOLE", "CUTE_DSL_LOG_TO_FILE", "CUTE_DSL_SHOW_STACKTRACE")


def entry_name(recipe, arch: str = TARGET, options: str = OPTIONS) -> str:
    """``module-digest``: the same name for the same machine code, whichever process asks."""
    modules = modules_of(recipe)
    return _named(recipe, arch, options, (toolchain(), *sources.versions(modules), *values.of(recipe, modules)))


def bundled_name(recipe, arch: str = TARGET) -> str:
    """The kernel's name in a bundle: that of its sources, its arguments and the environment variables that a user's
    sources read by name. A machine that runs a bundle may lack what compiled it, or have another version."""
    return _named(recipe, arch, OPTIONS, "bundle")


def _named(recipe, arch, options, compiler):
    modules, chosen = modules_of(recipe), switches()
    as_text = bool(chosen or _SAYS_WHERE.search(f"{recipe.options} {options}"))
    parts = (recipe.builder, text_of(recipe.args), recipe.options, arch, options, machine(), compiler, chosen,
             sources.digest(modules, as_text), sources.environment(modules), *filter(None, [pressure.current()]))
    stem = recipe.module.rpartition(".")[2].strip("_") or "kernel"
    return f"{stem}-{hashlib.sha256(repr(parts).encode()).hexdigest()[:32]}"


def text_of(value) -> str:
    """A recipe's argument as it counts: by its ``repr``. tkq's own dataclasses count with their modules, and without
    the fields that have their defaults, which count by the class's source. A field that is left out of a dataclass's
    repr counts where it has a text, the same in each process, and is part of what makes two of them equal."""
    if type(value) is tuple:
        return f"({', '.join(map(text_of, value))}{',' * (len(value) == 1)})"
    if not _has_written_repr(type(value)):
        return repr(value)
    texts = [(field, _text_of_field(field, getattr(value, field.name))) for field in dataclasses.fields(value)]
    own = type(value).__module__.partition(".")[0] == "tkq"
    said = (f"{field.name}={text}" for field, text in texts
            if text is not None and not (own and text == _default_text(field)))
    return f"{type(value).__module__ + '.' if own else ''}{type(value).__qualname__}({', '.join(said)})"


def _text_of_field(field, value):
    if field.repr:
        return text_of(value)
    return plain.Texts().of(value) if field.compare else None


def _default_text(field):
    return None if field.default is dataclasses.MISSING else _text_of_field(field, field.default)


@functools.cache
def _has_written_repr(cls) -> bool:
    """Is it a dataclass whose repr is the one that dataclasses write?"""
    written = getattr(vars(cls).get("__repr__"), "__wrapped__", None)
    return dataclasses.is_dataclass(cls) and written is not None and written.__code__.co_filename == "<string>"


def machine() -> str:
    """The processor's architecture, which a kernel's host code is for."""
    return platform.machine()


def modules_of(recipe) -> tuple:
    """The builder's module, those that the recipe adds, and those of its arguments' classes (tkq's and the user's):
    methods of a spec or a plan decide too, and the builder need not import what it is given."""
    modules = {recipe.module, *recipe.sources}
    tops = {"tkq", *(module.partition(".")[0] for module in modules)}
    return tuple(sorted(modules | {m for m in _classes(recipe.args)
                                   if m.partition(".")[0] in tops or sources.is_users(m)}))


def _classes(value) -> set:
    """The modules of the classes of a value and of all that is in it."""
    found = {type(value).__module__}
    fields = (getattr(value, name) for name in getattr(value, "__dataclass_fields__", ()))
    return found.union(*map(_classes, value if isinstance(value, (tuple, frozenset)) else fields))


def version(distribution: str) -> str | None:
    """The installed version of a package; None where it is not installed."""
    try:
        found = metadata.distribution(distribution)
    except metadata.PackageNotFoundError:
        return None
    # The line itself: metadata.version parses the whole description as a mail, 1 ms of a process's first call each.
    line = re.search(r"^Version:[ \t]*(\S+)", found.read_text("METADATA") or "", re.MULTILINE)
    return line[1] if line else found.version


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
