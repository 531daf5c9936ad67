"""From a recipe to a function that takes torch tensors: from memory, a bundle, the disk cache, or the compiler."""
from __future__ import annotations

from . import build, bundle, dry_run

_OF_THE_DSL = ("cutlass", "cuda", "nvidia_cutlass_dsl")  # packages that a machine with a bundle need not have


def function(recipe):
    """The kernel as a function of positional arguments, torch tensors among them, that runs on torch's current stream.

    In memory, else from the bundle (see ``bundle``) or the disk cache (milliseconds; the DSL is not imported), else
    compiled (seconds) and cached. It checks dtypes, shapes, strides, alignment and devices of what it gets, by what the
    builder declared.

    Raises:
        RuntimeError: the kernel is neither in the bundle nor in the cache, and the DSL is not installed.
        Whatever the builder or the DSL says of a recipe that cannot be compiled.
    """
    found = build._functions.get(recipe)
    return _first(recipe) if found is None else found


def _first(recipe):
    if dry_run.under_way():
        return dry_run.noted(recipe)
    held = bundle.current()
    found = None if held is None else held.function(recipe)
    if found is None:
        return _built(recipe, held)
    build._functions[recipe] = found
    return found


def _built(recipe, held):
    from . import ffi  # noqa: F401  (before what follows imports tvm-ffi)

    try:
        return build.function(recipe)
    except ModuleNotFoundError as error:
        if (error.name or "").partition(".")[0] not in _OF_THE_DSL:
            raise
        places = [] if held is None else [f"the bundle {held.path}" + "".join(f" ({why})" for why in held.problem)]
        places += map(str, (*build.cache().before, build.cache().folder))
        raise RuntimeError(
            f"tkq: a kernel is not in {', nor in '.join(places)}, and {error.name}, which is needed to compile it, is "
            f"not installed: {recipe.builder} of {recipe.args!r}") from error
