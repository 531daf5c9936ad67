"""A table of coloured cells with headings: what layouts are drawn as."""
from dataclasses import dataclass

from .drawing import COLOURS, GREY, LINE, Box, Picture, Words, width_of

LEFT_OUT = ".."
SIZE, GAP = 11, 5


@dataclass(frozen=True)
class Cell:
    """lines: what is written in it. colour: a number, None for what is not in use."""

    lines: tuple
    colour: int | None = 0


@dataclass(frozen=True)
class Grid(Picture):
    """rows, columns: headings, LEFT_OUT for some that are left out. cells: {(row, column): Cell}, for all others."""

    title: str
    columns: tuple
    rows: tuple
    cells: dict
    notes: tuple = ()

    def lines_of(self, i, j) -> tuple:
        return self.cells[i, j].lines if (i, j) in self.cells else (LEFT_OUT,)

    def widths(self) -> list:
        """Of the columns, in letters."""
        return [max(len(heading), *(len(line) for i in range(len(self.rows)) for line in self.lines_of(i, j)))
                for j, heading in enumerate(self.columns)]

    def text(self) -> str:
        first, widths = max(map(len, self.rows)), self.widths()
        rule = "-" * first + "-+" + "+".join("-" * (w + 2) for w in widths) + "+"
        headings = " ".join(h.center(w + 2) for h, w in zip(self.columns, widths))
        out = [self.title, "", " " * first + "  " + headings, rule]
        for i, heading in enumerate(self.rows):
            height = max(len(self.lines_of(i, j)) for j in range(len(self.columns)))
            for n in range(height):
                line = [self.lines_of(i, j)[n] if n < len(self.lines_of(i, j)) else "" for j in range(len(widths))]
                out.append((heading if n == 0 else "").rjust(first) + " |" + "|".join(
                    text.center(w + 2) for text, w in zip(line, widths)) + "|")
            out.append(rule)
        return "\n".join(line.rstrip() for line in (*out, *self.notes))

    def shapes(self):
        line = SIZE * LINE
        widths = [width_of("x" * n, SIZE) + 2 * GAP for n in self.widths()]
        left = max(width_of(h, SIZE) for h in self.rows) + 3 * GAP
        out, y = [Words(GAP, line, self.title, bold=True, size=SIZE + 2)], 2 * line
        lefts = [left + sum(widths[:j]) for j in range(len(widths))]
        for x, width, heading in zip(lefts, widths, self.columns):
            out.append(Words(x + width / 2, y + line / 2, heading, "middle", size=SIZE))
        y += line + GAP
        for i, heading in enumerate(self.rows):
            height = line * max(len(self.lines_of(i, j)) for j in range(len(self.columns))) + GAP
            out.append(Words(left - GAP, y + height / 2, heading, "end", size=SIZE))
            for j, (x, width) in enumerate(zip(lefts, widths)):
                out += self._cell(i, j, x, y, width, height, line)
            y += height
        y += GAP
        for note in self.notes:
            out.append(Words(GAP, y + line / 2, note, size=SIZE))
            y += line
        width = max(lefts[-1] + widths[-1], width_of(self.title, SIZE + 2), *(width_of(n, SIZE) for n in self.notes), 0)
        return width + 2 * GAP, y + GAP, out

    def _cell(self, i, j, x, y, width, height, line):
        cell, lines = self.cells.get((i, j)), self.lines_of(i, j)
        out = []
        if cell is not None:
            unused = cell.colour is None
            fill = GREY if unused else COLOURS[cell.colour % len(COLOURS)]
            out.append(Box(x, y, width, height, fill, dashed=unused))
        x, y = x + width / 2, y + height / 2 - line * (len(lines) - 1) / 2
        return out + [Words(x, y + n * line, text, "middle", size=SIZE) for n, text in enumerate(lines)]


def whole(name: str, n) -> None:
    """TypeError unless n is an int, ValueError unless it is 1 or more."""
    if isinstance(n, bool) or not isinstance(n, int):
        raise TypeError(f"{name}: got {n!r}, allowed are ints from 1 on")
    if n < 1:
        raise ValueError(f"{name} is {n}, allowed are ints from 1 on")


def chosen(n: int, most: int, also=()) -> list:
    """Which of n rows or columns are shown: all, or ``most`` at most of the first ones, those from each of ``also`` on,
    and the last one; None stands for those that are left out."""
    if n <= most:
        return list(range(n))
    starts = [0, *sorted({x for x in also if 0 < x < n - 1})]
    share = max(1, (most - 1) // len(starts))
    shown = sorted({i for x in starts for i in range(x, min(x + share, n))} | {n - 1})
    out = []
    for i, last in zip(shown, [-1, *shown]):
        out += [None] * (i > last + 1) + [i]
    return out
