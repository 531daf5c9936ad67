"""Plain values that a user's kernel reads where it is traced, beside its arguments: they are constants of its machine
code. Found in what the kernel's class, builder or function refers to, in modules that are loaded:

- values of modules (``N = int(os.environ.get("N", 4))``, one that a program has set by ``kern.N = 8``), by their names
  in the code of its functions, and of the user's functions and classes that these name, transitively;
- attributes of its classes, defaults and closed-over values of its functions;
- environment variables whose names stand in a function that names ``environ`` or ``getenv``.

Plain are numbers, strings, None, dtypes, enumerations, frozen dataclasses, and tuples, lists, sets and dictionaries of
them; classes and functions by another name than their own count by their own. A value that the text has as a literal is
left out: the text counts anyway, and a kernel whose module is not loaded has the same name then. Values are read when a
kernel is first asked for in a process.
"""
from __future__ import annotations

import ast
import contextlib
import enum
import importlib
import inspect
import numbers
import os
import re
import sys
import types

from . import sources

_ASSIGNED = re.compile(r"^[ \t]*(\w+)[ \t]*(?::[^=\n]+)?=(?!=)[ \t]*(.+?)[ \t]*(?:#.*)?$", re.MULTILINE)
_NAMED = re.compile(r"([\w.]+):(\w+)")
_PLAIN = (numbers.Number, str, bytes, type(None), enum.Enum)
_IN_ENVIRONMENT = {"environ", "getenv"}


def of(recipe, modules: tuple) -> tuple:
    """(where, name, value's repr), in order. modules: whose files count for the recipe, see ``keys.modules_of``."""
    tops = {module.partition(".")[0] for module in modules} - {"tkq"}
    if not tops:
        return ()
    found, in_arguments = _Found(tops), set(_named_in(recipe.args))
    for cls in _classes(recipe.args):
        found.visit(cls)
    named = {tuple(recipe.builder.split(":")), *in_arguments}
    for module in sorted({recipe.module, *recipe.sources}):
        if module.partition(".")[0] == "tkq":
            continue
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
    """values: {(where, name, repr)}, of all that was visited. tops: packages that count as the user's wherever they
    are installed, as the kernel is in them."""

    def __init__(self, tops=()):
        self.values, self._seen, self._tops, self._waiting = set(), set(), tops, None

    def visit(self, what) -> None:
        """A class or a function, with what it refers to, as far as it is the user's."""
        if self._waiting is not None:  # called by one that is being visited: no deep recursion
            self._waiting.append(what)
            return
        self._waiting = [what]
        while self._waiting:
            self._one(self._waiting.pop())
        self._waiting = None

    def _one(self, what):
        what = _unwrapped(what)
        if id(what) in self._seen or not isinstance(what, (type, types.FunctionType)):
            return
        self._seen.add(id(what))
        if self._is_users(what.__module__ or ""):
            (self._class if isinstance(what, type) else self._function)(what)

    def _is_users(self, module):
        return module.partition(".")[0] in self._tops or sources.is_users(module)

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
                for attribute in names & set(vars(value)) if self._is_users(value.__name__) else ():
                    self._value(value.__name__, attribute, getattr(value, attribute))
            else:
                self._value(module, name, value)
        for name, value in _given(function):
            given = re.findall(rf"\b{name}\s*(?::[^=,()\n]*)?=\s*([^,)\n]+)", self._text_of(module))
            if not _is_plain(value) or _text(value) not in map(_literal, given):
                self._value(module, f"{function.__qualname__}({name})", value)
        if names & _IN_ENVIRONMENT:
            self.values.update(("environment", c, os.environ[c]) for c in constants if c in os.environ)

    def _value(self, module, name, value):
        if isinstance(value, (type, types.FunctionType)) and value.__name__ != name.rpartition(".")[2]:
            self.values.add((module, name, f"{value.__module__}.{value.__qualname__}"))
        if not _is_plain(value):
            self.visit(value)
        elif name.rpartition(".")[2].startswith("__"):
            return
        elif self._literal(module, name.rpartition(".")[2]) != (text := _text(value)):
            self.values.add((module, name, text))

    def _literal(self, module, name):
        """The one literal that the module's text has for a name; None where there is none, or several."""
        given = [m[2] for m in _ASSIGNED.finditer(self._text_of(module)) if m[1] == name]
        return _literal(given[0]) if len(given) == 1 else None

    def _text_of(self, module):
        path = sources._file(module)
        return sources._read(path).decode(errors="replace") if path else ""


def _literal(text):
    with contextlib.suppress(ValueError, SyntaxError, TypeError, MemoryError, RecursionError):
        return _text(ast.literal_eval(text.strip()))
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


def _given(function):
    """(name, value) of a function's defaults and of what it closes over."""
    code, defaults = function.__code__, function.__defaults__ or ()
    yield from zip(code.co_varnames[code.co_argcount - len(defaults):code.co_argcount], defaults)
    yield from (function.__kwdefaults__ or {}).items()
    for name, cell in zip(code.co_freevars, function.__closure__ or ()):
        with contextlib.suppress(ValueError):  # an empty one
            yield name, cell.cell_contents


def _is_plain(value, depth=4):
    if isinstance(value, _PLAIN) or "dtype" in type(value).__name__.lower():
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
