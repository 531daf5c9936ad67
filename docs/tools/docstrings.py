"""Docstrings as tkq writes them, to Markdown: sections (Args, Returns, Raises), fields of dataclasses, drawings."""
from __future__ import annotations

import ast
import dataclasses
import inspect
import re
import textwrap

_SECTION = re.compile(r"(Args|Returns|Raises|Attributes):$")
_ITEM = re.compile(r"([\w.*]+(?:, [\w.*]+)*): (.*)")
_ERROR = re.compile(r"(?<=\.) (?=[A-Z]\w+(?:Error|Warning))")
_VALUE = re.compile(r"(\"\w+\")  +")  # of a column of values and what they mean
_CODE = re.compile(r"(``.+?``|`[^`]+`)", re.DOTALL)
_ONE_FENCE = re.compile(r"\n```\n\n```(?:python|text)\n")  # two drawings that only an empty line keeps apart
_BULLET = re.compile(r"[-*] ")


def markdown(doc: str, fields: tuple[str, ...] = ()) -> str:
    """A docstring's text in Markdown. fields: names which, at the beginning of a line, are items of a list."""
    parts = "\n\n".join(part for block in _blocks(inspect.cleandoc(doc).splitlines())
                        if (part := _block(block, fields)))
    return _ONE_FENCE.sub(r"\n\n", parts)


def of(thing) -> str:
    """The Markdown of a function's or class's own docstring."""
    names = tuple(f.name for f in dataclasses.fields(thing)) if dataclasses.is_dataclass(thing) else ()
    return markdown(thing.__doc__ or "", names)


def first_sentence(doc: str) -> str:
    """Up to the first full stop that ends a sentence, in Markdown and on one line."""
    text = " ".join(inspect.cleandoc(doc).partition("\n\n")[0].split())
    found = re.match(r"(.+?)(?:\.(?= [A-Z])|[.:]*$)", text)
    return escaped(found[1])


def escaped(text: str) -> str:
    """Text outside backticks without Markdown's meaning; double backticks as single ones."""
    parts = _CODE.split(text)
    parts[::2] = (re.sub(r"([\\*_<>|\[\]])", r"\\\1", part) for part in parts[::2])
    parts[1::2] = (f"`{part.strip('`')}`" for part in parts[1::2])
    return "".join(parts)


def _blocks(lines: list[str]) -> list[list[str]]:
    """Paragraphs; a section, and what is indented below a line that ends with ``::``, whole."""
    blocks, block = [], []
    for line in [*lines, ""]:
        if block and block[-1].endswith(":") and not _SECTION.match(block[0]) and re.match(" +[-*] ", line):
            blocks.append(block)  # a list right below what it is of
            block = []
        whole = block and (_SECTION.match(block[0]) or block[0].endswith("::"))
        if (not line or line.startswith(" ")) if whole else (line and not line.endswith("::")):
            block.append(line)
        else:
            blocks.append(block)
            block = [line] if line else []
    return [block for block in (*blocks, block) if any(block)]


def _block(lines, fields) -> str:
    head = lines[0]
    if _SECTION.match(head):
        below = textwrap.dedent("\n".join(lines[1:])).strip()
        return f"**{head[:-1]}**\n\n{_section(head[:-1], below.splitlines())}"
    if head.endswith("::"):
        below = textwrap.dedent("\n".join(lines[1:])).strip("\n")
        return f"{escaped(head[:-1])}\n\n{_fenced(below)}" if below else escaped(head[:-1])
    if all(line.startswith("  ") for line in lines):
        lines = textwrap.dedent("\n".join(lines)).splitlines()
        if not _BULLET.match(lines[0]):
            return _fenced("\n".join(lines))
    if _BULLET.match(lines[0]):
        return _list(_joined(lines, _BULLET.match))
    named = [bool((m := _ITEM.match(line)) and set(m[1].split(", ")) <= set(fields)) for line in lines]
    if not any(named):
        return escaped("\n".join(lines))
    first = named.index(True)
    begins = lambda line: (m := _ITEM.match(line)) and set(m[1].split(", ")) <= set(fields)
    before = escaped("\n".join(lines[:first]))
    return f"{before}\n\n{_items(_joined(lines[first:], begins))}".strip()


def _section(title, lines):
    if title == "Returns":
        return escaped("\n".join(line.strip() for line in lines))
    if title == "Raises":  # one after the other on a line, too
        lines = [line for run in lines for line in _ERROR.split(run)]
    return _items(_joined(lines, _ITEM.match))


def _joined(lines, begins) -> list[str]:
    """One line an item."""
    found: list[str] = []
    for line in lines:
        if begins(line) or not found:
            found.append(line.strip())
        elif line.strip():
            found[-1] += " " + _VALUE.sub(r"\1: ", line.strip())
    return found


def _items(items):
    """A list whose names are code."""
    shown = []
    for item in items:
        match = _ITEM.match(item)
        names = match and ", ".join(f"`{name}`" for name in match[1].split(", "))
        shown.append(f"- {names}: {escaped(match[2])}" if match else f"- {escaped(item)}")
    return "\n".join(shown)


def _list(items):
    return "\n".join(f"- {escaped(item[2:])}" for item in items)


def _fenced(text):
    try:
        ast.parse(text)
        kind = "python"
    except SyntaxError:
        kind = "text"
    return f"```{kind}\n{text}\n```"
