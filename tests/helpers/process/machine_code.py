"""Kernels for tests that read their machine code and do not run them."""
import functools

from tkq.runtime.compile import build, launches
from tkq.warmup import catalog

SUFFIX = "-code.o"  # as the cache names entries; nothing else looks for it


def entry_of(recipe):
    """An entry of the cache with the kernel's machine code, made where there is none.

    Where there is no GPU it is neither exported nor linked, which takes as long as half of a short kernel's
    compilation; but for one kernel of each builder, `linked()`, and where a GPU may run it."""
    import torch  # here: the process that hands tests to workers needs none

    if torch.cuda.is_available() or recipe in linked():
        return build.entry_of(recipe)
    store, name = build._named(recipe)
    found = build._found(store, name) or store.find(name + SUFFIX)
    if found is not None:
        return found
    with build.writable(name) as store:
        found = store.find(name + SUFFIX)  # another process may have been faster
        return found or _compiled(recipe, store, name)


@functools.cache
def linked() -> frozenset:
    """Recipes of the quick kernels that tkq ships, one of each builder."""
    return frozenset({kernel.recipe.builder: kernel.recipe for kernel in catalog.shipped() if kernel.quick}.values())


def _compiled(recipe, store, name):
    made = build.compile_recipe(recipe, runs=False)
    note = dict(builder=recipe.builder, args=repr(recipe.args), dynamic_smem=launches.dynamic_smem(made))
    return store.put(name + SUFFIX, launches.machine_code(made), note)
