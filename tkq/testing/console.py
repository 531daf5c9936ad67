"""Text for a person at a terminal: progress and aligned tables."""

from __future__ import annotations

import shutil
import sys


class Progress:
    """Says what is going on: a bar that redraws itself on a terminal, a line for each step elsewhere."""

    def __init__(self, steps: int, out=None):
        self._steps, self._at, self._out = steps, 0, out or sys.stdout
        self._redraws = self._out.isatty()

    def step(self, what: str) -> None:
        self._at += 1
        if self._redraws:
            done = 20 * self._at // max(1, self._steps)
            line, width = f"[{'#' * done}{'.' * (20 - done)}] {self._at}/{self._steps} {what}", _width()
            self._out.write(f"\r{line[:width]:{width}s}")
        else:
            self._out.write(f"[{self._at}/{self._steps}] {what}\n")
        self._out.flush()

    def end(self) -> None:
        if self._redraws:
            self._out.write("\r" + " " * _width() + "\r")
            self._out.flush()


def _width() -> int:
    """The characters of a line that can be drawn anew: one more, and it would wrap."""
    return max(1, shutil.get_terminal_size().columns - 1)


def table(head: tuple[str, ...], rows: list[tuple[str, ...]]) -> str:
    """Aligned text, the first two columns to the left."""
    lines = [head, *rows]
    widths = [max(len(line[i]) for line in lines) for i in range(len(head))]
    return "\n".join(
        "  ".join(
            c.ljust(w) if i < 2 else c.rjust(w) for i, (c, w) in enumerate(zip(line, widths, strict=True))
        ).rstrip()
        for line in lines
    )
