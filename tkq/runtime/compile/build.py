"""From a recipe to a function that takes torch tensors: the in-memory table, the disk cache, the compiler.

The DSL is imported when a kernel is compiled, not before."""
from __future__ import annotations

import contextlib
import importlib
import inspect
import os
import pathlib
import threading
import time

from ..system import forks, scratch
from . import digests, keys, launches, link, pressure
from .cache import Cache, Entry, default_folder, private_folder, say_once, say_that_it_cannot_be_written
from .recipe import Recipe

OBJECT = ".obj"  # the suffix of entries that `bundling` makes: object files, to be linked
_functions: dict = {}  # Recipe -> its function: one for each kernel that this process has used
_one_at_a_time = forks.Renewed(threading.RLock)  # the DSL compiles for one thread at a time; also guards _functions
# A process forked while another thread is in the DSL would wait for ever for locks of that thread's. The longest kernel
# takes less than a minute.
_in_the_dsl = forks.Renewed(threading.RLock, wait=60.0)
_cache: Cache | None = None


def cache() -> Cache:
    """The disk cache in use; the environment is asked the first time."""
    global _cache
    if _cache is None:
        _cache = Cache(default_folder())
    return _cache


def configure(folder=None, most_bytes: int | None = None) -> Cache:
    """Choose the disk cache's folder and size for this process, above what the environment says.

    folder: a path. most_bytes: 2^30 where nothing was said. Kernels already in memory stay.

    Raises:
        TypeError: most_bytes is no int.
        ValueError: a number below 0, or a folder that has no absolute path (``~name`` of no user).
    """
    global _cache
    if most_bytes is not None and type(most_bytes) is not int:
        raise TypeError(f"most_bytes: got {type(most_bytes).__name__}, expected an int or None")
    if most_bytes is not None and most_bytes < 0:
        raise ValueError(f"most_bytes: got {most_bytes}, allowed are numbers from 0 on")
    now = cache()
    try:
        chosen = now.folder if folder is None else pathlib.Path(folder).expanduser().absolute()
    except (RuntimeError, OSError) as error:
        raise ValueError(f"folder: got {os.fspath(folder)!r}: {error}") from None
    _cache = Cache(chosen, now.most_bytes if most_bytes is None else most_bytes)
    return _cache


def function(recipe: Recipe):
    """The kernel as a function of positional arguments, torch tensors among them, that runs on torch's current stream.

    In memory, else from the disk cache (milliseconds; the DSL is not imported), else compiled (seconds) and cached.
    It checks dtypes, shapes, strides, alignment and devices of what it gets, by what the builder declared.

    Raises: whatever the builder or the DSL says of a recipe that cannot be compiled.
    """
    found = _functions.get(recipe)
    return _remembered(recipe) if found is None else found


def ensure(recipe: Recipe, arch: str = keys.TARGET) -> bool:
    """See that the disk cache has the kernel, without loading it; needs no GPU. True if it was compiled now.

    One process compiles a kernel while others that want it wait, and so with threads."""
    return _ensured(recipe, arch)[1]


def entry_of(recipe: Recipe, arch: str = keys.TARGET) -> Entry:
    """The kernel's entry in the disk cache, made where it is missing: its file, and the note that ``_built`` wrote."""
    return _ensured(recipe, arch)[0]


def compile_recipe(recipe: Recipe, options: str = "", arch: str = keys.TARGET, runs: bool = True):
    """Compile afresh, past the cache: the DSL's compiled object, for a look at the machine code. Needs no GPU.

    runs: can the object be called, where there is a GPU for it? The DSL loads it for that, which takes a third of a
    short kernel's time; an object that is only exported does without."""
    with _one_at_a_time, _in_the_dsl:
        import cutlass.cute as cute

        kernel, args = _made(recipe)
        if _takes_stream(kernel, args):
            args = (*args, cute.runtime.make_fake_stream(use_tvm_ffi_env_stream=True))
        # The architecture is said here, not by CUTE_DSL_ARCH: that is read once, with the DSL's first import.
        words = filter(None, (keys.OPTIONS, f"--gpu-arch {arch}", recipe.options, options))
        with _pressure():
            return cute.compile(kernel, *args, options=" ".join(words), no_jit_engine=not runs)


def _pressure():
    """What tests have asked for, for the tile layer to see; nothing, and nothing imported, where nothing was."""
    active = pressure.current()
    return contextlib.nullcontext() if active is None else _tile_naps().traced_under(active)


def _tile_naps():
    from ...tile import naps

    return naps


def _remembered(recipe):
    with _one_at_a_time:
        if recipe not in _functions:
            _functions[recipe] = _first_that_loads(recipe)
        return _functions[recipe]


def _first_that_loads(recipe):
    """From the cache; an entry that is whole but does not load, from a machine whose loader differs say (a home folder
    shared by several), is passed over, and the kernel built again. Where no file serves: as the compiler gives it."""
    try:
        while True:
            entry, fresh = _ensured(recipe, keys.TARGET)
            try:
                with _in_the_dsl:  # its first load imports tvm-ffi
                    return _loaded(entry)
            except link.NoRuntime:
                raise
            except Exception as error:
                cache().leave(entry)
                if fresh:
                    problem = error
                    break
    except OSError as error:
        problem = error
    found = compile_recipe(recipe)
    say_once("kernels without files", f"tkq: kernels cannot be loaded from files here ({problem}): each process "
             "compiles its own.")
    return found


