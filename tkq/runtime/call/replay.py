"""Call cache: replays the launch of a call with the same shapes, strides and options from C.

Most calls of a model come again and again: the same types, sizes, strides and options, other addresses. Of such a call
all is known but the addresses: which kernel it takes, with which numbers, and what it has to allocate. replay.c keeps
that, and does the rest of the call: it sees that nothing but plain eager mode is under way and that no gradient is
recorded (as `ops.route` does), allocates by torch's own function, and launches on torch's stream. It is compiled once,
where there is a C compiler, as dispatch.c is; without one, and on a Python without its lock, nothing is remembered.

An op says at its top, past what torch.compile traces:

    found = _call_cache.take(x, weight, eps)
    if found is not None:
        return found

and where such a call has been launched for the first times:

    _call_cache.add((x, weight, eps), run, (x, weight, y, eps), y)
"""
from __future__ import annotations

import ctypes
import functools
import sys
import threading
import warnings
import weakref
from typing import NamedTuple

import torch
from torch import Tensor
from torch.autograd import forward_ad
from torch.nn import Parameter

from ..compile import native
from ..compile.ffi import tvm_ffi
from ..system.forks import Renewed
from . import inside, ops

_GIVEN, _MADE, _NONE, _INT, _FLOAT, _ADDRESS, _CONSTANT, _LIST, _VIEW = range(9)
_MOST_GIVEN = 40  # as in replay.h
_PLAIN = frozenset((type(None), bool, int, float, str, torch.dtype))
_TENSORS = frozenset((Tensor, Parameter))
_all: weakref.WeakSet = weakref.WeakSet()
_one_at_a_time = Renewed(threading.Lock)


class Address(NamedTuple):
    """Of a tensor's first element: an argument that a kernel takes as a number."""

    of: Tensor


class View(NamedTuple):
    """Memory of a tensor that is given or made, in other sizes, strides or another type. seen: of the same storage; a
    copy is none, and a call with one is not remembered."""

    of: Tensor
    seen: Tensor


class Launch(NamedTuple):
    """run: the compiled function, or a dispatcher. arguments: what it is given: tensors of the call, a `View` or an
    `Address` of one, numbers that follow from what `take` looks at, None, and tuples of all that."""

    run: object
    arguments: tuple


class Launched(NamedTuple):
    """Launches, one after the other. result, constants: as of `CallCache.add`. between: tensors that were allocated for
    the call, and that it does not return."""

    launches: tuple
    result: object
    constants: tuple = ()
    between: tuple = ()


class CallCache:
    """The calls of one function that came before.

    take(*given): the results of a call, launched, where one like it was added: with the same numbers, words and None,
    and tensors of the same types, sizes, strides and last bits of the address, on the same device, the same of them
    given twice, and as far from each other where one begins before another ends: what may not share memory with what is
    written was looked at then. None where it is to be done otherwise, with whatever has to be said of it.

    known(*given): what ``note(what, *given)`` kept with a call like it, until that is forgotten, or None. It asks not
    whether a gradient is recorded, as ``take`` does: by this the recorded way of such a call may be a shorter one.

    by_stream: what is added holds for one stream, and not for calls that a CUDA graph captures: where a kernel takes a
    counter (see `counters`). compared: types beside numbers, words and None whose values `take` is given, and compares
    by ==."""

    def __init__(self, by_stream: bool = False, compared: tuple = ()):
        self._by_stream, self._compared = by_stream, _PLAIN.union(compared)
        self.clear()
        _all.add(self)

    def clear(self) -> None:
        """All that was added."""
        with _one_at_a_time:
            self.take = self._wants = self.known = self.note = _nothing

    def add(self, given: tuple, run, arguments: tuple, result, constants: tuple = ()) -> None:
        """Remember a call that has been launched, the second time that one like it is given here.

        given: what `take` gets. result: what the call returns: a tensor, or a tuple of tensors and None; those that are
        not among `given` were allocated for it. run, arguments: a `Launch`. constants: tensors among the arguments that
        are the same at every call."""
        if not isinstance(run, tvm_ffi.Function) or (self._wants is _nothing and not self._begun()):
            return
        if self._wants(*given):  # for calls whose sizes change all the time nothing is put together
            self._record(given, (Launch(run, arguments),), result, constants, ())

    def add_launched(self, given: tuple, launched) -> None:
        """As `add`, of what takes more words. launched(): a `Launched`, which is asked for where the call is to be
        remembered."""
        if (self._wants is not _nothing or self._begun()) and self._wants(*given):
            found = launched()
            if all(isinstance(launch.run, tvm_ffi.Function) for launch in found.launches):
                self._record(given, *found)

    def _record(self, given, launches, result, constants, between):
        results = result if isinstance(result, tuple) else (result,)
        made = [t for t in (*results, *between) if t is not None and _place(t, given) is None]
        if not all(type(x) in _TENSORS or _is_plain(x, self._compared) for x in given):
            return
        steps, parts, tensors = [], [], _Tensors(given, made, constants)
        for run, arguments in launches:
            before = len(parts)
            if not all(_describe(x, tensors, parts) for x in arguments):
                return
            steps.append((run.__chandle__(), len(parts) - before))
        make = tuple((tuple(t.shape), t.stride(), t.dtype) for t in made)
        places = tuple(-1 if t is None else tensors.place(t) for t in results)
        _library().tkq_add(self._wants.__self__, given, make, tuple(steps), tuple(parts), places, results is result)

    def _begun(self) -> bool:
        """Is there a library? Then calls can be added from now on."""
        library = _library()
        if library is None:
            return False
        with _one_at_a_time:
            if self.take is _nothing:
                self.take, self._wants, self.known, self.note = library.tkq_functions(
                    library.tkq_new(self._by_stream))
        return True


