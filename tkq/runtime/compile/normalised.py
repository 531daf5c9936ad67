"""One digest of source files by what they mean: parsed, without comments, docstrings and layout.

Left out as well, of tkq's own modules that the DSL has no part in (they import neither it nor ``tkq.tile``):

- annotations, which Python only stores there: of functions without decorators that may read them, and of dataclasses'
  fields, but for ``ClassVar``, ``InitVar``, ``KW_ONLY`` and ``Constexpr``, which change what a dataclass is. In all
  other modules annotations count: the DSL takes arguments as constants by them, and lays out structures;
- the last fields of a frozen dataclass that have a constant for a default and that none of the files reads: what a call
  sets them to counts by the recipe's arguments.

Names, order, defaults, decorators, strings and numbers count. A file that cannot be parsed counts by its text. If one
of the files reads documentation, source text or line numbers of code, all count by their texts. The form is the same in
all versions of Python whose syntax trees are: fields that a version adds count where they hold something.
"""
from __future__ import annotations

import ast
import functools
import hashlib
import re
import warnings
from dataclasses import dataclass, field

# Names by which a program reads what is left out here.
_READS_TEXT = frozenset((
    "__doc__", "getdoc", "getcomments", "getsource", "getsourcelines", "getsourcefile", "getsourcesegment",
    "get_source_segment", "findsource", "get_source", "linecache", "tokenize", "lineno", "f_lineno", "tb_lineno",
    "co_firstlineno", "co_lines", "co_linetable", "co_lnotab", "co_positions", "currentframe", "_getframe",
    "_getframemodulename", "getframeinfo", "extract_stack", "extract_tb", "format_stack", "__line__", "__file__"))
_READS_ANNOTATIONS = frozenset(("__annotations__", "get_annotations", "get_type_hints", "singledispatch",
                                "singledispatchmethod", "Constexpr"))
_OF_THE_DSL = frozenset((  # where they are from; of tkq.rows the persistent kernels
    "cutlass", "cute", "cuda", "tile", "utils", "reduction_base", "persistent", "engine", "integers", "dkv"))
_MEANS_SOMETHING = frozenset(("Constexpr", "ClassVar", "InitVar", "KW_ONLY"))
_HARMLESS = frozenset(("staticmethod", "classmethod", "property", "cache", "lru_cache", "cached_property",
                       "contextmanager"))
_PLAIN_BASES = frozenset(("NamedTuple", "Enum", "IntEnum", "Protocol"))
_LEFT_OUT = frozenset(("ctx", "kind", "type_comment", "type_ignores"))
_FUNCTIONS = (ast.FunctionDef, ast.AsyncFunctionDef)


def digest(files: list, traced: bool = True) -> str:
    """Of files as ``read`` gives them. traced: are kernels made of them, so that it matters that one reads texts?"""
    if traced and any(one.words & _READS_TEXT for one in files):
        return _sha256(repr([(one.name, one.raw) for one in files]).encode())
    unread = _unread(files)
    return _sha256(repr([(one.name, _sha256(one.text(unread))) for one in files]).encode())


@functools.cache
def read(name: str, data: bytes, own: bool) -> Read:
    """A file. own: may its annotations and unread fields be left out; is it tkq's? A text is parsed once a process:
    what is found depends on nothing else, and `sources.clear` leaves it."""
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # the module's import gives them
            tree = ast.parse(data)
        return _Reader(Read(name, _sha256(data)), tree, own).read
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        words = set(re.findall(r"\w+", data.decode(errors="replace")))
        return Read(name, _sha256(data), ["unparsed", _sha256(data)], words)


def _sha256(data):
    return hashlib.sha256(data).hexdigest()


@dataclass
class _Class:
    """A class whose last fields may be left out. fields: (name, where it begins and ends in the file's parts)."""

    name: str
    bases: tuple
    others: int = 0  # fields before those
    fields: list = field(default_factory=list)


@dataclass
class Read:
    """A file. raw: the digest of its bytes. parts: its normalised text. words: all names in it, those of ``classes``'
    fields only if they stand elsewhere too. derived: (class, base). calls: (called, number of positional arguments; -1
    where one is starred)."""

    name: str
    raw: str
    parts: list = field(default_factory=list)
    words: set = field(default_factory=set)
    classes: list = field(default_factory=list)
    derived: set = field(default_factory=set)
    calls: set = field(default_factory=set)

    def text(self, unread: set) -> bytes:
        spans = [(begin, end) for cls in self.classes for name, begin, end in cls.fields if (cls.name, name) in unread]
        parts, at = [], 0
        for begin, end in sorted(spans):
            parts += self.parts[at:begin]
            at = end
        return "\0".join(parts + self.parts[at:]).encode(errors="surrogatepass")


def _unread(files) -> set:
    """{(class, field)} that may be left out: of a class's last fields those that no file has a name for, where no call
    passes enough positional arguments to set them by their places."""
    words = set().union(*(one.words for one in files))
    derived, calls = (set().union(*sets) for sets in zip(*((one.derived, one.calls) for one in files)))
    names, found = [cls.name for one in files for cls in one.classes], set()
    for cls in (cls for one in files for cls in one.classes if cls.fields and names.count(cls.name) == 1):
        family = {cls.name}
        while more := {name for name, base in derived if base in family} - family:
            family |= more
        given = [n for called, n in calls if called in family or called == "cls"]
        plain = len(family) == 1 and not cls.bases  # else places are shifted in other classes
        end = len(cls.fields)
        while end and cls.fields[end - 1][0] not in words:
            end -= 1
        if all(n == 0 or (plain and 0 <= n <= cls.others + end) for n in given):
            found |= {(cls.name, name) for name, _, _ in cls.fields[end:]}
    return found


