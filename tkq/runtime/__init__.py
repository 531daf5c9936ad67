"""Compile, cache and call kernels. Importing this does not bring the DSL.

    function(recipe)        the callable of a kernel: from memory, a bundle, the disk cache, or compiled now
    ensure(recipe)          the same without loading it: fills the disk cache, on a machine without a GPU too
    compile_recipe(recipe)  compiled afresh, for looking at the machine code
    ignore_tuned()          calls run what is planned, whatever tkq.tune found
"""
from .build import cache, compile_recipe, configure, ensure
from .kernels import function
from .recipe import Recipe, Shipped
from .tuned import ignore_tuned

__all__ = ["Recipe", "Shipped", "cache", "compile_recipe", "configure", "ensure", "function",
           "ignore_tuned"]
