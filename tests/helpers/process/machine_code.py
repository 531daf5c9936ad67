"""Kernels for tests that read their machine code and do not run them."""
import torch

from tkq.runtime.compile import build, launches

SUFFIX = ".cubin"


def entry_of(recipe):
    """An entry of the cache with the kernel's machine code, made where there is none.

    Without a GPU it is neither exported nor linked, which takes as long as half of a short kernel's compilation; where
    there is one, the kernel's own entry, which tests on the GPU run."""
    store, name = build._named(recipe)
    found = build._found(store, name) or store.find(name + SUFFIX)
    if found is not None:
        return found
    if torch.cuda.is_available():
        return build.entry_of(recipe)
    with build.writable(name) as store:
        found = store.find(name + SUFFIX)  # another process may have been faster
        return found or _compiled(recipe, store, name)


def _compiled(recipe, store, name):
    made = build.compile_recipe(recipe, runs=False)
    note = dict(builder=recipe.builder, args=repr(recipe.args), dynamic_smem=launches.dynamic_smem(made))
    return store.put(name + SUFFIX, launches.machine_code(made), note)