class _Reader:
    """Writes a tree down, into a ``Read``."""

    def __init__(self, read, tree, own):
        self.read, self._parts = read, read.parts
        self._bare = own and not read.name.startswith("tkq.tile") and not any(map(_needs_annotations, ast.walk(tree)))
        self._node(tree)

    def _node(self, node):
        bare = self._bare
        if isinstance(node, (*_FUNCTIONS, ast.ClassDef)) and not _is_decorated_harmlessly(node):
            self._bare = False
        self._written(node)
        self._bare = bare

    def _written(self, node):
        self._parts.append(type(node).__name__ + "(")
        if isinstance(node, ast.Call):
            starred = any(isinstance(arg, ast.Starred) for arg in node.args)
            self.read.calls.add((_last(node.func), -1 if starred else len(node.args)))
        if isinstance(node, ast.ClassDef):
            self.read.derived.update((node.name, _last(base)) for base in node.bases)
        without = self._annotation(node)
        for name in node._fields:
            value = getattr(node, name, None)
            if value is None or value == [] or name in _LEFT_OUT or name == without:
                continue
            self._parts.append(name)
            if isinstance(node, ast.ClassDef) and name == "body":
                self._body(node)
            elif isinstance(value, list):
                self._several(value)
            else:
                self._one(value)
        self._parts.append(")")

    def _several(self, values):
        self._parts.append("[")
        for value in values:
            if not _is_text(value):
                self._one(value)
        self._parts.append("]")

    def _one(self, value):
        if isinstance(value, ast.AST):
            self._node(value)
            return
        self._parts.append(repr(value))
        if isinstance(value, (str, bytes)):
            text = value if isinstance(value, str) else value.decode(errors="replace")
            self.read.words.update((text,) if text.isidentifier() else re.findall(r"\w+", text))

    def _body(self, node):
        """A class's: fields that may be left out are remembered by their places."""
        cls = _Class(node.name, tuple(map(_last, node.bases)))
        frozen = self._bare and any(isinstance(d, ast.Call) and "frozen" in [k.arg for k in d.keywords]
                                    for d in node.decorator_list)
        self._parts.append("[")
        for statement in node.body:
            if _is_text(statement):
                continue
            begin, is_field = len(self._parts), isinstance(statement, ast.AnnAssign)
            words, self.read.words = self.read.words, set()
            self._node(statement)
            if is_field and frozen and _is_constant(statement):
                self.read.words -= {statement.target.id}
                cls.fields.append((statement.target.id, begin, len(self._parts)))
            elif is_field:
                cls.others += len(cls.fields) + 1
                words |= {name for name, _, _ in cls.fields}
                cls.fields.clear()
            self.read.words |= words
        self._parts.append("]")
        self.read.classes.append(cls)

    def _annotation(self, node):
        """The name of a node's field that is left out as an annotation."""
        if not self._bare:
            return None
        if isinstance(node, _FUNCTIONS):
            return "returns" if _says_nothing(node.returns) else None
        return "annotation" if isinstance(node, (ast.arg, ast.AnnAssign)) and _says_nothing(node.annotation) else None


def _is_text(node):
    """A docstring, or another string that stands for itself."""
    return isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant) and isinstance(node.value.value, str)


def _says_nothing(annotation):
    if annotation is None:
        return False
    for node in ast.walk(annotation):
        if isinstance(node, (ast.Call, ast.NamedExpr, ast.Await, ast.Yield, ast.Lambda)):
            return False  # it does something
        text = node.value if isinstance(node, ast.Constant) and isinstance(node.value, str) else _last(node)
        if any(word in (text or "") for word in _MEANS_SOMETHING):
            return False
    return True


def _is_constant(statement):
    return isinstance(statement.target, ast.Name) and _says_nothing(statement.annotation) and (
        isinstance(statement.value, ast.Constant))


def _last(node):
    """The last name of ``a.b.c``; of other expressions ""."""
    return node.id if isinstance(node, ast.Name) else node.attr if isinstance(node, ast.Attribute) else ""


def _needs_annotations(node) -> bool:
    """Does a node import something of the DSL, or name what reads annotations?"""
    if isinstance(node, ast.Import):
        return not _OF_THE_DSL.isdisjoint(part for alias in node.names for part in alias.name.split("."))
    if isinstance(node, ast.ImportFrom):
        names = {*(node.module or "").split("."), *(alias.name for alias in node.names)}
        return bool(names & (_OF_THE_DSL | _READS_ANNOTATIONS | {"*"}))
    return _last(node) in _READS_ANNOTATIONS


def _is_decorated_harmlessly(node) -> bool:
    """A function: by what reads no annotations, if at all. A class: it is a dataclass, or one of plain names."""
    names = {_last(d.func if isinstance(d, ast.Call) else d) for d in node.decorator_list}
    if isinstance(node, ast.ClassDef):
        return names == {"dataclass"} or (not names and all(_last(base) in _PLAIN_BASES for base in node.bases))
    return names <= _HARMLESS