def _ensured(recipe, arch) -> tuple[Entry, bool]:
    store, name = _named(recipe, arch)
    entry = _found(store, name)
    if entry is not None:
        return entry, False
    with _one_at_a_time, writable(name) as store:
        entry = _found(store, name)  # another may have been faster
        if entry is not None:
            return entry, False
        data, note = _built(recipe, store, name, arch)
        return store.put(name + (".o" if note["kind"] == "object" else ".so"), data, note), True


def _named(recipe, arch=keys.TARGET) -> tuple[Cache, str]:
    """(the cache, the entry's name): by the digests of sources that the cache remembers, which then has new ones."""
    store = recall()
    name = keys.entry_name(recipe, arch, keys.OPTIONS)
    digests.keep(store.folder)
    return store, name


def recall() -> Cache:
    """The cache, whose digests of sources this process knows then; needed for speed alone."""
    store = cache()
    digests.recall(*store.before, store.folder)
    return store


def _found(store, name):
    """The entry to load: the shared object, or the object file where nothing could be linked."""
    with contextlib.suppress(OSError):  # a folder that may not be read has nothing
        return store.find(name + ".so") or store.find(name + ".o")
    return None


@contextlib.contextmanager
def writable(name):
    """The cache, locked for one entry; where it cannot be written, a folder that goes with the process."""
    store = cache()
    with contextlib.ExitStack() as held:
        try:
            held.enter_context(store.lock(name))
        except OSError as error:
            say_that_it_cannot_be_written(store.folder, error)
            store = Cache(private_folder(), before=())
            held.enter_context(store.lock(name))
        yield store


def places() -> list:
    """Folders for temporary files where the system's has no room: the cache's own."""
    with contextlib.suppress(OSError):
        return [cache().make().path]
    return []


def _built(recipe, store, name, arch) -> tuple[bytes, dict]:
    """(the object, a note about it). An object file that was compiled for a bundle is linked, and not compiled again.

    note: kind "static" or "shared" (a shared object, see link.prepare) or "object" (an object file, which only the DSL
    can load), symbol, builder, args, arch, seconds, dynamic_smem {kernel: bytes, or None where a call decides}."""
    began = time.perf_counter()
    symbol = "tkq_" + name.rpartition("-")[2]
    held = store.find(name + OBJECT)
    if held is not None and "dynamic_smem" in held.note:
        data, memory = held.object(), held.note["dynamic_smem"]
    else:
        compiled = compile_recipe(recipe, arch=arch, runs=False)
        data, memory = exported(compiled, symbol), launches.dynamic_smem(compiled)
    linked = link.link(data, *places())
    data, kind = linked or (data, "object")
    return data, {
        "kind": kind,
        "symbol": symbol,
        "builder": recipe.builder,
        "args": repr(recipe.args),
        "arch": arch,
        "seconds": round(time.perf_counter() - began, 3),
        "dynamic_smem": memory,
    }


def exported(compiled, symbol) -> bytes:
    """The object file."""

    def written(folder):
        path = os.path.join(folder, "kernel.o")
        with _in_the_dsl:
            compiled.export_to_c(path, function_name=symbol)
        return pathlib.Path(path).read_bytes()

    return scratch.worked(written, *places())


def _made(recipe):
    module, _, name = recipe.builder.partition(":")
    builder = getattr(importlib.import_module(module), name)
    made = builder(*recipe.args)
    if isinstance(builder, type):
        made = made, made.fake_arguments()
    if not (isinstance(made, tuple) and len(made) == 2 and callable(made[0]) and isinstance(made[1], tuple)):
        raise TypeError(f"{recipe.builder}: returned {made!r}, expected (jit callable, tuple of fake arguments)")
    if not any(map(_on_gpu, made[1])) and any(_on_gpu(x) for argument in made[1] for x in _flat(argument)):
        raise ValueError(f"{recipe.builder}: all tensors are in tuples, expected is one that is an argument itself: "
                         "the kernel runs on the first such one's GPU, and on the current one where there is none")
    return made


def _flat(x):
    return (y for part in x for y in _flat(part)) if isinstance(x, tuple) else (x,)


def _on_gpu(x):
    import cutlass.cute as cute

    return isinstance(x, cute.Tensor) and x.memspace == cute.AddressSpace.gmem


def _takes_stream(kernel, args) -> bool:
    """Has the callable one parameter more than there are arguments? A host function without launches has not."""
    called = kernel if inspect.isfunction(kernel) else type(kernel).__call__.__get__(kernel)
    required = [p for p in inspect.signature(called).parameters.values() if p.default is p.empty]
    return len(required) > len(args)


def _loaded(entry):
    symbol = entry.note["symbol"]
    if entry.note["kind"] == "object":
        import cutlass.cute as cute  # half a second, which a shared object saves

        return entry.loaded(lambda path: getattr(cute.runtime.load_module(path, enable_tvm_ffi=True), symbol))
    link.prepare(entry.note["kind"])
    return entry.loaded(lambda path: link.load(path)[symbol])
