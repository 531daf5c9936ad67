"""A block's roles and pipes: what ``pipeline`` draws, and which module describes which kernel."""
import collections
import itertools
from dataclasses import dataclass

from .drawing import COLOURS, LINE, Arrow, Box, Picture, Words, width_of

SIZE, GAP = 11, 8
MOST_DRAWN = 8  # stages


@dataclass(frozen=True)
class Role:
    """What some warps of a block do. warps: which, in words. registers: of each thread. steps: one after the other."""

    name: str
    warps: str
    registers: int
    steps: tuple


@dataclass(frozen=True)
class Pipe:
    """A ring of stages from one role to another, with a full and an empty semaphore for each stage.

    holds: what a stage has, in words. bytes: that arrive by themselves (TMA), 0 where threads write. full, empty: how
    many arrivals complete the semaphore; full_by, empty_by: whose. copies: how many
    consumers have such a ring each. source, target: the roles at its ends, where they are not the producer and the
    consumer.
    """

    name: str
    holds: str
    stages: int
    bytes: int
    empty: int
    empty_by: str
    full: int = 1
    full_by: str = "the producer"
    copies: int = 1
    source: str = ""
    target: str = ""


@dataclass(frozen=True)
class Pipeline(Picture):
    """What a block's roles are and how they wait for each other. producer, consumer: the two sides of a pipe that
    names none.

    others: pairs (arrivals, how many semaphores) of those that belong to no pipe. between: roles that take from one
    and give to another."""

    title: str
    producer: Role
    consumer: Role
    pipes: tuple
    notes: tuple = ()
    others: tuple = ()
    between: tuple = ()

    @property
    def roles(self) -> tuple:
        return self.producer, *self.between, self.consumer

    def ends(self, pipe) -> tuple:
        """The names of the roles on both sides of a pipe."""
        return pipe.source or self.producer.name, pipe.target or self.consumer.name

    def arrivals(self) -> dict:
        """{arrivals that complete a semaphore: how many such semaphores a block has}: what a kernel initialises."""
        found = collections.Counter()
        for arrivals, count in self.others:
            found[arrivals] += count
        for p in self.pipes:
            found[p.full] += p.stages * p.copies
            found[p.empty] += p.stages * p.copies
        return dict(found)

    def text(self) -> str:
        out = [self.title, ""]
        for role in self.roles:
            out.append(_heading(role))
            out += [f"    {step}" for step in role.steps]
        out.append("")
        for p in self.pipes:
            source, target = self.ends(p)
            left, right = f"{source} ", f" {target}"
            ring = "".join(f"[{p.name} {i}]" for i in range(p.stages))
            blank = " " * len(left)
            out += [f"{p.name}: {_size(p)}", f"{left}--> {ring} -->{right}", f"{blank}    full:  {_full(p)}",
                    f"{blank}<-- empty: {_empty(p)}", ""]
        return "\n".join(line.rstrip() for line in (*out, *self.notes)).rstrip()

    def shapes(self):
        line = SIZE * LINE
        side = max(width_of(name, SIZE) for p in self.pipes for name in self.ends(p)) + 2 * GAP
        inner = max(max(width_of(t, SIZE) for p in self.pipes for t in (_size(p), f"empty: {_empty(p)}")),
                    max(min(p.stages, MOST_DRAWN) * _stage(p) + width_of(f"full: {_full(p)}", SIZE) for p in self.pipes)
                    + 10 * GAP) + 4 * GAP
        middle, right = side + GAP, side + GAP + inner
        out, y = [Words(GAP, line, self.title, bold=True, size=SIZE + 2)], 2.5 * line
        at = {}  # how far down each pipe begins
        for i, p in enumerate(self.pipes):
            at[i] = y
            out += self._pipe(p, COLOURS[i % len(COLOURS)], middle, right, y, line)
            y += 6 * line
        for x, side_of in ((GAP, 0), (right, 1)):  # one box for pipes one below the other that have the same role there
            for name, those in itertools.groupby(at, lambda i: self.ends(self.pipes[i])[side_of]):  # noqa: B023
                those = list(those)
                top, height = at[those[0]], 6 * line * len(those) - line
                out.append(Box(x, top, side, height, "#f3f3f3"))
                out.append(Words(x + side / 2, top + height / 2, name, "middle", bold=True, size=SIZE))
        lines = []
        for role in self.roles:
            lines += [(_heading(role), True), *((f"  {step}", False) for step in role.steps)]
        for text, bold in (*lines, *((note, False) for note in self.notes)):
            out.append(Words(GAP, y, text, bold=bold, size=SIZE))
            y += line
        width = max(right + side, width_of(self.title, SIZE + 2), *(width_of(text, SIZE) for text, _ in lines),
                    *(width_of(n, SIZE) for n in self.notes))
        return width + 2 * GAP, y + GAP, out

    def _pipe(self, p, colour, left, right, y, line):
        """Its name, the way there through its stages, and the way back."""
        height, drawn, stage = 1.5 * line, min(p.stages, MOST_DRAWN), _stage(p)
        at = y + 1.2 * line + height / 2
        first = left + width_of(f"full: {_full(p)}", SIZE) + 6 * GAP
        out = [Words(left + 2 * GAP, y + line / 2, _size(p), size=SIZE, bold=True),
               Arrow(left, at, first, at), Words(left + 2 * GAP, at - line / 2, f"full: {_full(p)}", size=SIZE)]
        for i in range(drawn):
            label = ".." if i == drawn - 2 and p.stages > drawn else f"{p.name} {p.stages - 1 if i == drawn - 1 else i}"
            out.append(Box(first + i * stage, at - height / 2, stage, height, colour))
            out.append(Words(first + i * stage + stage / 2, at, label, "middle", size=SIZE))
        out.append(Arrow(first + drawn * stage, at, right, at))
        back = at + height / 2 + line
        words = Words(left + 2 * GAP, back - line / 2, f"empty: {_empty(p)}", size=SIZE)
        return [*out, Arrow(right, back, left, back), words]


def _stage(p: Pipe) -> float:
    """The width of a stage's box."""
    return width_of(f"{p.name} {p.stages}", SIZE) + 2 * GAP


def _heading(role: Role) -> str:
    return f"{role.name}: {role.warps}, {role.registers} registers a thread"


def _size(p: Pipe) -> str:
    stages = f"{p.stages} stage{'s' * (p.stages > 1)}"
    return f"{stages} of {p.holds}" + f", for each of {p.copies} consumers" * (p.copies > 1)


def _full(p: Pipe) -> str:
    return f"{p.full} arrival{'s' * (p.full > 1)} of {p.full_by}" + f", {p.bytes} bytes" * (p.bytes > 0)


def _empty(p: Pipe) -> str:
    return f"{p.empty} arrival{'s' * (p.empty > 1)}, {p.empty_by}"
