"""From a user's PyTorch function of scalars to a graph, by make_fx."""
from __future__ import annotations

import inspect
import threading
from typing import NamedTuple

import torch
from torch._subclasses.fake_tensor import DataDependentOutputException, FakeTensorMode
from torch.fx.experimental.proxy_tensor import make_fx
from torch.overrides import TorchFunctionMode

from tkq.attention.flex.functions import captures, convert
from tkq.attention.flex.functions.graph import INPUTS, Graph
from tkq.runtime.call import check, ops
from tkq.runtime.call.ops import LaunchCache
from tkq.runtime.system.forks import Renewed

OP = "flex_attention"
ARGUMENTS = {"score_mod": tuple(INPUTS), "mask_mod": ("b", "h", "q", "kv")}
_LOOKS = frozenset(("isinstance", "type", "issubclass", "callable", "hasattr", "is_tensor", "int", "float",
                    "__class__"))
_one_at_a_time = Renewed(threading.RLock)  # torch's tracer patches what all threads share
_traced = LaunchCache()  # (name, the captures' key[, numbers]) -> a Plan: which of the captures a graph takes


class Traced(NamedTuple):
    """A function's graph, and what stands in its slots now: tensors, and Python's numbers."""

    graph: Graph
    tensors: tuple
    numbers: tuple


class Plan(NamedTuple):
    """graph: None where it depends on the numbers' values. tensors, numbers: of the captures, those that it takes."""

    graph: Graph | None
    tensors: tuple = ()
    numbers: tuple = ()


def break_graph() -> None:
    """Where torch.compile looks into a caller: it is to call this function as it is, which ``ops.untraced`` keeps it
    from looking into."""
    if ops.traced():
        torch._dynamo.graph_break()


def check_function(name: str, function, op: str = OP):
    """The function itself."""
    if not callable(function):
        raise TypeError(f"{op}: {name} is {function!r}, allowed is a function of {', '.join(ARGUMENTS[name])}")
    return function


def check_arguments(name: str, function, op: str = OP) -> None:
    """TypeError where a function does not take what it is called with. Of one that tells no arguments: nothing."""
    try:
        taken = inspect.signature(function, follow_wrapped=False)  # a wrapper takes what it takes itself
    except (TypeError, ValueError):
        return
    try:
        taken.bind(*ARGUMENTS[name])
    except TypeError:
        raise TypeError(f"{op}: {name} is a function of {taken}, allowed is one of "
                        f"({', '.join(ARGUMENTS[name])})") from None


def trace(name: str, function, op: str = OP, depends: list | None = None) -> Traced:
    """name: score_mod or mask_mod. op: whose errors they are. depends: what ``captures.depends`` says, where that has
    been asked.

    Raises:
        TypeError: what is no function, or gives no tensor of no dimension: a number, of a mask a bool.
        NotImplementedError: an operation that no kernel has, by name.
    """
    check_function(name, function, op)
    depends = captures.depends(function) if depends is None else depends
    for x in depends or ():
        if isinstance(x, torch.Tensor):
            check_captured(name, x, op)
    found = captures.captures_of(depends)
    if found.key is None:
        return _afresh(name, function, op)

    def call(inputs, tensors, numbers):
        check_arguments(name, function, op)
        return captures.replaced(function, tensors, numbers)(*inputs)

    looks = lambda: found.numbers and captures.names_in(function) & _LOOKS
    graph, tensors, numbers = planned(_traced, (name, found.key), (name, op), call, found[1:], looks)
    return Traced(graph, tuple([found.tensors[i] for i in tensors]), tuple([found.numbers[i] for i in numbers]))


def planned(known: LaunchCache, key, of: tuple, call, captured: tuple, looks=lambda: False) -> Plan:
    """From ``known``, or made: numbers are arguments of the graph, or, where Python looks at them while it is traced,
    constants of it. of: (name, op), of ``trace``. call(inputs, tensors, numbers): the function, of iterators; numbers
    are None where they are to stay. captured: its (tensors, numbers) now. looks(): is it known that Python does?"""
    plan = known.get(key)
    if plan is None:
        plan = Plan(None) if looks() else _plan(of, call, captured, run_time=True)
        known.add(key, plan)
    if plan.graph is None:
        key = *key, tuple(map(repr, captured[1]))
        plan = known.get(key)
        if plan is None:
            plan = _plan(of, call, captured, run_time=False)
            known.add(key, plan)
    return plan


