"""What the `__call__` of a subclass of ReductionBase takes beside the stream, by its annotations. On the host alone."""
import dataclasses
import inspect
import re
import types
import typing

from .spec import Argument, is_stream

_TENSORS = ("matrix", "columns", "rows")
# a kernel may ask whether a tensor is there
_KINDS = {"Float32": ("float",), "float": ("float",), "Int32": ("int",), "int": ("int",), "NoneType": ("none",),
          "None": ("none",), "Tensor": (*_TENSORS, "none")}
_SAID = {**dict.fromkeys(_TENSORS, "a tensor"), "float": "a float", "int": "an int", "none": "None"}


def parameters(cls) -> list:
    """Of `__call__`, without self and the stream."""
    if not any("__call__" in vars(base) for base in cls.__mro__):
        raise TypeError(f"{cls.__name__}: it has no __call__, which lays out its arguments and launches its kernel")
    return [p for p in list(inspect.signature(cls.__call__).parameters.values())[1:] if not is_stream(p)]


def fitted(cls, args, arguments: tuple) -> tuple:
    """arguments, which say what args look like, as `__call__` takes them: an int for a Float32 is a float.

    Raises:
        TypeError: another number of arguments than `__call__` has, or one of a kind that its parameter does not take.
    """
    taken = parameters(cls)
    _check_number(cls, args, taken)
    if any(p.kind is p.VAR_POSITIONAL for p in taken):
        return arguments
    return tuple(_fitted_one(cls, i, a, p) for i, (a, p) in enumerate(zip(arguments, taken)))


def _check_number(cls, args, taken):
    named = [p.name for p in taken if p.kind is p.KEYWORD_ONLY and p.default is p.empty]
    if named:
        raise TypeError(f"{cls.__name__}: __call__ takes {', '.join(named)} by name alone, allowed are parameters that "
                        "are given by their places")
    taken = [p for p in taken if p.kind is not p.KEYWORD_ONLY]
    if any(p.kind is p.VAR_POSITIONAL for p in taken):
        return
    least = sum(p.default is p.empty for p in taken)
    if not least <= len(args) <= len(taken):
        names = ", ".join(p.name for p in taken)
        raise TypeError(f"{cls.__name__}.launch: got {len(args)} arguments, __call__ takes {len(taken)}: {names}")


def _fitted_one(cls, i, a: Argument, p) -> Argument:
    allowed = kinds(p.annotation)
    if allowed is None or a.kind in allowed or (a.kind == "none" and p.default is None):
        return a
    if a.kind == "int" and "float" in allowed:
        return dataclasses.replace(a, kind="float")
    raise TypeError(f"{cls.__name__}: argument {i}, {p.name}: got {_SAID[a.kind]}, allowed by its annotation in "
                    f"__call__: {' or '.join(dict.fromkeys(_SAID[kind] for kind in allowed))}")


def kinds(annotation):
    """The kinds of `Argument` that a parameter so annotated takes; None where that is not known."""
    if isinstance(annotation, str):
        optional = re.fullmatch(r"(?:typing\.)?Optional\[(.*)\]", annotation.strip())
        parts = [optional[1], "None"] if optional else annotation.split("|")
        found = [_KINDS.get(part.strip().rpartition(".")[2]) for part in parts]
    elif typing.get_origin(annotation) in (typing.Union, types.UnionType):
        found = [kinds(part) for part in typing.get_args(annotation)]
    else:
        found = [_KINDS.get(getattr(annotation, "__name__", None))]
    return None if None in found else tuple(kind for part in found for kind in part)
