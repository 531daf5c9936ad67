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
    "tkq.gemm.grouped_spec",
    "tkq.quantize.shipped",
    "tkq.pointwise.shipped",
    "tkq.softmax.shipped",
    "tkq.losses.shipped",
    "tkq.attention.shipped",
    "tkq.attention.backward_shipped",
)


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
