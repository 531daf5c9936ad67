"""The kernels that tkq itself can choose: every configuration, and what its machine code must show.

Does not need the DSL. The SASS tests, ``python -m tkq compile`` and the demo walk through it."""
from __future__ import annotations

import importlib

from .runtime.recipe import Shipped

# modules with a function shipped()
_LISTS = (
    "tkq.norms.shipped",
    "tkq.norms.backward_shipped",
    "tkq.gemm.shipped",
    "tkq.gemm.fp8_plan",
    "tkq.gemm.fp8_narrow_plan",
    "tkq.gemm.grouped_spec",
    "tkq.quantize.shipped",
    "tkq.pointwise.shipped",
    "tkq.softmax.shipped",
    "tkq.losses.shipped",
    "tkq.attention.shipped",
    "tkq.attention.backward_shipped",
)

# Functions whose kernels are named otherwise, or that take those of others too.
_BEGINNINGS = {
    "cross_entropy": ("cross_entropy", "total"),
    "linear_cross_entropy": ("linear_cross_entropy", "cross_entropy", "total", "scale", "gemm"),
    "flash_attn_varlen": ("flash_attn",),
    "rope_qk": ("rope",),
    "rmsnorm_quant": ("rmsnorm",),
    "layernorm_quant": ("layernorm",),
    "quantize_fp8": ("quantize",),
}


def shipped() -> list[Shipped]:
    """Every shipped kernel; names are unique."""
    found = [kernel for module in _LISTS for kernel in importlib.import_module(module).shipped()]
    names = [kernel.name for kernel in found]
    twice = sorted({name for name in names if names.count(name) > 1})
    if twice:
        raise ValueError(f"catalog: names used more than once: {', '.join(twice)}")
    return found


def select(words) -> list[Shipped]:
    """The kernels whose names contain one of the words; all of them where no word is given.

    Raises:
        ValueError: a word that no name contains.
    """
    kernels = shipped()
    for word in words:
        if not any(word in kernel.name for kernel in kernels):
            raise ValueError(f"no shipped kernel's name contains {word!r}; `python -m tkq compile --list` prints them")
    return [kernel for kernel in kernels if not words or any(word in kernel.name for word in words)]


def of_ops(kernels: list[Shipped], ops) -> list[Shipped]:
    """The kernels of some of tkq's functions; all of them where none is named.

    Raises:
        ValueError: a function that none of the kernels is for.
    """
    for op in ops:
        if not any(_is_of(kernel, op) for kernel in kernels):
            raise ValueError(f"no kernel is for {op!r}; functions are those of tkq: rmsnorm, flash_attn, gemm, ...")
    return [kernel for kernel in kernels if not ops or any(_is_of(kernel, op) for op in ops)]


def _is_of(kernel, op):
    """Names of shipped kernels begin with the function's, those of models' kernels have it behind a slash."""
    name = kernel.name.rpartition("/")[2]
    return any(name.startswith((start + "-", start + "_")) for start in _BEGINNINGS.get(op, (op,)))
