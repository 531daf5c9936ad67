"""Plain values that a user's kernel reads where it is traced, beside its arguments: they are constants of its machine
code. Found in what the kernel's class, builder or function refers to, in modules that are loaded:

- values of modules (``N = int(os.environ.get("N", 4))``, one that a program has set by ``kern.N = 8``), by their names
  in the code of its functions, and of the user's functions and classes that these name, transitively;
- attributes of its classes, defaults and closed-over values of its functions;
- environment variables whose names stand in a function that names ``environ`` or ``getenv``.

What is plain, and as which text it counts, is in ``plain``; classes and functions by another name than their own count
by their own. A value that the text has as a literal is left out: the text counts anyway. Files of functions that are
found so and that no import in the text names (a module loaded by its path, a function that a program has exchanged)
count too; a function without a file by its code. Values are read when a kernel is first asked for in a process. A
module that is not loaded then is imported where its text does not show all (``sources.say_all``); else the DSL, which
it imports, stays out of processes that find their kernels in the cache.
"""
from __future__ import annotations

import ast
import contextlib
import hashlib
import importlib
import inspect
import os
import re
import sys
import types

from . import plain, sources

_ASSIGNED = re.compile(r"^[ \t]*(\w+)[ \t]*(?::[^=\n]+)?=(?!=)[ \t]*(.+?)[ \t]*(?:#.*)?$", re.MULTILINE)
_NAMED = re.compile(r"([\w.]+):(\w+)")
_IN_ENVIRONMENT = {"environ", "getenv"}


def of(recipe, modules: tuple) -> tuple:
    """(where, name, value's repr), in order. modules: whose files count for the recipe, see ``keys.modules_of``."""
    tops = {module.partition(".")[0] for module in modules} - {"tkq"}
    if not tops:
        return ()
    found, in_arguments = _Found(tops, sources.reached(modules).values()), set(_named_in(recipe.args))
    for cls in _classes(recipe.args):
        found.visit(cls)
    named = {tuple(recipe.builder.split(":")), *in_arguments}
    for module in sorted({recipe.module, *recipe.sources}):
        if module.partition(".")[0] == "tkq":
            continue
        if module not in sys.modules and (any(of == module for of, _ in in_arguments) or not sources.say_all(modules)):
            with contextlib.suppress(Exception):  # which the builder's import will meet too
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
    """values: {(where, name, text)}, of all that was visited. tops: packages that count as the user's wherever they
    are installed, as the kernel is in them. files: those that count already."""

    def __init__(self, tops=(), files=()):
        self.values, self._seen, self._tops, self._waiting = set(), set(), tops, None
        self._files = {*files}
        self._texts = plain.Texts(self.visit, lambda cls: self._is_users(cls.__module__))

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
        what = _plain_function(what)
        if id(what) in self._seen or not isinstance(what, (type, types.FunctionType)):
            return
        self._seen.add(id(what))
        if isinstance(what, type):
            if self._is_users(what.__module__ or ""):
                self._class(what)
            return
        self.visit(getattr(what, "__wrapped__", None))
        module = what.__globals__.get("__name__") or ""  # a decorator's wrapper names the module of another
        if self._is_users(module) or sources.is_nowhere(module):
            self._function(what)

    def _is_users(self, module):
        return module.partition(".")[0] in self._tops or sources.is_users(module)

    def _class(self, cls):
        for base in (*cls.__mro__[1:], type(cls)):
            self.visit(base)
        for name, value in vars(cls).items():
            if not name.startswith("__") or isinstance(_plain_function(value), types.FunctionType):
                self._value(cls.__module__, f"{cls.__qualname__}.{name}", value)

    def _function(self, function):
        module = function.__module__
        if not self._has_text(function):  # what dataclasses write from fields, which count themselves
            return
        names, constants = _words(function.__code__)
        for name in names & set(function.__globals__):
            value = function.__globals__[name]
            if isinstance(value, types.ModuleType):
                for attribute in names & set(vars(value)) if self._is_users(value.__name__) else ():
                    self._value(value.__name__, attribute, getattr(value, attribute))
            else:
                self._value(module, name, value)
        for name, value in _given(function):
            if value is getattr(function, "__wrapped__", None):
                continue
            given = re.findall(rf"\b{name}\s*(?::[^=,()\n]*)?=\s*([^,)\n]+)", self._text_of(module))
            if self._texts.of(value) not in map(_literal, given):
                self._value(module, f"{function.__qualname__}({name})", value)
        if names & _IN_ENVIRONMENT:
            self.values.update(("environment", c, os.environ[c]) for c in constants if c in os.environ)

    def _value(self, module, name, value):
        if isinstance(value, (type, types.FunctionType)) and value.__name__ != name.rpartition(".")[2]:
            self.values.add((module, name, f"{value.__module__}.{value.__qualname__}"))
        if isinstance(value, (type, types.FunctionType)) or (text := self._texts.of(value)) is None:
            self.visit(value)
        elif not name.rpartition(".")[2].startswith("__") and self._literal(module, name.rpartition(".")[2]) != text:
            self.values.add((module, name, text))

    def _has_text(self, function):
        """Is it from a file, which counts from now on, or else no method of Python's protocols?"""
        path = function.__code__.co_filename
        with contextlib.suppress(OSError):  # where the working folder is gone
            path = os.path.realpath(path)
        if path not in self._files:
            if not os.path.isfile(path) and function.__name__.startswith("__"):
                return False
            code = sources._hash(path) if os.path.isfile(path) else _code(function.__code__)
            self.values.add((function.__module__, f"{function.__qualname__}()", code))
        return True

    def _literal(self, module, name):
        """The one literal that the module's text has for a name; None where there is none, or several."""
        given = [m[2] for m in _ASSIGNED.finditer(self._text_of(module)) if m[1] == name]
        return _literal(given[0]) if len(given) == 1 else None

    def _text_of(self, module):
        path = sources._file(module)
        return sources._read(path).decode(errors="replace") if path else ""


def _literal(text):
    with contextlib.suppress(ValueError, SyntaxError, TypeError, MemoryError, RecursionError):
        return plain.Texts().of(ast.literal_eval(text.strip()))
    return None


def _code(code) -> str:
    """Of a code object and of those inside it, as a text."""
    inner = [_code(c) if isinstance(c, types.CodeType) else repr(c) for c in code.co_consts]
    return hashlib.sha256(repr((code.co_code, code.co_names, inner)).encode()).hexdigest()


def _plain_function(what):
    """The function of a method or a property; anything else as it is."""
    if isinstance(what, (staticmethod, classmethod)):
        what = what.__func__
    with contextlib.suppress(Exception):  # of an object that knows every attribute, say
        found = getattr(what, "fget", None) or getattr(what, "func", None)  # properties, and those that are cached
        if isinstance(found, types.FunctionType):
            return found
        return inspect.unwrap(what, stop=lambda one: isinstance(one, types.FunctionType))
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
