"""Which source files decide a kernel's machine code: its builder's module and what that imports, transitively.

Imports are looked for in the text: a syntax tree would take many times as long, and this is part of a second process's
first call. What looks like an import in a comment or a docstring counts too: one file too many costs a compile, one too
few would be a wrong kernel. Seen are ``import a.b``, ``from .a import b`` (where b is a module, that one as well),
``import_module("a.b")`` and ``__import__("a.b")``, anywhere in the code, and the ``__init__`` of each package on the
way. Not seen are modules whose names are made up at run time: ``Recipe.sources`` is for those.

From tkq's modules its own are followed. From a user's all that lie neither with Python's own nor with installed
packages (site-packages): of these the versions count, see ``versions``; the package that a kernel itself is in is
followed wherever it lies. Environment variables that are read by name in a user's module count by their values.
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
from importlib import metadata

from . import digests

_TKQ = pathlib.Path(__file__).resolve().parents[2]
_NORMALISED = str(_TKQ / "runtime/compile/normalised.py")
_ALWAYS = ("runtime/compile/build.py", "runtime/compile/link.py",
           "runtime/compile/shim.c")  # what every kernel goes through
_FAKE = "tkq.runtime.compile.fake"  # nearly every builder imports it: for all, so that none is forgotten
# These see no kernel, and those that kernels share a module with lead here.
_HOST_ONLY = re.compile(
    r"tkq\.(runtime(?!\.compile\.fake$)|testing|integrations|warmup|cli|models|names|nn|version|__main__|reference)"
    r"(\..*)?")
# After "import": names in brackets, with comments between them, or the names up to the end of the statement.
_IMPORT = re.compile(r"import(?=[\s\\(*])[ \t\\\r\n]*(?:\(((?:[^()#]|#[^\n]*)*)\)|((?:[^\n;#\\]|\\\r?\n)*))")
_FROM = re.compile(r"(?<![\w.])from(?!\w)[ \t\\\r\n]*([\w.]+)[ \t\\\r\n]*\Z")
_BY_NAME = re.compile(r"import(?:_module|__)\s*\(\s*[rub]?[\"']([\w.]+)[\"']")
_COMMENT, _FIRST_WORD = re.compile(r"#[^\n]*"), re.compile(r"[\s\\]*([\w.*]+)")
_READS = re.compile(r"(?:environ\s*(?:\[|\.\s*(?:get|pop|setdefault)\s*\()|getenv\s*\()\s*[rub]?[\"'](\w+)[\"']")
# What gives a module values or functions that its text does not show, but for the forms above.
_UNSAID = re.compile(r"environ|getenv|import_module|__import__|spec_from_file_location|\bexec\s*\(|read_text|read_bytes"
                     r"|(?:json|tomllib|yaml|pickle)\.\w*load|np\.load")
# Of a process or a machine (ranks, folders, jobs): they decide where something runs, not what a kernel is.
_OF_THE_PROCESS = re.compile(r"((LOCAL_|GROUP_|ROLE_|NODE_)?RANK|(MASTER|SLURM|OMPI|PMI|TORCHELASTIC|TKQ|XDG)_\w+|HOME"
                             r"|USER|CUDA_VISIBLE_DEVICES|LOGNAME|HOSTNAME|PATH|PWD|TMPDIR|TEMP|TMP)")
_BEYOND = frozenset(("torch", "numpy", "cutlass", "cuda", "tvm_ffi", "nvidia_cutlass_dsl"))  # keyed, or in no kernel
_INSTALLED = {"site-packages", "dist-packages"}
_PYTHONS = os.path.dirname(os.path.realpath(os.__file__))
_BINDS_TKQ = re.compile(r"[\s\\]*tkq\.[\w.]+[\s\\]*\Z")


@functools.cache
def digest(modules: tuple, as_text: bool = False) -> str:
    """Of all files that count for a kernel of these modules: the builder's and ``Recipe.sources``. What counts of them
    says ``normalised``. as_text: all of it, line by line. Files are read once a process: edit them and start anew.

    Raises:
        ImportError: one of the modules has no source file.
    """
    files = {**reached(modules), **{name: str(_TKQ / name) for name in _ALWAYS}}
    texts = _digest_of(sorted((name, _hash(path)) for name, path in files.items()))
    if as_text:
        return texts
    key = _digest_of((texts, _hash(_NORMALISED)))
    found = digests.find(key)
    if found is None:
        found = _normalised(files)
        digests.add(key, found)
    return found


def _normalised(files):
    from . import normalised  # not needed where the digest is remembered

    read = [_parsed(name, path) for name, path in sorted(files.items())]
    traced, host = ([one for one in read if (one.name in _ALWAYS) is always] for always in (False, True))
    return _digest_of((normalised.digest(traced), normalised.digest(host, traced=False)))


def _parsed(name, path):
    from . import normalised

    return normalised.read(name, _read(path), name.partition(".")[0] == "tkq" or name in _ALWAYS)


def _digest_of(what) -> str:
    return hashlib.sha256(repr(what).encode()).hexdigest()


@functools.cache
def environment(modules: tuple) -> tuple:
    """(name, value or None) of the environment variables that users' files among those that count read by name. Not of
    a program (``__main__``), which reads many, and whose values count as they are: see ``values``."""
    named = tuple(module for module in modules if module != "__main__")
    texts = [_read(path) for name, path in _users_of(named)]
    found = {match[1] for text in texts if b"env" in text for match in _READS.finditer(text.decode(errors="replace"))}
    return tuple((name, os.environ.get(name)) for name in sorted(found) if not _OF_THE_PROCESS.fullmatch(name))


@functools.cache
def versions(modules: tuple) -> tuple:
    """(package, version) of Python and of the installed packages that users' files among those that count import."""
    users = _users_of(modules)
    tops = {m.partition(".")[0] for name, path in users for m in _imported(name, path)} - _BEYOND - {"tkq"}
    installed = sorted(top for top in tops if _kind(top) == "installed")
    return tuple((top, _version(top)) for top in installed) + (tuple(sys.version_info[:3]),) * bool(users)


