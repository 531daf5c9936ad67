"""Which scores of a tile a mask lets through, as bits: before the scores are there, so that few registers are used."""
import cutlass
import cutlass.cute as cute
from cutlass import Constexpr, Float32, Uint32

from tkq.attention.flex.emit import Emitted, select

COLUMNS = 8  # of a thread's, that the mask is evaluated for at a time
ALL = 0xffffffff


class Look:
    """A mask's graph, on tiles of scores. along: what columns are, "kv", or of transposed scores "q"."""

    def __init__(self, graph, along: str):
        self.graph, self.along, self.across = graph, along, "q" if along == "kv" else "kv"

    def look(self, captured, of, place, width, seen):
        """seen: two words, a bit for each of the thread's columns in each of its two rows. of: inputs that all share;
        place: (first row, first column) of the thread; width: columns of the tile."""
        graph, (row, col) = Emitted(self.graph, captured), place
        across = lambda r: {self.across: (row, 8 * r)}
        for r in range(2):
            seen[r] = Uint32(0)
            graph.prepare(self.along, **of, **across(r))

        def look_at(part):
            first = col + 32 * part
            for r in range(2):
                bits = Uint32(0)
                for j in range(COLUMNS):
                    at = first, 8 * (j // 2) + j % 2
                    value = graph.at(**of, **across(r), **{self.along: at})
                    bits = bits | select(value, Uint32(1 << j), Uint32(0))
                seen[r] = seen[r] | (bits << Uint32(COLUMNS * part))

        self.each_part(width // (4 * COLUMNS), look_at)

    @cute.jit
    def each_part(self, n: Constexpr[int], look_at: Constexpr):
        for part in cutlass.range(n, unroll=1):
            look_at(part)


def all_seen(seen):
    """Every bit."""
    for r in range(2):
        seen[r] = Uint32(ALL)


def chosen(seen, r, j, value, otherwise):
    """value, where the score in row r and column j of the thread is seen."""
    return select((seen[r] & Uint32(1 << j)) != Uint32(0), value, Float32(otherwise))
