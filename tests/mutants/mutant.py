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
    pytest, by which a test must fail.
    """

    name: str
    file: str
    was: str
    now: str
    tests: tuple

    @property
    def family(self) -> str:
        """The name's first word."""
        return self.name.partition("_")[0]

    def places(self, text: str) -> list[int]:
        """The lines of a file's text, from 0, at which ``was`` begins."""
        lines, wanted = text.split("\n"), lines_of(self.was)
        return [i for i in range(len(lines) - len(wanted) + 1) if _dedented(lines[i:i + len(wanted)]) == wanted]

    def changed(self, text: str) -> str:
        """The file's text with the fault.

        Raises:
            ValueError: the lines do not stand there once.
        """
        places = self.places(text)
        if len(places) != 1:
            raise ValueError(f"{self.name}: stands in {self.file} {len(places)} times, expected once:\n{self.was}")
        lines, wanted = text.split("\n"), lines_of(self.was)
        at, size = places[0], len(wanted)
        indent = _indent(lines[at:at + size])
        lines[at:at + size] = [indent + line if line else line for line in lines_of(self.now)]
        return "\n".join(lines)

    def apply(self, root: pathlib.Path) -> None:
        """Change the file in a tree."""
        path = root / self.file
        path.write_text(self.changed(path.read_text()))


def lines_of(block: str) -> list[str]:
    """Without indentation that all lines share, and blank ones around."""
    return textwrap.dedent(block).strip("\n").split("\n") if block.strip() else []


def _indent(lines):
    return min((line[:len(line) - len(line.lstrip())] for line in lines if line.strip()), key=len, default="")


def _dedented(lines):
    indent = _indent(lines)
    return [line[len(indent):] for line in lines]


def pressed(*cases: str) -> tuple:
    """Of tests/gpu/test_naps.py: "naps-gemm", say."""
    return tuple(f"tests/gpu/test_naps.py::test_under_pressure[{case}]" for case in cases)


def family(prefix: str, file: str, *of: tuple) -> tuple:
    """Mutants of one file: (name, was, now, tests) each."""
    return tuple(Mutant(f"{prefix}_{name}", file, was, now, tests) for name, was, now, tests in of)
