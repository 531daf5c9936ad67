"""The passes of a transform over memory: what lies there between launches, and what each launch does."""
from __future__ import annotations

from dataclasses import dataclass

from .drawing import COLOURS, LINE, WHITE, Arrow, Box, Picture, Words, width_of

SIZE, GAP = 11, 6
PRECISIONS = "half", "split"


@dataclass(frozen=True)
class Data:
    """What lies in memory. holds: how much of what. bytes: of each point."""

    name: str
    holds: str
    bytes: int


@dataclass(frozen=True)
class Pass:
    """A launch. steps: what it does. reads, writes: bytes of each point, of the sequences alone."""

    name: str
    steps: tuple
    reads: int
    writes: int


@dataclass(frozen=True)
class Passes(Picture):
    """parts: `Data` and `Pass` in their order, what is read first."""

    title: str
    parts: tuple
    notes: tuple = ()

    @property
    def bytes(self) -> int:
        """That are moved, of each point."""
        return sum(p.reads + p.writes for p in self.parts if isinstance(p, Pass))

    def text(self) -> str:
        names = max(len(p.name) for p in self.parts) + 2
        out = [self.title, ""]
        for p in self.parts:
            if isinstance(p, Data):
                out.append(f"{p.name.ljust(names)}{p.holds}, {p.bytes} bytes a point")
            else:
                head = [f"  {p.name}", *[""] * (len(p.steps) - 1)]
                out += [f"  | {name.strip().ljust(names)}{step}" for name, step in zip(head, p.steps, strict=True)]
        return "\n".join((*out, "", *self.notes))

    def shapes(self):
        line, side = SIZE * LINE, 3 * GAP
        wide = [f"{p.name}: {p.holds}, {p.bytes} bytes a point" for p in self.parts if isinstance(p, Data)]
        wide += [step for p in self.parts if isinstance(p, Pass) for step in (p.name, *p.steps)]
        width = max(width_of(text, SIZE + 1) for text in wide) + 4 * GAP
        out, y, colour, end = [Words(GAP, line, self.title, bold=True, size=SIZE + 2)], 2.5 * line, 0, None
        for p in self.parts:
            lines = 1 if isinstance(p, Data) else 1 + len(p.steps)
            height, left = lines * line + GAP, GAP if isinstance(p, Data) else side
            if end is not None:
                out.append(Arrow(GAP + width / 2, end, GAP + width / 2, y))
            fill = WHITE if isinstance(p, Data) else COLOURS[colour % len(COLOURS)]
            out.append(Box(left, y, width - 2 * (left - GAP), height, fill, dashed=isinstance(p, Data)))
            if isinstance(p, Data):
                words = [(f"{p.name}: {p.holds}, {p.bytes} bytes a point", False)]
            else:
                words, colour = [(p.name, True), *((step, False) for step in p.steps)], colour + 1
            out += [Words(left + GAP, y + GAP / 2 + (i + 0.5) * line, text, bold=bold, size=SIZE)
                    for i, (text, bold) in enumerate(words)]
            end, y = y + height, y + height + 2.5 * GAP
        for note in self.notes:
            out.append(Words(GAP, y + line / 2, note, size=SIZE))
            y += line
        width = max(width, width_of(self.title, SIZE + 2), *(width_of(n, SIZE) for n in self.notes), 0)
        return width + 2 * GAP, y + GAP, out


