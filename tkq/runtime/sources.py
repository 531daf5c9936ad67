"""Which source files decide a kernel's machine code: its builder's module and what that imports, transitively.

Imports are looked for in the text: a syntax tree would take many times as long, and this is part of a second process's
first call. What looks like an import in a comment or a docstring counts too: one file too many costs a compile, one too
few would be a wrong kernel. Seen are ``import a.b``, ``from .a import b`` (where b is a module, that one as well),
``import_module("a.b")`` and ``__import__("a.b")``, anywhere in the code, and the ``__init__`` of each package on the
way. Not seen are modules whose names are made up at run time: ``Recipe.sources`` is for those.

Followed are tkq's modules and those of the importing module's own package: other packages are the user's business.
"""
from __future__ import annotations

import contextlib
import functools
import hashlib
import importlib
import importlib.util
import os
import pathlib
import re
import sys

_TKQ = pathlib.Path(__file__).resolve().parents[1]
_ALWAYS = ("runtime/build.py", "runtime/link.py", "runtime/shim.c")  # what every kernel goes through
_FAKE = "tkq.runtime.fake"  # nearly every builder imports it: for all, so that none is forgotten
# These see no kernel, and those that kernels share a module with lead here.
_HOST_ONLY = re.compile(
    r"tkq\.(runtime(?!\.fake$)|testing|integrations|catalog|demo|models|names|nn|prefetching|__main__|reference\w*)(\..*)?")
# After "import": names in brackets, with comments between them, or the names up to the end of the statement.
_IMPORT = re.compile(r"import(?=[\s\\(*])[ \t\\\r\n]*(?:\(((?:[^()#]|#[^\n]*)*)\)|((?:[^\n;#\\]|\\\r?\n)*))")
_FROM = re.compile(r"(?<![\w.])from(?!\w)[ \t\\\r\n]*([\w.]+)[ \t\\\r\n]*\Z")
_BY_NAME = re.compile(r"import(?:_module|__)\s*\(\s*[rub]?[\"']([\w.]+)[\"']")
_COMMENT, _FIRST_WORD = re.compile(r"#[^\n]*"), re.compile(r"[\s\\]*([\w.*]+)")
_BINDS_TKQ = re.compile(r"[\s\\]*tkq\.[\w.]+[\s\\]*\Z")


@functools.cache
def digest(modules: tuple) -> str:
    """Of all files that count for a kernel of these modules: the builder's and ``Recipe.sources``. Files are read once
    a process: edit them and start anew.

    Raises:
        ImportError: one of the modules has no source file.
    """
    found = [(name, _hash(path)) for name, path in reached(modules).items()]
    found += [(name, _hash(str(_TKQ / name))) for name in _ALWAYS]
    return hashlib.sha256(repr(sorted(found)).encode()).hexdigest()


def forget() -> None:
    """What was read of files, for those who change them."""
    for cached in (digest, _hash, _read, _imports, _on_disk, _listed, _root):
        cached.cache_clear()


def reached(modules) -> dict:
    """{module's name: its file} of the modules and of all that they import. Raises what ``digest`` does."""
    found, waiting = {}, [_FAKE]
    for module in modules:
        if _file(module) is None:
            _import(module)
        waiting += _with_packages(module)
    while waiting:
        name = waiting.pop()
        path = None if name in found or _HOST_ONLY.fullmatch(name) else _file(name)
        if path is not None:
            found[name] = path
            waiting += _imports(name, path)
    return found


@functools.cache
def _imports(name, path) -> tuple:
    """What the module's text imports of tkq and of its own package, with the packages that this lies in."""
    text = _read(path).decode(errors="replace")
    package = name if os.path.basename(path) == "__init__.py" else name.rpartition(".")[0]
    tops = "tkq", name.partition(".")[0]
    by_name = _BY_NAME.finditer(text) if "import_module" in text or "__import__" in text else ()
    modules = {_absolute(match[1], package) for match in by_name}
    for match in _IMPORT.finditer(text):
        origin = _absolute(_origin(text, match.start()), package)
        if origin and origin.partition(".")[0] not in tops:
            continue
        parts = _COMMENT.sub("", match[1] or match[2] or "").split(",")
        names = [word[1] for word in map(_FIRST_WORD.match, parts) if word]
        if not origin and any(_BINDS_TKQ.match(part) for part in parts):  # `import tkq.x` binds tkq, all of it
            names.append("tkq")
        modules.update(_from(origin, names) if origin else names)
    return tuple({part for module in modules if module.partition(".")[0] in tops for part in _with_packages(module)})


