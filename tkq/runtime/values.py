"""Plain values that a user's kernel reads where it is traced, beside its arguments: they are constants of its machine
code. Found in what the kernel's class, builder or function refers to, in modules that are loaded:

- values of modules (``N = int(os.environ.get("N", 4))``, one that a program has set by ``kern.N = 8``), by their names
  in the code of its functions, and of the user's functions and classes that these name, transitively;
- attributes of its classes, defaults and closed-over values of its functions;
- environment variables whose names stand in a function that names ``environ`` or ``getenv``.

Plain are numbers, strings, None, enumerations, frozen dataclasses, and tuples, lists, sets and dictionaries of them.
What the text gives as a literal is left out: the text counts anyway, and a kernel whose module is not loaded has the
same name then. Values are read when a kernel is asked for the first time in a process.
"""
from __future__ import annotations

import ast
import contextlib
import enum
import importlib
import inspect
import os
import re
import sys
import types

from . import sources

_ASSIGNED = re.compile(r"^[ \t]*(\w+)[ \t]*(?::[^=\n]+)?=(?!=)[ \t]*(.+?)[ \t]*(?:#.*)?$", re.MULTILINE)
_NAMED = re.compile(r"([\w.]+):(\w+)")
_NUMBERS = (bool, int, float, complex, str, bytes, type(None))
_IN_ENVIRONMENT = {"environ", "getenv"}


def of(recipe, modules: tuple) -> tuple:
    """(where, name, value's repr), in order. modules: whose files count for the recipe, see ``keys.modules_of``."""
    users = [module for module in modules if sources.is_users(module)]
    if not users:
        return ()
    found, in_arguments = _Found(), set(_named_in(recipe.args))
    for cls in _classes(recipe.args):
        found.visit(cls)
    named = {tuple(recipe.builder.split(":")), *in_arguments}
    for module in {recipe.module, *recipe.sources} & set(users):
        if module not in sys.modules and any(of == module for of, _ in in_arguments):  # as the builder will do
            with contextlib.suppress(Exception):
                importlib.import_module(module)
        names = [name for of, name in named if of == module]
        if not names and module != "__main__":
            names = [name for name, value in vars(sys.modules.get(module, types)).items() if _is_from(value, module)]
        for name in names:
            found.visit(_looked_up(module, name))
    return tuple(sorted(found.values))


def _classes(value):
    if isinstance(value, (tuple, frozenset)):
        for item in value:
            yield from _classes(item)
        return
    yield type(value)
    for name in getattr(value, "__dataclass_fields__", ()):
        yield from _classes(getattr(value, name))


def _named_in(value):
    """(module, name) of classes and functions that a recipe's arguments name: as fields, or as "module:name"."""
    if isinstance(value, (tuple, frozenset)):
        for item in value:
            yield from _named_in(item)
    elif isinstance(value, str):
        yield from (match.groups() for match in [_NAMED.fullmatch(value)] if match)
    elif hasattr(value, "__dataclass_fields__"):
        if hasattr(value, "module") and hasattr(value, "qualname"):
            yield value.module, value.qualname
        for name in value.__dataclass_fields__:
            yield from _named_in(getattr(value, name))


def _looked_up(module, name):
    found = sys.modules.get(module)
    for part in name.split("."):
        found = getattr(found, part, None)
    return found


def _is_from(value, module):
    return isinstance(value, (type, types.FunctionType)) and value.__module__ == module


class _Found:
    """values: {(where, name, repr)}, of all that was visited."""

    def __init__(self):
        self.values, self._seen, self._texts = set(), set(), {}

    def visit(self, what) -> None:
        """A class or a function, with what it refers to, as far as it is the user's."""
        what = _unwrapped(what)
        if id(what) in self._seen or not isinstance(what, (type, types.FunctionType)):
            return
        self._seen.add(id(what))
        if sources.is_users(what.__module__ or ""):
            (self._class if isinstance(what, type) else self._function)(what)

    def _class(self, cls):
        for base in cls.__mro__[1:]:
            self.visit(base)
        for name, value in vars(cls).items():
            if not name.startswith("__") or isinstance(_unwrapped(value), types.FunctionType):
                self._value(cls.__module__, f"{cls.__qualname__}.{name}", value)

    def _function(self, function):
        module = function.__module__
        names, constants = _words(function.__code__)
        for name in names & set(function.__globals__):
            value = function.__globals__[name]
            if isinstance(value, types.ModuleType):
                for attribute in names & set(vars(value)) if sources.is_users(value.__name__) else ():
                    self._value(value.__name__, attribute, getattr(value, attribute))
            else:
                self._value(module, name, value)
        given = *(function.__defaults__ or ()), *(function.__kwdefaults__ or {}).values()
        for i, value in enumerate((*given, *_closed_over(function))):
            self._value(module, f"{function.__qualname__}({i})", value)
        if names & _IN_ENVIRONMENT:
            self.values.update(("environment", c, os.environ[c]) for c in constants if c in os.environ)

    def _value(self, module, name, value):
        if not _is_plain(value):
            self.visit(value)
        elif name.rpartition(".")[2].startswith("__"):
            return
        elif self._literal(module, name.rpartition(".")[2]) != (text := _text(value)):
            self.values.add((module, name, text))

    def _literal(self, module, name):
        """The one literal that the module's text has for a name; None where there is none, or several."""
        if module not in self._texts:
            path, found = sources._file(module), {}
            text = sources._read(path).decode(errors="replace") if path else ""
            for match in _ASSIGNED.finditer(text):
                found.setdefault(match[1], []).append(match[2])
            self._texts[module] = found
        given = self._texts[module].get(name, ())
        with contextlib.suppress(ValueError, SyntaxError, TypeError, MemoryError, RecursionError):
            return _text(ast.literal_eval(given[0])) if len(given) == 1 else None
        return None


def _unwrapped(what):
    if isinstance(what, (staticmethod, classmethod)):
        what = what.__func__
    with contextlib.suppress(Exception):  # of an object that knows every attribute, say
        what = getattr(what, "fget", None) or getattr(what, "func", None) or what  # properties
        return inspect.unwrap(what)
    return what


def _words(code):
    """(names, strings) of a code object and of those inside it."""
    names, constants = set(code.co_names), {c for c in code.co_consts if isinstance(c, str)}
    for inner in code.co_consts:
        if isinstance(inner, types.CodeType):
            more = _words(inner)
            names |= more[0]
            constants |= more[1]
    return names, constants


def _closed_over(function):
    for cell in function.__closure__ or ():
        with contextlib.suppress(ValueError):  # an empty one
            yield cell.cell_contents


def _is_plain(value, depth=4):
    if isinstance(value, (*_NUMBERS, enum.Enum)):
        return True
    if depth and isinstance(value, (tuple, list, set, frozenset)):
        return all(_is_plain(item, depth - 1) for item in value)
    if depth and isinstance(value, dict):
        return all(_is_plain(item, depth - 1) for pair in value.items() for item in pair)
    fields = getattr(type(value), "__dataclass_fields__", None)
    return bool(depth and fields and type(value).__dataclass_params__.frozen) and all(
        _is_plain(getattr(value, name, None), depth - 1) for name in fields)


def _text(value):
    return repr(sorted(map(repr, value))) if isinstance(value, (set, frozenset)) else repr(value)