def clear() -> None:
    """Of all functions: where other kernels are to be taken from now on."""
    for cache in _all:
        cache.clear()


def _nothing(*given):
    return None


def _is_plain(x, types):
    return type(x) in types or (type(x) is tuple and all(_is_plain(y, types) for y in x))


def _place(x, tensors):
    return next((i for i, t in enumerate(tensors) if t is x), None)


class _Tensors(NamedTuple):
    """Of a call: see `CallCache.add`."""

    given: tuple
    made: list
    constants: tuple

    def place(self, x):
        """Of a tensor that is given or made, as replay.c counts; None of another."""
        place = _place(x, self.given)
        if place is None and (made := _place(x, self.made)) is not None:
            return _MOST_GIVEN + made
        return place


def _describe(x, tensors, parts) -> bool:
    """Add what replay.c takes for an argument; False where it knows no such."""
    if type(x) is Address:
        place = _place(x.of, tensors.given)
        parts.append((_ADDRESS, place))
        return place is not None
    if type(x) is View:
        place = tensors.place(x.of)
        parts.append((_VIEW, (place, *x)))
        return place is not None and x.of.untyped_storage().data_ptr() == x.seen.untyped_storage().data_ptr()
    if isinstance(x, tuple):
        parts.append((_LIST, len(x)))
        return all(_describe(item, tensors, parts) for item in x)
    if x is None:
        parts.append((_NONE, 0))
    elif type(x) is int:
        parts.append((_INT, x))
    elif type(x) is float:
        parts.append((_FLOAT, x))
    elif not isinstance(x, Tensor):
        return False
    elif (place := tensors.place(x)) is not None:
        parts.append((_GIVEN, place) if place < _MOST_GIVEN else (_MADE, place - _MOST_GIVEN))
    elif _place(x, tensors.constants) is not None:
        parts.append((_CONSTANT, x))
    else:
        return False
    return True


@functools.cache
def _library():
    """replay.c as a library for ctypes, prepared; None where it cannot be had: calls take the long way then."""
    try:
        return _prepared()
    except (OSError, RuntimeError, AttributeError, ValueError, ImportError) as error:
        warnings.warn(f"tkq: calls take longer, as their function in C cannot be used: {error}", stacklevel=3)
        return None


def _prepared():
    table, guards = getattr(Tensor, "__dlpack_c_exchange_api__", None), torch._C._dynamo.guards
    makers = [getattr(guards, f"_empty_strided_{name}", None) for name in ("cpu", "cuda")]
    if table is None or None in makers or not getattr(sys, "_is_gil_enabled", lambda: True)():
        return None
    found = native.load("replay", ctypes.PyDLL)
    if found is None:
        return None
    here, number = ctypes.py_object, ctypes.c_int
    for name, result, *arguments in (("prepare", number, here, here), ("new", here, number), ("functions", here, here),
                                     ("add", None, here, here, here, here, here, here, number), ("route", here)):
        function = getattr(found, f"tkq_{name}")
        function.restype, function.argtypes = result, arguments
    things = (None, False, float, Tensor, Parameter, "requires_grad", vars(forward_ad), "_current_level",
              "direct", "record", *makers,
              torch._C._len_torch_dispatch_stack, torch._C._are_functorch_transforms_active,
              torch.is_grad_enabled, torch._C._get_deterministic_algorithms, torch._C._cuda_isCurrentStreamCapturing,
              torch._C._cuda_getDevice if torch.cuda.device_count() > 1 else None, torch._C._is_tracing, table)
    if not found.tkq_prepare(things, (*inside.tracing(), *inside.keys())):
        return None
    ops.short.route = found.tkq_route()
    return found