def is_users(module: str) -> bool:
    """Has a module a source file, and lies neither with Python's own, nor with installed packages, nor with tkq?"""
    top = module.partition(".")[0]
    return top != "tkq" and _kind(top) == "user" and _file(module) is not None


def say_all(modules: tuple) -> bool:
    """Do the users' files among those that count show what their modules hold? Else they have to be imported."""
    shown = (_BY_NAME.sub("", _READS.sub("", _read(path).decode(errors="replace"))) for _, path in _users_of(modules))
    return not any(_UNSAID.search(text) for text in shown)


def is_nowhere(module: str) -> bool:
    """Does no import find a module of this name? One that a program has loaded by its path, or executed."""
    return _kind(module.partition(".")[0]) == "nowhere"


def _users_of(modules):
    if all(module.partition(".")[0] == "tkq" for module in modules):
        return []
    return [(name, path) for name, path in reached(modules).items() if name.partition(".")[0] != "tkq"]


def clear() -> None:
    """Drop what was read of files, for tests that change them."""
    for cached in (digest, environment, versions, _hash, _read, _imports, _imported, _on_disk, _listed, _roots,
                   _kind):
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
    """What of a module's imports is followed, with the packages that this lies in."""
    top = name.partition(".")[0]
    return tuple({part for module in _imported(name, path) if _is_followed(module.partition(".")[0], top)
                  for part in _with_packages(module)})


def _is_followed(top, importer):
    return top in ("tkq", importer) or (importer != "tkq" and _kind(top) == "user")


@functools.cache
def _imported(name, path) -> frozenset:
    """What the module's text imports."""
    text = _read(path).decode(errors="replace")
    package, top = _package_of(name, path), name.partition(".")[0]
    by_name = _BY_NAME.finditer(text) if "import_module" in text or "__import__" in text else ()
    modules = {_absolute(match[1], package) for match in by_name}
    for match in _IMPORT.finditer(text):
        origin = _absolute(_origin(text, match.start()), package)
        if origin and not _is_followed(origin.partition(".")[0], top):
            modules.add(origin)
            continue
        parts = _COMMENT.sub("", match[1] or match[2] or "").split(",")
        names = [word[1] for word in map(_FIRST_WORD.match, parts) if word]
        if not origin and any(_BINDS_TKQ.match(part) for part in parts):  # `import tkq.x` binds tkq, all of it
            names.append("tkq")
        modules.update(_from(origin, names) if origin else names)
    return frozenset(filter(None, modules))


def _package_of(name, path):
    if name == "__main__":  # run by `python -m package.module`
        return getattr(sys.modules.get(name), "__package__", None) or ""
    return name if os.path.basename(path) == "__init__.py" else name.rpartition(".")[0]


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
    """The module and the packages it is in. tkq/__init__.py has only names of what is elsewhere: a module that imports
    tkq as such may use all of it, one that imports something in it does not."""
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
    folder, found = os.path.dirname(path), []
    for place, _, files in os.walk(folder):
        within = ".".join((package, *place[len(folder):].split(os.sep)[1:]))
        found += [within if name == "__init__.py" else f"{within}.{name[:-3]}"
                  for name in files if name.endswith(".py")]
    return [module for module in found if module != package]


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
    *packages, last = name.split(".")
    if packages[:1] == ["tkq"]:  # wherever it lies, and whatever its folder is called
        packages[0] = _TKQ.name
    elif name == "tkq":
        return str(_TKQ / "__init__.py")
    for root in _roots(name.partition(".")[0]):
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
def _roots(top) -> tuple:
    """The folders in which a top-level module or package lies; several where it is a package without ``__init__``."""
    if top == "tkq":
        return (str(_TKQ.parent),)
    return tuple(os.path.dirname(os.path.realpath(place)) for place in _places(top))


def _places(top) -> list:
    """Where a top-level module lies: files or folders; "built-in" or "frozen" for what is part of Python's program."""
    try:
        spec = importlib.util.find_spec(top)
        return list(spec.submodule_search_locations or filter(None, [spec.origin])) if spec else []
    except (ValueError, ImportError):  # a module without a spec
        return list(filter(None, [getattr(sys.modules.get(top), "__file__", None)]))


@functools.cache
def _kind(top) -> str:
    """Where a top-level module comes from: "user", "installed", "python", or "nowhere"."""
    places = _places(top)
    if top == "__main__":
        return "user"
    if top in _BEYOND or any(_is_installed(top, place) for place in places):
        return "installed"
    if not any(map(os.path.isabs, places)):
        return "python" if places else "nowhere"
    return "python" if any(os.path.commonpath((root, _PYTHONS)) == _PYTHONS for root in _roots(top)) else "user"


def _is_installed(top, place):
    """Below a folder of that name, or beside what pip writes of a package (`pip install --target`)."""
    noted = re.compile(re.escape(top).replace("_", "[_.-]") + r"-[^-]*\.dist-info", re.IGNORECASE)
    return bool(_INSTALLED & set(pathlib.PurePath(place).parts)) or any(
        map(noted.fullmatch, _listed(os.path.dirname(place))))


def _version(top):
    """Of the package that is named as its module is; of others what stands in the module's first file."""
    with contextlib.suppress(metadata.PackageNotFoundError):
        return metadata.version(top)
    path = _file(top)
    return _hash(path) if path else None


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
