"""A recorded function as a graph: its text, read and done again on scalars."""
from __future__ import annotations

import ast
import functools
import math
import operator

import torch
import torch.nn.functional as F

from tkq.attention.flex.functions.captures import is_argument
from tkq.attention.flex.functions.record import OP, Recorded
from tkq.attention.flex.functions.trace import Traced, planned
from tkq.runtime.call.ops import LaunchCache

_plans = LaunchCache()  # (score_mod or mask_mod, text, kinds of tensors and numbers) -> a Plan
_WORDS = {"inf": math.inf, "nan": math.nan, "Ellipsis": ...}


def traced(name: str, recorded: Recorded) -> Traced:
    """name: score_mod or mask_mod.

    Raises:
        As ``trace``.
    """
    text, tensors, numbers = recorded
    wide = [x for x in numbers if not is_argument(x)]  # constants
    key = name, text, tuple([(x.dtype, x.shape) for x in tensors]), (*map(type, numbers), *wide)

    def call(inputs, tensors, given):
        given = numbers if given is None else given
        return _done(text, {**_named("v", inputs), **_named("t", tensors), **_named("n", given)})

    graph, of_tensors, of_numbers = planned(_plans, key, (name, OP), call, (tensors, numbers), lambda: bool(wide))
    return Traced(graph, tuple([tensors[i] for i in of_tensors]), tuple([numbers[i] for i in of_numbers]))


def _named(letter, values):
    return {f"{letter}{i}": x for i, x in enumerate(values)}


@functools.lru_cache(64)
def _lines(text):
    return ast.parse(text).body


def _done(text, values):
    for line in _lines(text):
        values[line.targets[0].id] = _value(line.value, values)
    return values["result"]


def _value(x, values):
    return _VALUES[type(x)](x, values)


def _called(x, values):
    args = [_value(y, values) for y in x.args]
    function = slice if isinstance(x.func, ast.Name) and x.func.id == "slice" else _function(x.func, args)
    return function(*args, **{y.arg: _value(y.value, values) for y in x.keywords})


_VALUES = {
    ast.Constant: lambda x, values: x.value, ast.Call: _called,
    ast.Name: lambda x, values: values[x.id] if x.id in values else _WORDS[x.id],
    ast.Tuple: lambda x, values: tuple([_value(y, values) for y in x.elts]),
    ast.UnaryOp: lambda x, values: -_value(x.operand, values),
    ast.Attribute: lambda x, values: getattr(torch, x.attr)}  # torch.float32


def _function(name, args):
    """As the function's own name and its first argument say."""
    if isinstance(name, ast.Attribute):
        return getattr(torch.Tensor, name.attr)
    if name.id == "getitem":
        return torch.Tensor.__getitem__
    of_tensor = isinstance(args[0], torch.Tensor) if args and name.id != "where" else False
    # operators go by several names, and those of a number and a tensor are no functions of torch's
    places = torch, F, torch.special
    places = (torch.Tensor, *places, operator) if of_tensor else (operator, *places) if args else places
    for module in places:
        if hasattr(module, name.id):
            return getattr(module, name.id)
    raise NotImplementedError(f"{OP}: {name.id}, which no kernel has")
