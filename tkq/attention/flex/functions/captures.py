"""What a user's function depends on, looked at anew in each call: its code, and all that it closes over, has as
defaults or reads as globals. So nothing that changes is ever served stale, and the same code with other numbers or
tensors of the same kind is traced once."""
from __future__ import annotations

import builtins
import dis
import functools
import math
import types
from typing import Any, NamedTuple

import torch

from tkq.runtime.call.ops import LaunchCache

# Modules whose attributes count as constant. What a function reads of other modules is not compared from call to call:
# such a function is traced at each call
_SETTLED = frozenset(("torch", "math", "operator", "builtins", "functools", "itertools", "typing", "numpy"))
TENSORS = frozenset((torch.Tensor, torch.nn.Parameter))
_AS_THEY_ARE = TENSORS | {bool, int, float, str, bytes, type(None), torch.dtype, torch.device, type(Ellipsis)}
_BY_IDENTITY = (types.BuiltinFunctionType, types.BuiltinMethodType, torch._ops.OpOverload, torch._ops.OpOverloadPacket,
                type(torch.Tensor.add), type)
# Names by which code looks at what ``depends`` does not compare: anything by its name, and of tensors all but their
# numbers, types and sizes
_ELSEWHERE = frozenset((
    "globals", "vars", "eval", "exec", "open", "input", "id", "dir", "getattr", "hasattr", "setattr", "__import__",
    "__dict__", "__globals__", "__closure__", "Parameter", "Buffer", "stride", "is_contiguous", "storage_offset",
    "data_ptr", "storage", "untyped_storage", "requires_grad", "is_leaf", "grad", "grad_fn", "_version", "_base",
    "is_neg", "is_conj", "is_inference", "is_set_to", "layout"))
_globals = LaunchCache()  # code -> names of globals that it reads, None where it looks elsewhere
# Of what ``depends`` gives: equal ones are the same. A function with something else among it is looked up in Python
COMPARED = (types.CodeType, types.ModuleType, types.BuiltinFunctionType, type, torch.device, torch._ops.OpOverload,
            torch._ops.OpOverloadPacket, type(torch.Tensor.add), bytes, type(Ellipsis))
_ITSELF = ("itself",)
# Depth of functions and lists in each other; a function that is deeper is traced at each call
DEPTH = 16
# Captured numbers that a kernel takes as arguments: integers that a float32 has exactly, and whose products with small
# ones are still an int32; floats far from float32's limits. Others are constants, as Python computes with them.
INT, FLOATS = 1 << 24, (2.0 ** -60, 2.0 ** 60)


class Captures(NamedTuple):
    """key: equal for functions that are traced to equal graphs, but for the values of ``numbers``; None where that
    cannot be said. tensors, numbers: in the order in which they are found."""

    key: Any
    tensors: list
    numbers: list


class Unknown(Exception):
    """Something whose changes cannot be seen."""


def depends(function) -> list | None:
    """All that a function depends on, in the order in which it is found: its code, tensors, numbers, and what else it
    closes over, has as defaults or reads as globals, each as it is, and tuples that say how lists and the like begin.
    Functions of equal ones are the same. None where that cannot be said. A microsecond."""
    found = []
    try:
        _visit(function, found, 0)
    except Unknown:
        return None
    return found


def captures_of(found: list | None) -> Captures:
    """Of what ``depends`` gives."""
    if found is None:
        return Captures(None, [], [])
    key, tensors, numbers = [], [], []
    for x in found:
        kind = type(x)
        if (kind is float or kind is int) and is_argument(x):
            key.append(kind)
            numbers.append(x)
        elif kind is float or kind is int:
            key.append((kind, x))
        elif kind in TENSORS or isinstance(x, torch.Tensor):
            key.append((x.dtype, x.shape, x.device))
            tensors.append(x)
        else:
            key.append(x)
    return Captures(tuple(key), tensors, numbers)


def is_argument(number) -> bool:
    """Does a kernel take such a captured number as an argument?"""
    if type(number) is int:
        return -INT < number < INT
    return FLOATS[0] <= abs(number) < FLOATS[1] or number == 0 or not math.isfinite(number)


def _visit(value, found, depth):
    kind = type(value)
    if depth > DEPTH:
        raise Unknown("depth")
    if kind in _AS_THEY_ARE:
        found.append(value)
    elif kind in _VISITS:
        _VISITS[kind](value, found, depth)
    elif isinstance(value, torch.Tensor) or _is_settled(value, kind):
        found.append(value)
    else:
        raise Unknown(kind)


def _items(value, found, depth):
    found.append((type(value), len(value)))
    for item in value:
        _visit(item, found, depth + 1)


def _dictionary(value, found, depth):
    found.append((dict, tuple(value)))
    for item in value.values():
        _visit(item, found, depth + 1)


def _partial(value, found, depth):
    found.append((functools.partial,))
    for part in (value.func, value.args, tuple(value.keywords), tuple(value.keywords.values())):
        _visit(part, found, depth + 1)


def _is_settled(value, kind):
    """Modules, functions and classes whose attributes count as constant."""
    if kind is types.ModuleType:
        return value.__name__.partition(".")[0] in _SETTLED
    if isinstance(value, types.BuiltinFunctionType) and not isinstance(
            value.__self__, (type(None), types.ModuleType, type)):
        return False  # a method of an object, whose contents change
    module = getattr(value, "__module__", None) or "builtins"
    return isinstance(value, _BY_IDENTITY) and module.partition(".")[0] in (*_SETTLED, "_operator", "_functools")


