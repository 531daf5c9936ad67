"""What tests of README and docs read from Markdown: blocks of code with what is said of them, excerpts."""
from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[3]
PAGES = sorted((*ROOT.glob("*.md"), *(ROOT / "docs").rglob("*.md")))
_BLOCK = re.compile(r"(?:^<!-- ([^\n]*) -->\n+)?^( *)```(\w*)[^\n]*\n(.*?)^ *```$", re.DOTALL | re.MULTILINE)


@dataclass(frozen=True)
class Block:
    """A block of code on a page. said: the comment right above it, "" without one. code: as indented as it is there."""

    page: str
    line: int
    said: str
    language: str
    code: str

    def __str__(self):
        return f"{self.page}:{self.line}"


def blocks(path: Path) -> list[Block]:
    """All of a page."""
    text = path.read_text()
    return [Block(path.relative_to(ROOT).as_posix(), text[:m.start(3)].count("\n") + 1, m[1] or "", m[3],
                  m[4]) for m in _BLOCK.finditer(text)]


def is_excerpt(excerpt: str, source: str) -> bool:
    """Is the excerpt runs of whole lines of the source, in its order, with a line `...` wherever some are left out?"""
    lines, at = source.splitlines(), 0
    for run in re.split(r"^[ ]*\.\.\.[ ]*$\n?", excerpt, flags=re.MULTILINE):
        wanted = run.strip("\n").splitlines()
        if not wanted:
            continue
        starts = [i for i in range(at, len(lines)) if lines[i : i + len(wanted)] == wanted]
        if not starts:
            return False
        at = starts[0] + len(wanted)
    return bool(excerpt.strip())
