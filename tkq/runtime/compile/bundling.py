"""Make a bundle: compile kernels to object files and link them into one shared library. See ``bundle``."""
from __future__ import annotations

import contextlib
import os
import pathlib
import re
import tempfile

from ...version import __version__
from ..system import scratch
from . import build, digests, keys, launches, link
from .bundle import NAME, NATIVE, digest, native_sources
from .cache import packed

# What is looked for is seen from outside, nothing else: names of kernels' host functions are hundreds of letters.
_VISIBLE = "{ global: __tvm_ffi_*; tkq_*; local: *; };\n"
_LONGEST = 600.0  # seconds for a thousand kernels
_FLAGS = ("-std=gnu11", "-O2", "-fPIC", "-shared", "-s", "-Wl,-z,lazy", "-Wl,-Bsymbolic", "-Wl,--exclude-libs,ALL",
          "-Wl,--gc-sections")


def write(folder: pathlib.Path, objects: dict) -> pathlib.Path:
    """Link a bundle into a folder, which is made; what was there is replaced in one step.

    objects: {recipe: (symbol, the object file's bytes)}, as ``compiled`` gives them.

    Raises:
        RuntimeError: no C compiler or no static runtime of the DSL, or an object that needs more than that.
    """
    if link.why_not() is not None or link.runtime_kind() != "static":
        raise RuntimeError(f"a bundle cannot be linked: {link.why_not() or 'the DSL has no static runtime library'}")
    folder.mkdir(mode=0o755, parents=True, exist_ok=True)  # with a umask of 002 too: a group must not write there
    note = {"kind": "bundle", "tkq": __version__, "arch": keys.TARGET, "machine": keys.machine(),
            "cuda": (keys.flavour() or "cu13")[2:], "toolchain": keys.toolchain(),
            "native": {kind: digest(kind) for kind in NATIVE},
            "kernels": {keys.bundled_name(recipe): symbol for recipe, (symbol, _) in objects.items()}}
    note["digests"] = digests.all_known()  # after the names: machines with the same files need not parse them
    _replace(folder / NAME, packed(_linked(dict(objects.values())), note))
    return folder / NAME


def _replace(path, data):
    handle, temporary = tempfile.mkstemp(prefix=".tkq-new-", dir=path.parent)
    try:
        with os.fdopen(handle, "wb") as file:
            file.write(data)
            os.fchmod(file.fileno(), 0o644)
        os.replace(temporary, path)
    except BaseException:
        with contextlib.suppress(OSError):
            os.unlink(temporary)
        raise


def compiled(recipe) -> tuple[str, bytes, bool]:
    """(symbol, the object file's bytes, whether it was compiled now): in the disk cache, beside what it links."""
    store, name = build._named(recipe)
    symbol = "tkq_" + name.rpartition("-")[2]
    found = store.find(name + build.OBJECT)
    if found is None:
        with build.writable(name) as store:
            found = store.find(name + build.OBJECT)  # another process may have been faster
            if found is None:
                made = build.compile_recipe(recipe, runs=False)
                data = build.exported(made, symbol)
                store.put(name + build.OBJECT, data, {
                    "symbol": symbol, "builder": recipe.builder, "args": repr(recipe.args),
                    "dynamic_smem": launches.dynamic_smem(made)})
                return symbol, data, True
    return symbol, found.object(), False


def _linked(objects):
    from .ffi import tvm_ffi

    beyond = {name for data in objects.values() for name in re.findall(rb"CuteDSLRT_\w+", data)} - link._SHIMMED
    if beyond:
        raise RuntimeError(f"a bundle cannot be linked: kernels call {sorted(beyond)}, which the DSL's shared runtime "
                           "alone has; unset the switches CUTE_DSL_* and compile anew")
    with tempfile.TemporaryDirectory(prefix="tkq-link-") as place:
        folder = pathlib.Path(place)
        out, visible, arguments = folder / NAME, folder / "visible", folder / "arguments"
        visible.write_text(_VISIBLE)
        paths = [folder / f"{symbol}.o" for symbol in objects]
        for path, data in zip(paths, objects.values()):
            path.write_bytes(data)
        native = [path for kind in NATIVE for path in native_sources(kind) if path.suffix == ".c"]
        runtime = link.dsl_folder() / "libcuda_dialect_runtime_static.a"
        words = [*_FLAGS, f"-Wl,--version-script={visible}", *(f"-I{path}" for path in tvm_ffi.libinfo.include_paths()),
                 "-o", out, *paths, link._SHIM, *native, runtime]
        arguments.write_text("\n".join(f'"{word}"' for word in words))  # too many for a command line
        try:
            scratch.run([link.compiler(), f"@{arguments}"], place, _LONGEST)
        except OSError as error:
            raise RuntimeError(f"a bundle cannot be linked: {error}") from None
        return out.read_bytes()