def _origin(text, end):
    """What stands between "from" and the "import" that begins at `end`; "" where that is another statement."""
    at = end
    while (at := text.rfind("from", max(0, end - 300), at)) >= 0:
        if match := _FROM.match(text, at, end):
            return match[1]
    return ""


def _from(origin, names):
    """The modules that ``from origin import names`` may bring."""
    if "*" in names:
        return [origin, *_inside(origin)]
    if os.path.basename(_file(origin) or "__init__.py") != "__init__.py":  # a module, in which no other can be
        return [origin]
    modules = [f"{origin}.{name}" for name in names]
    if origin == "tkq" and any(map(_file, modules)):  # of tkq itself modules are imported, or its public functions
        return [module if _file(module) else "tkq" for module in modules]
    return [origin, *modules]


def _with_packages(module):
    """The module and the packages it is in. tkq/__init__.py has only names of what is elsewhere: who imports tkq as
    such may use all of it, who imports something in it does not."""
    if module == "tkq":
        return _inside("tkq")
    parts = module.split(".")
    first = 2 if parts[0] == "tkq" else 1
    return [".".join(parts[:n]) for n in range(first, len(parts) + 1)]


def _inside(package):
    """All modules of a package, those of its packages too."""
    path = _file(package)
    if path is None or os.path.basename(path) != "__init__.py":
        return []
    folder = pathlib.Path(path).parent
    names = (p.relative_to(folder).with_suffix("").parts for p in folder.rglob("*.py"))
    return [".".join((package, *parts)).removesuffix(".__init__") for parts in names if parts != ("__init__",)]


def _absolute(name, package):
    """The full name of a module, which may be given relative to a package."""
    if not name.startswith("."):
        return name
    relative = name.lstrip(".")
    up = len(name) - len(relative) - 1
    base = package.split(".")
    return ".".join(filter(None, (*base[:len(base) - up], relative)))


def _file(name) -> str | None:
    """A module's source file; None where it has none, or there is no such module."""
    loaded = None if name.startswith("tkq.") else sys.modules.get(name)  # may lie anywhere: __main__, say
    file = getattr(loaded, "__file__", None)
    return os.path.realpath(file) if file and os.path.isfile(file) else _on_disk(name)


@functools.cache
def _on_disk(name):
    root = _root(name.partition(".")[0])
    if root is not None:
        *packages, last = name.split(".")
        folder = os.path.join(root, *packages)
        there = _listed(folder)
        if last in there and "__init__.py" in _listed(os.path.join(folder, last)):
            return os.path.join(folder, last, "__init__.py")
        if last + ".py" in there:
            return os.path.join(folder, last + ".py")
    return None


@functools.cache
def _listed(folder) -> frozenset:
    try:
        return frozenset(os.listdir(folder))
    except OSError:  # no such folder, or a file
        return frozenset()


@functools.cache
def _root(top):
    """The folder in which a top-level module or package lies."""
    if top == "tkq":
        return str(_TKQ.parent)
    try:
        spec = importlib.util.find_spec(top)
    except ValueError:  # a module without a spec
        return None
    inside = next(iter(spec.submodule_search_locations or ()), None) if spec else None
    origin = inside or (spec and spec.origin)
    return os.path.dirname(os.path.realpath(origin)) if origin else None


def _import(module):
    """A last attempt for a builder's module that is not where its name says: its package may have a path of its own."""
    with contextlib.suppress(ModuleNotFoundError):
        importlib.import_module(module)
    if _file(module) is None:
        raise ImportError(f"{module}: has no source file; the cache needs one to notice changes, the DSL to compile")


@functools.cache
def _hash(path) -> str:
    return hashlib.sha256(_read(path)).hexdigest()


@functools.cache
def _read(path) -> bytes:
    with open(path, "rb") as file:
        return file.read()
