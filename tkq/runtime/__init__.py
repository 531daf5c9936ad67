"""Compile, cache and call kernels. Importing this does not bring the DSL.

    function(recipe)        the callable of a kernel: from memory, a bundle, the disk cache, or compiled now
    ensure(recipe)          the same without loading it: fills the disk cache, on a machine without a GPU too
    compile_recipe(recipe)  compiled afresh, for looking at the machine code
    ignore_tuned()          calls run what is planned, whatever tkq.tune found

Modules: ``fake`` (tensors to compile on), ``arch`` (the GPU), ``counters`` (for kernels that count).
"""
import importlib as _importlib

from .. import names as _names
from .compile.build import cache, compile_recipe, configure, ensure
from .compile.kernels import function
from .compile.recipe import Recipe, Shipped
from .compile.tuned import ignore_tuned

__all__ = ["Recipe", "Shipped", "cache", "compile_recipe", "configure", "ensure", "function",
           "ignore_tuned"]
_MODULES = {"arch": "device.arch", "counters": "call.counters", "fake": "compile.fake"}


def __getattr__(name):
    if name in _MODULES:
        return _importlib.import_module(f"{__name__}.{_MODULES[name]}")
    raise _names.unknown(__name__, name, (*__all__, *_MODULES))


def __dir__():
    return _names.listed(globals(), (*__all__, *_MODULES))