def fft_passes(tokens: int, causal: bool = True, precision: str = "half") -> Passes:
    """A picture of the launches that ``tkq.fft_conv`` takes for sequences of that many tokens, forward: what each does,
    and what lies in memory between them.

    Args:
        tokens, causal, precision: as of ``tkq.fft_conv``.
    Raises:
        TypeError: tokens is no int, causal no bool.
        ValueError: tokens is below 1 or more than are supported; another precision.

    Example::

        print(viz.fft_passes(262144))
    """
    from ..convolution.fft.plan import MOST_POINTS, MOST_TOKENS, has_transform, transform_rows, twice

    if precision not in PRECISIONS:
        raise ValueError(f"fft_passes: precision: got {precision!r}, allowed are {', '.join(map(repr, PRECISIONS))}")
    if isinstance(tokens, bool) or not isinstance(tokens, int):
        raise TypeError(f"fft_passes: tokens: got {tokens!r}, allowed are ints from 1 to {MOST_TOKENS}")
    if not isinstance(causal, bool):
        raise TypeError(f"fft_passes: causal: got {causal!r}, allowed are True and False")
    if not 1 <= tokens <= MOST_TOKENS:
        raise ValueError(f"fft_passes: tokens is {tokens}, allowed are 1 to {MOST_TOKENS}")
    split, notes, written = precision == "split", [], 2
    title = f"fft_conv: {tokens} tokens, {'causal' if causal else 'circular'}"
    if not causal and not twice(tokens):
        causal, written = True, 4
        notes.append("One of two: causal, and around the circle. Their results, float32, are added by PyTorch.")
    elif not causal and not has_transform(tokens):
        tokens, causal = 2 * tokens, True  # as the launches have it
        notes.append("The tokens are written twice: the second half of what is causal of them is circular.")
    rows = transform_rows(tokens, causal, split)
    if rows is None:
        return _several(title, tokens, (split, written), notes)
    return _one(title + ", one pass", rows, (causal, -(-tokens // MOST_POINTS), split), notes)


def _one(title, rows, kind, notes):
    causal, blocks, split = kind
    points, how = 64 * rows, _transform(rows)
    if blocks > 4 and not split:  # in bf16
        points, how, blocks = 32**3, "32768 points as 32 x 32 x 32, by real products with 64 x 64 matrices", 1
    steps = [f"{'' if blocks == 1 else 'each of its blocks: '}{how}, "
             + ("at frequencies k - 1/4" if causal else "two sequences as one complex one")]
    steps.append("times the filter's spectrum" if blocks == 1 else
                 "the sum over blocks before, times the spectra of the filter's parts")
    steps.append("transformed back: the real part" + ("" if causal else " and the imaginary one"))
    of = f"{points} points" if blocks == 1 else f"{blocks} blocks of {points} points"
    return Passes(title, (Data("u", of, 2), Pass("convolution", tuple(steps), 2, 2), Data("y", of, 2)),
                  (*notes, *_split(split)))


def _several(title, tokens, kind, notes):
    """kind: (is it split?, bytes of a result)"""
    from ..convolution.fft.long.spec import COLS, ROWS, ColumnSpec, size_of

    split, written = kind
    size = size_of(tokens, split)
    spec = ColumnSpec("bf16", size.radix, split=split)
    between, each = size.bytes // size.points, f"{spec.rows} x {size.row}"
    by = "" if size.radix == 1 else f" as {size.radix} of 64"
    order = "sums of the radix first, then products" if spec.radix_first else "products first, then sums of the radix"
    between_passes = "times factors between passes"
    forth = [f"{size.row} columns of {spec.rows} real points{by}, at frequencies k - 1/4", between_passes]
    back = [between_passes, f"columns back{by}: the real part"]
    if size.radix > 1:
        forth.insert(1, order)
    number = f"complex fp16{' twice, high and low parts' if split else ''}"
    per = ROWS * COLS // size.row
    parts = (
        Data("u", f"{each} numbers", 2),
        Pass("largest", ("each sequence's largest number",), 2, 0),
        Pass("columns", tuple(forth), 2, between),
        Data("x", f"{each}, {number}", between),
        Pass("rows", (f"{spec.rows} rows{'' if per == 1 else f', {per} in a tile'}: {_transform(size.rows)}",
                      "times the filter's spectrum, whose rows come first; transformed back, in place"),
             between, between),
        Data("x", f"{each}, {number}", between),
        Pass("columns back", tuple(back), between, written),
        Data("y", f"{each} numbers", written))
    made = Passes(f"{title}, as {size.points} points in three passes", parts)
    notes.append(f"{made.bytes} bytes are moved a point, of the sequences; the filter takes the first passes too.")
    return Passes(made.title, parts, (*notes, *_split(split)))


def _transform(rows):
    matrices = f"{rows} x {rows} and 64 x 64" if rows != 64 else "64 x 64"
    return f"{64 * rows} points as {rows} x 64, by products with {matrices} matrices"


def _split(split):
    return ("Each operand of a product is the sum of two fp16 numbers, and a product three.",) if split else ()