def _plan(of, call, captured, run_time):
    (name, _), (tensors, numbers) = of, captured
    stand_ins = [_like(x) for x in tensors]
    if run_time:
        stand_ins += [(torch.int32 if type(x) is int else torch.float32, (), (), x) for x in numbers]
    n = len(tensors)

    def on_scalars(*given):
        inputs, given = given[:len(ARGUMENTS[name])], given[len(ARGUMENTS[name]):]
        return call(inputs, iter(given[:n]), iter(given[n:]) if run_time else None)

    try:
        program = _program(of, on_scalars, stand_ins)
        return Plan(*convert.graph_of(of, program, ARGUMENTS[name], n))
    except Exception:
        if run_time and numbers:
            return Plan(None)
        raise


def _afresh(name, function, op):
    """Of a function whose changes cannot be seen: traced at each call; its tensors are found where they are used."""
    check_arguments(name, function, op)
    program = _program((name, op), function, [])
    graph, tensors, _ = convert.graph_of((name, op), program, ARGUMENTS[name], None)
    held = convert.constants_of(program)
    return Traced(graph, tuple(held[i] for i in tensors), ())


def _like(x):
    return x.dtype, tuple(x.shape), x.stride(), None


def check_captured(name: str, x, op: str = OP) -> None:
    """TypeError where a captured tensor is not dense, NotImplementedError where its numbers are of a type that no
    kernel has."""
    check.tensor(f"{op}: {name}: a captured tensor", x)
    convert.refuse_dtype(op, name, x.dtype)


def _program(of, function, stand_ins):
    """The FX graph of a function of scalars and stand-ins (dtype, shape, strides)."""
    with FakeTensorMode(allow_non_fake_inputs=True):
        given = [torch.empty((), dtype=torch.float32 if i == "score" else torch.int32) for i in ARGUMENTS[of[0]]]
        given += [torch.empty_strided(shape, stride, dtype=dtype) for dtype, shape, stride, _ in stand_ins]
    given = [x.detach() for x in given]

    def indexed(*args):
        with _Indexed(of):
            return function(*args)

    try:
        with _one_at_a_time, torch.no_grad():
            return make_fx(indexed, tracing_mode="fake", _allow_non_fake_inputs=True)(*given)
    except DataDependentOutputException as problem:
        raise NotImplementedError(
            f"{of[1]}: {of[0]}: Python looks at the value of a tensor ({problem.func}), supported are operations on "
            "tensors: torch.where in the place of if, & of and, | of or") from problem
    except (RuntimeError, IndexError, OverflowError, AttributeError) as problem:
        words = _in_words(of, problem)
        if words is None:
            raise
        raise words from problem


def _in_words(of, problem):
    """What PyTorch says of a function while it is traced, with the function's name. None of errors that have it, and of
    Python's own."""
    first = (str(problem).splitlines() or [""])[0]
    if isinstance(problem, NotImplementedError) or (
            isinstance(problem, AttributeError) and "FakeTensor" not in first):
        return None
    if isinstance(problem, (IndexError, OverflowError)):
        return ValueError(f"{of[1]}: {of[0]}: {first}")
    return NotImplementedError(f"{of[1]}: {of[0]}: PyTorch does not trace it: {first}; supported are operations on its "
                               "arguments, and on elements of captured tensors")


class _Indexed(TorchFunctionMode):
    """A tensor's element at scalar tensors is a load, where torch would ask for the scalars' values. What is not dense
    is refused."""

    def __init__(self, of):
        super().__init__()
        self.of = of

    def __torch_function__(self, func, types, args=(), kwargs=None):
        for x in args:
            if isinstance(x, torch.Tensor) and (x.layout is not torch.strided or x.is_nested or x.is_quantized):
                check_captured(self.of[0], x, self.of[1])
        if func is torch.Tensor.__getitem__:
            x, at = args[0], args[1] if isinstance(args[1], tuple) else (args[1],)
            if any(_is_index(i) for i in at) and all(_is_index(i) or _is_plain(i) for i in at):
                return _element(x, at)
        return func(*args, **(kwargs or {}))


def _is_index(i):
    return isinstance(i, torch.Tensor) and i.dim() == 0 and i.dtype not in (torch.bool, torch.float32)


def _is_plain(i):
    return type(i) is int or (isinstance(i, slice) and i == slice(None))


def _element(x, at):
    dim = 0
    for i in at:
        if isinstance(i, slice):
            dim += 1
        elif isinstance(i, torch.Tensor):
            x = torch.ops.aten.index.Tensor(x, [None] * dim + [i])
        else:
            x = torch.ops.aten.select.int(x, dim, i)
    return x
