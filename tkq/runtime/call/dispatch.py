"""From a call to one of the kernels that calls like it have taken, with as little Python as it takes.

What a kernel is compiled for (types, columns, whether there is a bias) has to be asked of every tensor of a call, and
kernels know rows of matrices where a call has any number of dimensions: in Python that is a key of many parts, and
views of 0.8 us each. tvm-ffi describes all tensors to the callee anyway. So a function in C stands between a call
and its kernel (dispatch.c): it finds the kernel by these descriptions, and changes them to those of matrices. It is
compiled once, where there is a C compiler, and cached with the kernels. Without one the same is done here.
"""
from __future__ import annotations

import functools
import threading
import warnings
from typing import NamedTuple, Optional

from torch import Tensor

from ..compile import native
from ..system import forks
from . import alloc

MOST = 1 << 30  # elements of a call's first tensor: more may need several launches, which is the caller's business
_NOTHING, _CONSTANT = -1, -2
_TRAILING, _AS_IT_IS, _RESULT, _COLUMNS, _FEWEST = 7, 8, 16, 32, 64
_one_at_a_time = forks.Renewed(threading.Lock)


class Ended(NamedTuple):
    """A kernel with a number after all that a call has for it."""

    run: object
    number: int

    def __call__(self, *given):
        return self.run(*given, self.number)


class Shapes(NamedTuple):
    """How the dimensions of a call's arguments become those of a kernel. None stays None, as do all others.

    rows, results: {place of an argument: dimensions that stay}; those before become one, also where there are none. All
    of rows must have the same leading dimensions; results have those that the caller gave them. columns: places where
    the last dimension decides which kernel it is. takes: for each argument of the kernel its place in the call, or None
    for nothing; where not given, all in turn. fewest: calls all of whose rows could keep a dimension less are not for
    this kernel."""

    rows: dict
    results: dict
    columns: tuple = (0,)
    takes: Optional[tuple] = None
    fewest: bool = False


def added(found, run, given: tuple, shapes: Shapes):
    """A function that takes calls like `given` to `run`, and other calls to where `found` takes them.

    found: what this function returned before, or None. run: a kernel as `runtime.function` gives it, or an `Ended`.
    given: the arguments of such a call, of which the first is a tensor. Alike are calls whose tensors have the same
    types and, but for `rows` and `results`, numbers of dimensions, the first of them on the same device, and with the
    same arguments None.

    The function that is returned raises a ValueError without words for a user, before anything is launched, where it
    knows no such call, where leading dimensions differ or no stride describes them as one, and for no elements or more
    than `MOST`. All else the kernel checks. For given ones of that last kind `found` is what is returned."""
    if not 0 < given[0].numel() <= MOST:
        return found
    ways = [_AS_IT_IS] * len(given)
    for place, trailing in shapes.rows.items():
        ways[place] = trailing | _FEWEST * shapes.fewest
    for place, trailing in shapes.results.items():
        ways[place] = _RESULT | trailing
    for place in shapes.columns:
        ways[place] |= _COLUMNS
    kernel, constant = run if isinstance(run, Ended) else (run, None)
    takes = range(len(given)) if shapes.takes is None else shapes.takes
    places = [_NOTHING if place is None else place for place in takes] + [_CONSTANT] * (constant is not None)
    made = _in_c()
    if made is not None and isinstance(kernel, type(made)) and (found is None or isinstance(found, type(made))):
        return made(found, kernel, constant or 0, len(given), len(places), *places, *ways, *given)
    return _InPython(found, _Entry(kernel, constant, places, ways, _look(ways, given)))


# ---- in Python ------------------------------------------------------------------------------------------------------


class _Entry(NamedTuple):
    run: object
    constant: Optional[int]
    places: list
    ways: list
    looks: list


class _InPython:
    def __init__(self, found, entry):
        entries = [e for e in getattr(found, "entries", ()) if (e.ways, e.looks) != (entry.ways, entry.looks)]
        self.entries = sorted([*entries[-255:], entry], key=lambda e: e.ways[0] & _TRAILING)

    def __call__(self, *given):
        for entry in self.entries if 0 < given[0].numel() <= MOST else ():
            if entry.looks == _look(entry.ways, given):
                arranged = _arranged(entry, given)
                if arranged is not None:
                    return entry.run(*arranged)
        raise ValueError("dispatcher: nothing is known of such a call")


def _look(ways, given):
    """What has to be the same for two calls to be alike."""
    return [given[0].device, *(t is None if not isinstance(t, Tensor) else
                               (t.dtype, t.dim() if way & _AS_IT_IS else None, t.shape[-1] if way & _COLUMNS else None)
                               for way, t in zip(ways, given))]


def _arranged(entry, given):
    """What the kernel takes of a call's arguments; None where that needs a copy, or leading dimensions differ, or all
    tensors that are to keep the fewest dimensions could keep one less."""
    seen, lead = list(given), None
    fewest = [(t, way & _TRAILING) for way, t in zip(entry.ways, given) if way & _FEWEST and isinstance(t, Tensor)]
    if fewest and all(t.dim() >= trailing and alloc.one_stride(t, trailing - 1) is not None for t, trailing in fewest):
        return None
    for i, (way, t) in enumerate(zip(entry.ways, given)):
        if way & _AS_IT_IS or not isinstance(t, Tensor):
            continue
        trailing = way & _TRAILING
        if not way & _RESULT:
            here = t.shape[:t.dim() - trailing]
            if here != (here if lead is None else lead):
                return None
            lead = here
        if t.dim() != trailing + 1:
            seen[i] = alloc.folded(t, trailing)
            if seen[i] is None:
                return None
    return [None if i == _NOTHING else entry.constant if i == _CONSTANT else seen[i] for i in entry.places]


# ---- in C -----------------------------------------------------------------------------------------------------------


@functools.cache
def _in_c():
    """`added` in C; None where it can be neither found nor compiled."""
    from ..compile import ffi, link  # noqa: F401  (ffi imports tvm-ffi as it has to be)

    with _one_at_a_time:
        try:
            found = native.load("dispatch", link.load)
            return None if found is None else found["added"]
        except (OSError, RuntimeError, AttributeError, ValueError) as error:
            warnings.warn(f"tkq: calls take longer than they need ({error})", stacklevel=2)
            return None
