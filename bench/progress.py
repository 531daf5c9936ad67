"""A progress bar for a run of many cases."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable

WIDTH = 24


class Progress:
    """What is done of `total`, how long it took, about how long the rest will take, and what runs now.

    On a terminal the bar stays below what is printed by `say`; elsewhere each step is a line. clock: for tests.
    """

    def __init__(self, total: int, stream=None, clock: Callable[[], float] = time.monotonic):
        self._total, self._stream, self._clock = total, stream or sys.stderr, clock
        self._done, self._begin, self._line = 0, clock(), ""
        self._live = self._stream.isatty()

    def step(self, what: str) -> None:
        """The next one begins."""
        self._line = self._bar(what)
        self._done += 1
        self._stream.write(f"\r\x1b[K{self._line}" if self._live else f"{self._line}\n")
        self._stream.flush()

    def say(self, text: str) -> None:
        """Print a text above the bar."""
        self._clear()
        print(text, flush=True)
        if self._live and self._line:
            self._stream.write(self._line)
            self._stream.flush()

    def end(self) -> None:
        self._clear()
        self._line = ""

    def _clear(self) -> None:
        if self._live:
            self._stream.write("\r\x1b[K")
            self._stream.flush()

    def _bar(self, what: str) -> str:
        taken = self._clock() - self._begin
        full = round(WIDTH * self._done / max(1, self._total))
        left = f", about {taken / self._done * (self._total - self._done):.0f} s left" if self._done else ""
        return (f"[{'#' * full}{'.' * (WIDTH - full)}] {self._done + 1}/{self._total}  {taken:.0f} s{left}  {what}")
