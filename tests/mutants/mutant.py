"""What a mutant is, and how it is applied to a tree."""
from __future__ import annotations

import pathlib
import textwrap
from dataclasses import dataclass


@dataclass(frozen=True)
class Mutant:
    """One fault.

    name: unique. file: from the root. was: lines as they are, consecutive ones, which stand in the file once; indented
    or not, blank lines around them do not count. now: what stands there instead, "" for nothing. tests: arguments of
    pytest, by which a test must fail. beside: (file, was, now) of a change that is no fault by itself, as of an order
    behind which this one would hide.
    """

    name: str
    file: str
    was: str
    now: str
    tests: tuple
    beside: tuple = ()

    @property
    def edits(self) -> tuple:
        """(file, was, now) of each change."""
        return (self.file, self.was, self.now), *self.beside

    @property
    def family(self) -> str:
        """The name's first word."""
        return self.name.partition("_")[0]

    def changed(self, text: str) -> str:
        """The file's text with the fault.

        Raises:
            ValueError: the lines do not stand there once.
        """
        return self.with_edit(text, *self.edits[0])

    def with_edit(self, text: str, file: str, was: str, now: str) -> str:
        """A file's text with one of the changes.

        Raises:
            ValueError: the lines do not stand there once.
        """
        lines, wanted = text.split("\n"), lines_of(was)
        size = len(wanted)
        places = [i for i in range(len(lines) - size + 1) if _dedented(lines[i:i + size]) == wanted]
        if len(places) != 1:
            raise ValueError(f"{self.name}: stands in {file} {len(places)} times, expected once:\n{was}")
        at = places[0]
        indent = _indent(lines[at:at + size])
        lines[at:at + size] = [indent + line if line else line for line in lines_of(now)]
        return "\n".join(lines)

    def apply(self, root: pathlib.Path) -> None:
        """Change the files in a tree."""
        for edit in self.edits:
            path = root / edit[0]
            path.write_text(self.with_edit(path.read_text(), *edit))


def lines_of(block: str) -> list[str]:
    """Without indentation that all lines share, and blank ones around."""
    return textwrap.dedent(block).strip("\n").split("\n") if block.strip() else []


def _indent(lines):
    return min((line[:len(line) - len(line.lstrip())] for line in lines if line.strip()), key=len, default="")


def _dedented(lines):
    indent = _indent(lines)
    return [line[len(indent):] for line in lines]


def pressed(*cases: str) -> tuple:
    """Of tests/gpu/testing/test_naps.py: "naps-gemm", say."""
    return tuple(f"tests/gpu/testing/test_naps.py::test_under_pressure[{case}]" for case in cases)


def family(prefix: str, file: str, *of: tuple) -> tuple:
    """Mutants of one file: (name, was, now, tests) each, and perhaps changes beside."""
    return tuple(Mutant(f"{prefix}_{name}", file, *rest) for name, *rest in of)
