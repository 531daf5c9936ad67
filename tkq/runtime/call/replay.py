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

_GIVEN, _MADE, _NONE, _INT, _FLOAT, _ADDRESS, _CONSTANT, _LIST = range(8)
_MOST_GIVEN = 24  # as in replay.c
_PLAIN = frozenset((type(None), bool, int, float, str, torch.dtype))
_all: weakref.WeakSet = weakref.WeakSet()
_one_at_a_time = Renewed(threading.Lock)


class Address(NamedTuple):
    """Of a tensor's first element: an argument that a kernel takes as a number."""

    of: Tensor


class CallCache:
    """The calls of one function that came before.

    take(*given): the results of a call, launched, where one like it was added: with the same numbers, words and None,
    and tensors of the same types, sizes, strides and last bits of the address, on the same device, the same of them
    given twice. None where it is to be done otherwise, with whatever has to be said of it.

    by_stream: what is added holds for one stream, and not for calls that a CUDA graph captures: where a kernel takes a
    counter (see `counters`)."""

    def __init__(self, by_stream: bool = False):
        self._by_stream = by_stream
        self.clear()
        _all.add(self)

    def clear(self) -> None:
        """All that was added."""
        with _one_at_a_time:
            self.take = self._wants = _nothing

    def add(self, given: tuple, run, arguments: tuple, result, constants: tuple = ()) -> None:
        """Remember a call that has been launched, the second time that one like it is given here.

        given: what `take` gets. result: what the call returns: a tensor, or a tuple of tensors and None; those that are
        not among `given` were allocated for it. run: the compiled function, or a dispatcher. arguments: what it was
        given: tensors of these, an `Address` of a tensor of `given`, numbers that follow from what `take` looks at,
        None, and tuples of all that. constants: tensors among the arguments that are the same at every call."""
        if not isinstance(run, tvm_ffi.Function) or (self._wants is _nothing and not self._begun()):
            return
        wants = self._wants
        if not wants(*given):  # for calls whose sizes change all the time nothing is put together
            return
        results = result if isinstance(result, tuple) else (result,)
        made, parts = [t for t in results if t is not None and _place(t, given) is None], []
        if all(isinstance(x, Tensor) or _is_plain(x) for x in given) and all(
                _describe(x, given, made, constants, parts) for x in arguments):
            make = tuple((tuple(t.shape), t.stride(), t.dtype) for t in made)
            places = tuple(-1 if t is None else _of_result(t, given, made) for t in results)
            _library().tkq_add(wants.__self__, given, make, run.__chandle__(), tuple(parts), places, results is result)

    def _begun(self) -> bool:
        """Is there a library? Then calls can be added from now on."""
        library = _library()
        if library is None:
            return False
        with _one_at_a_time:
            if self.take is _nothing:
                self.take, self._wants = library.tkq_functions(library.tkq_new(self._by_stream))
        return True


def clear() -> None:
    """Of all functions: where other kernels are to be taken from now on."""
    for cache in _all:
        cache.clear()


def _nothing(*given):
    return None


def _is_plain(x):
    return type(x) in _PLAIN or (type(x) is tuple and all(map(_is_plain, x)))


def _place(x, tensors):
    return next((i for i, t in enumerate(tensors) if t is x), None)


def _describe(x, given, made, constants, parts) -> bool:
    """Add what replay.c takes for an argument; False where it knows no such."""
    if type(x) is tuple:
        parts.append((_LIST, len(x)))
        return all(type(item) is not tuple and _describe(item, given, made, constants, parts) for item in x)
    if x is None:
        parts.append((_NONE, 0))
    elif type(x) is int:
        parts.append((_INT, x))
    elif type(x) is float:
        parts.append((_FLOAT, x))
    elif type(x) is Address:
        place = _place(x.of, given)
        parts.append((_ADDRESS, place))
        return place is not None
    elif not isinstance(x, Tensor):
        return False
    elif (place := _place(x, given)) is not None:
        parts.append((_GIVEN, place))
    elif _place(x, constants) is not None:
        parts.append((_CONSTANT, x))
    elif (place := _place(x, made)) is not None:
        parts.append((_MADE, place))
    else:
        return False
    return True


def _of_result(t, given, made):
    place = _place(t, given)
    return _MOST_GIVEN + _place(t, made) if place is None else place


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
    here, pointer, number = ctypes.py_object, ctypes.c_void_p, ctypes.c_int
    for name, result, *arguments in (("prepare", number, here, here), ("new", here, number), ("functions", here, here),
                                     ("add", None, here, here, here, pointer, here, here, number), ("route", here)):
        function = getattr(found, f"tkq_{name}")
        function.restype, function.argtypes = result, arguments
    things = (None, False, Tensor, Parameter, "requires_grad", vars(forward_ad), "_current_level", "direct", "record",
              *makers, torch._C._len_torch_dispatch_stack, torch._C._are_functorch_transforms_active,
              torch.is_grad_enabled, torch._C._get_deterministic_algorithms, torch._C._cuda_isCurrentStreamCapturing,
              torch._C._cuda_getDevice if torch.cuda.device_count() > 1 else None, torch._C._is_tracing, table)
    if not found.tkq_prepare(things, (*inside.tracing(), *inside.keys())):
        return None
    ops.short.route = found.tkq_route()
    return found