def _function(value, found, depth):
    code, closure = value.__code__, value.__closure__
    found.append(code)
    if _is_torchs(value):
        return
    if closure:
        _cells(closure, value, found, depth)
    defaults, by_name, own = value.__defaults__, value.__kwdefaults__, value.__dict__
    if defaults or by_name or own:
        found.append((len(defaults or ()), *(by_name or ()), "attributes", *own))
        for inside in (*(defaults or ()), *(by_name or {}).values(), *own.values()):
            _inside(inside, value, found, depth)
    for name in _names_of(code):
        if name in value.__globals__:
            _inside(value.__globals__[name], value, found, depth)
        else:
            found.append((name, hasattr(builtins, name)))


def _names_of(code) -> tuple:
    """Of globals that code reads."""
    names = _globals.get(code, _ITSELF)
    if names is _ITSELF:
        names = None if _looks_elsewhere(code) else read_globals(code)
        _globals.add(code, names)
    if names is None:
        raise Unknown("what its code looks at")
    return names


def _cells(closure, function, found, depth):
    for cell in closure:
        try:
            inside = cell.cell_contents
        except ValueError:
            raise Unknown("an empty cell") from None
        if type(inside) in _AS_THEY_ARE:
            found.append(inside)
        else:
            _inside(inside, function, found, depth)


def _inside(value, function, found, depth):
    """Of a function, which may be its own part."""
    if value is function:
        found.append(_ITSELF)
    else:
        _visit(value, found, depth + 1)


def _is_torchs(function):
    """A function of torch's that closes over nothing."""
    return (function.__module__ or "").partition(".")[0] == "torch" and not function.__closure__


_VISITS = {tuple: _items, list: _items, dict: _dictionary, functools.partial: _partial,
           types.FunctionType: _function}


def read_globals(code) -> tuple:
    """Names of globals that a code object and those inside it read."""
    found = {i.argval: None for i in dis.get_instructions(code) if i.opname in ("LOAD_GLOBAL", "LOAD_NAME")}
    for inner in code.co_consts:
        if isinstance(inner, types.CodeType):
            found.update(dict.fromkeys(read_globals(inner)))
    return tuple(found)


def _looks_elsewhere(code) -> bool:
    """Does a code object, or one inside it, look at what ``depends`` does not compare? At ``_ELSEWHERE``, or at what it
    imports of modules that are not settled."""
    for i in dis.get_instructions(code):
        if i.opname == "IMPORT_NAME" and i.argval.partition(".")[0] not in _SETTLED:
            return True
        if i.opname.startswith(("LOAD_GLOBAL", "LOAD_NAME", "LOAD_ATTR", "LOAD_METHOD")) and i.argval in _ELSEWHERE:
            return True
    return any(_looks_elsewhere(inner) for inner in code.co_consts if isinstance(inner, types.CodeType))


def names_in(function) -> set:
    """Names of globals, builtins and attributes in a function's code and in that of the functions it reaches."""
    found, seen, waiting = set(), set(), [function]
    while waiting:
        one = waiting.pop()
        if isinstance(one, (tuple, list, dict)):
            waiting.extend(one.values() if isinstance(one, dict) else one)
        if isinstance(one, functools.partial):
            waiting.extend((one.func, one.args, one.keywords))
        if not isinstance(one, types.FunctionType) or id(one) in seen:
            continue
        seen.add(id(one))
        codes = [one.__code__]
        while codes:
            code = codes.pop()
            found.update(code.co_names)
            codes.extend(c for c in code.co_consts if isinstance(c, types.CodeType))
        for cell in one.__closure__ or ():
            try:
                waiting.append(cell.cell_contents)
            except ValueError:
                continue
        waiting.extend((one.__defaults__, one.__kwdefaults__))
        waiting.extend(one.__globals__.get(name) for name in read_globals(one.__code__))
    return found


def replaced(value, tensors, numbers):
    """A function as it is, but with others in the place of its tensors and numbers, which are taken from two iterators
    in the order of ``depends``. numbers: None, and they stay."""
    kind = type(value)
    if kind is int or kind is float:
        return value if numbers is None or not is_argument(value) else next(numbers)
    if isinstance(value, torch.Tensor):
        return next(tensors)
    if kind is types.FunctionType:
        return _replaced_function(value, tensors, numbers)
    again = lambda item: replaced(item, tensors, numbers)
    return _REPLACED[kind](value, again) if kind in _REPLACED else value


_REPLACED = {
    tuple: lambda value, again: tuple([again(item) for item in value]),
    list: lambda value, again: [again(item) for item in value],
    dict: lambda value, again: {key: again(item) for key, item in value.items()},
    functools.partial: lambda value, again: functools.partial(
        again(value.func), *again(value.args), **{key: again(item) for key, item in value.keywords.items()})}


def _replaced_function(value, tensors, numbers):
    if _is_torchs(value):
        return value
    cells = tuple(types.CellType() for _ in value.__closure__ or ())
    space = dict(value.__globals__)
    made = types.FunctionType(value.__code__, space, value.__name__, None, cells)
    made.__module__ = value.__module__
    for cell, old in zip(cells, value.__closure__ or ()):
        inside = old.cell_contents
        cell.cell_contents = made if inside is value else replaced(inside, tensors, numbers)
    made.__defaults__ = tuple(replaced(d, tensors, numbers) for d in value.__defaults__ or ()) or None
    if value.__kwdefaults__:
        made.__kwdefaults__ = {k: replaced(d, tensors, numbers) for k, d in value.__kwdefaults__.items()}
    for name, inside in value.__dict__.items():
        made.__dict__[name] = made if inside is value else replaced(inside, tensors, numbers)
    for name in read_globals(value.__code__):
        if name in value.__globals__:
            inside = value.__globals__[name]
            space[name] = made if inside is value else replaced(inside, tensors, numbers)
    return made
