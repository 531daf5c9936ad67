"""Shared tiles: where an element lies in shared memory, and in which bank."""
import re
from dataclasses import dataclass
from typing import Any

from .grid import Cell, Grid, whole
from .layouts import offset, plain, traced

BANKS, BANK = 32, 4  # of 4 bytes each
CHUNK = 16  # bytes that a swizzle keeps together: what a thread's widest access, and a row of a core matrix, take
LINE = BANKS * BANK  # bytes: once all banks


@dataclass(frozen=True)
class Swizzle:
    """S<bits, base, shift>, which acts on addresses in bytes: ``bits`` bits, from bit ``base`` on, are flipped by those
    ``shift`` further up."""

    bits: int
    base: int
    shift: int

    def __call__(self, address: int) -> int:
        return address ^ ((address >> self.shift) & (((1 << self.bits) - 1) << self.base))


@dataclass(frozen=True)
class Addresses:
    """Where elements of a tile are, in bytes from its beginning. outer: (shape, stride), in elements."""

    shape: tuple
    stride: tuple
    swizzle: Swizzle
    size: int  # of an element, in bytes

    def plain(self, row: int, col: int) -> int:
        """As if nothing were swizzled."""
        parts = zip((row, col), self.shape, self.stride)
        return self.size * sum(offset(i, shape, stride) for i, shape, stride in parts)

    def __call__(self, row: int, col: int) -> int:
        return self.swizzle(self.plain(row, col))


@dataclass(frozen=True)
class TilePicture(Grid):
    """A ``Grid`` whose cells are units of 16 bytes, at their places. addresses: of all elements."""

    addresses: Any = None


def shared_tile(tile, lines: int = 8) -> TilePicture:
    """A picture of a shared tile: each line is 128 bytes of shared memory, which is all 32 banks; a cell is 16 bytes,
    with the row and the columns that it holds. Colours are columns: down a tile's column they go from bank to bank.

    Args:
        tile: a ``tkq.tile.st``, or a ``SharedTile`` of that type.
        lines: how many are drawn, from the beginning.
    Raises:
        TypeError: tile is neither; lines is no int.
        ValueError: lines is below 1.

    Example::

        print(viz.shared_tile(tkq.tile.st(64, 64)))
    """
    from ..tile import SharedTile, st

    whole("shared_tile: lines", lines)
    kind = tile.type if isinstance(tile, SharedTile) else tile
    if not isinstance(kind, st):
        raise TypeError(f"shared_tile: tile is {tile!r}, allowed are tkq.tile's st and SharedTile")
    at = traced(lambda: addresses_of(kind))
    per, lines = CHUNK // at.size, min(lines, kind.bytes // LINE)
    cells = {}
    for row in range(kind.rows):
        for col in range(0, kind.cols, per):
            line, place = divmod(at(row, col), LINE)
            if line < lines:
                cells[line, place // CHUNK] = Cell((f"r{row}", f"c{col}-{col + per - 1}"), col // per)
    width = kind.swizzle // at.size
    s = at.swizzle
    low = s.base + s.shift
    bits = f"bits {low} to {low + s.bits - 1}" if s.bits > 1 else f"bit {low}"
    notes = [f"{kind.bytes} bytes, swizzle of {kind.swizzle} bytes: which place a unit of 16 bytes takes is changed by "
             f"{bits} of its address, S<{s.bits},{s.base},{s.shift}>."]
    if kind.cols > width:
        notes.append(f"A row is longer than that: {kind.cols // width} panels of {width} columns, each of "
                     f"{kind.rows * kind.swizzle} bytes, one after the other.")
    swizzled, straight = ([f(row, 0) for row in range(8)] for f in (at, at.plain))
    notes.append(f"8 rows of 16 bytes, as wgmma and ldmatrix read them: {passes(swizzled)} pass"
                 f"{'es' * (passes(swizzled) > 1)} through the banks, {passes(straight)} without the swizzle.")
    return TilePicture(
        title=f"Shared tile of {kind}", columns=tuple(f"banks {b}-{b + 3}" for b in range(0, BANKS, CHUNK // BANK)),
        rows=tuple(f"byte {LINE * i}" for i in range(lines)), cells=cells, notes=tuple(notes), addresses=at)


def addresses_of(kind) -> Addresses:
    """Of a ``tkq.tile.st``. Inside a trace."""
    layout = kind.layout()
    bits, base, shift = map(int, re.search(r"S<(\d+),(\d+),(\d+)>", str(layout.inner)).groups())
    return Addresses(plain(layout.outer.shape), plain(layout.outer.stride), Swizzle(bits, base, shift),
                     kind.dtype.width // 8)


def passes(addresses) -> int:
    """How often the banks must be gone through for 8 accesses of 16 bytes: the most different words of one bank."""
    words = {}
    for address in addresses:
        for word in range(address // BANK, (address + CHUNK) // BANK):
            words.setdefault(word % BANKS, set()).add(word)
    return max(map(len, words.values()))
