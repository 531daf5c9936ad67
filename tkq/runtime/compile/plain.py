"""Values as texts, the same in each process: numbers, strings, None, dtypes, enumerations, ranges and slices; tuples,
lists, sets, dictionaries and NumPy's arrays of them; dataclasses and the user's objects by their attributes; functions
and classes by their names, bound methods and partial functions with what they are bound to.

What has no such text (a lock, a file, a tensor) stands in a larger value by its type.
"""
from __future__ import annotations

import argparse
import enum
import functools
import hashlib
import numbers
import types

_PLAIN = (numbers.Number, str, bytes, type(None), enum.Enum, range, slice)
_NAMED = (type, types.FunctionType)
_OPEN = (types.SimpleNamespace, argparse.Namespace)  # Python's own classes of nothing but attributes


class Texts:
    """meet: is called with each function and class that is found. is_users: is the class of an object the user's? Then
    its attributes count."""

    def __init__(self, meet=lambda found: None, is_users=lambda cls: False):
        self._meet, self._is_users = meet, is_users
        self._done: dict = {}  # id -> (the value, so that its id stays its own; its text)

    def of(self, value) -> str | None:
        """The text; None where a value has none."""
        if isinstance(value, _PLAIN) or "dtype" in type(value).__name__.lower():
            return repr(value)
        if id(value) not in self._done:
            self._done[id(value)] = value, "..."  # where it is part of itself
            self._done[id(value)] = value, self._of_parts(value)
        return self._done[id(value)][1]

    def _of_parts(self, value):
        if isinstance(value, _NAMED):
            self._meet(value)
            return _name(value)
        if isinstance(value, types.MethodType):
            return self._call("bound", {"function": value.__func__, "to": value.__self__})
        if isinstance(value, functools.partial):
            return self._call("partial", {"function": value.func, "args": value.args, "keywords": value.keywords})
        if isinstance(value, (dict, types.MappingProxyType)):
            return "{" + ", ".join(f"{self._part(key)}: {self._part(of)}" for key, of in value.items()) + "}"
        if isinstance(value, (set, frozenset)):
            return "{" + ", ".join(sorted(map(self._part, value))) + "}"
        if isinstance(value, (tuple, list)):
            inside = ", ".join(map(self._part, value))
            if type(value) in (tuple, list):
                return f"[{inside}]" if isinstance(value, list) else f"({inside}{',' * (len(value) == 1)})"
            return f"{type(value).__qualname__}({inside})"
        if type(value).__module__ == "numpy" and hasattr(value, "tobytes"):
            return f"array({value.dtype}, {value.shape}, {hashlib.sha256(value.tobytes()).hexdigest()})"
        return self._of_object(value)

    def _of_object(self, value):
        cls = type(value)
        frozen = "__dataclass_fields__" in vars(cls) and cls.__dataclass_params__.frozen
        if not frozen and not isinstance(value, _OPEN) and not self._is_users(cls):
            return None
        self._meet(cls)
        slots = [name for base in cls.__mro__ for name in _several(vars(base).get("__slots__", ()))]
        names = dict.fromkeys([*getattr(cls, "__dataclass_fields__", ()), *slots, *getattr(value, "__dict__", ())])
        there = {name: getattr(value, name) for name in names if not name.startswith("__") and hasattr(value, name)}
        return self._call(cls.__qualname__, there)

    def _call(self, name, parts):
        return f"{name}({', '.join(f'{key}={self._part(value)}' for key, value in parts.items())})"

    def _part(self, value):
        text = self.of(value)
        return f"<{_name(type(value))}>" if text is None else text


def _name(what):
    return f"{what.__module__}.{what.__qualname__}"


def _several(names):
    return (names,) if isinstance(names, str) else names
