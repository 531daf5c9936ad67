"""A progress bar for a run of many cases."""

from __future__ import annotations

import itertools
import statistics
import sys
import time
from collections.abc import Callable

WIDTH = 24


class Progress:
    """What is done of `total`, how long it took, about how long the rest will take, and what runs now.

    Each step left is taken to be as long as the (lower) median of those done: in the first ones peers compile and tune,
    for a minute of the six and a half that 120 products took, say. So nothing is shown of it before two are done. Files
    with a main of their own, of minutes each, are steps like others.

    On a terminal the bar stays below what is printed by `say`; elsewhere each step is a line. clock: for tests.
    """

    def __init__(self, total: int, stream=None, clock: Callable[[], float] = time.monotonic):
        self._total, self._stream, self._clock = total, stream or sys.stderr, clock
        self._begin, self._line = clock(), ""
        self._begins: list[float] = []  # of the steps so far
        self._live = self._stream.isatty()

    def step(self, what: str) -> None:
        """The next one begins."""
        self._begins.append(self._clock())
        self._line = self._bar(what)
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
        done = len(self._begins) - 1
        full = round(WIDTH * done / max(1, self._total))
        return (f"[{'#' * full}{'.' * (WIDTH - full)}] {done + 1}/{self._total}  "
                f"{self._begins[-1] - self._begin:.0f} s{self._left()}  {what}")

    def _left(self) -> str:
        """What to say of the time that is left, if there is something to go by."""
        taken = [end - begin for begin, end in itertools.pairwise(self._begins)]
        if len(taken) < 2:
            return ""
        return f", about {statistics.median_low(taken) * (self._total - len(taken)):.0f} s left"
