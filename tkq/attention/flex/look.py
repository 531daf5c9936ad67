"""Which scores of a tile a mask lets through, as bits: before the scores are there, so that few registers are used."""
import cutlass
import cutlass.cute as cute
from cutlass import Constexpr, Float32, Int32, Int64, Uint32

import tkq.tile as tk
from tkq.attention.flex.emit import Emitted, from_lane, select
from tkq.attention.flex.words import COLUMNS, ELEMENTS, EQUAL, LIMITS, ROWS, sides_of, words

STEP = 8  # of a thread's columns, that elements are evaluated for at a time
ALL = 0xffffffff
FAR = 128  # a limit behind all columns
OWN = (0, 1, 8, 9)  # columns past its first that a lane evaluates for others: four lanes have 16, side by side
_OF_WORDS = {"and": lambda a, b: a & b, "or": lambda a, b: a | b, "xor": lambda a, b: a ^ b, "ne": lambda a, b: a ^ b,
             "eq": lambda a, b: ~(a ^ b), "not": lambda a: ~a, "where": lambda c, a, b: (c & a) | (~c & b)}
_BACKWARDS = {"lt": "gt", "gt": "lt", "le": "ge", "ge": "le", "eq": "eq", "ne": "ne"}


class Look:
    """A mask's graph, on tiles of scores. along: what columns are, "kv", or of transposed scores "q"."""

    def __init__(self, graph, along: str):
        self.graph, self.along, self.across = graph, along, "q" if along == "kv" else "kv"
        self.words = None if graph is None else words(graph, along)

    def of_rows(self, captured, of, row):
        """What a mask loads of rows, for all tiles of these: an ``Emitted`` for ``look``, or None where it loads
        nothing of them. of, row: as there."""
        depends = () if self.graph is None else self.graph.inputs_of()
        if not any(self.graph.nodes[i].op == "load" and self.along not in names for i, names in enumerate(depends)):
            return None
        graph = Emitted(self.graph, captured)
        for r in range(2):
            graph.prepare(self.along, **of, **{self.across: (row, 8 * r)})
        return graph

    def look(self, captured, of, place, width, seen, rows=None):
        """seen: two words, a bit for each of the thread's columns in each of its two rows. of: inputs that all share;
        place: (first row, first column) of the thread; width: columns of the tile; rows: of ``of_rows``. A whole
        warp."""
        (row, col), graph = place, Emitted(self.graph, captured) if rows is None else rows.again()
        inputs = [{**of, self.across: (row, 8 * r), self.along: (col, 0)} for r in range(2)]
        made, elements = {}, [i for i, how in self.words.of.items() if how == ELEMENTS]
        lane = {**of, self.along: (col + 16 * (tk.lane_id() // 4), 0)}
        for i, how in self.words.of.items():
            if how == COLUMNS:
                made[i] = (self.word_of(self.values_of_columns(i, captured, lane)),) * 2
            if how == EQUAL:
                made[i] = self.words_of_equal(i, graph, captured, (inputs, lane))
        if elements:
            each = self.each_word(elements, captured, (inputs, lane), width)
            made.update((i, (each[2 * n], each[2 * n + 1])) for n, i in enumerate(elements))
        for i in self.words.of:  # each behind those that it takes
            if i not in made:
                made[i] = tuple(self.word(i, graph, inputs[r], [made.get(a, (None,) * 2)[r]
                                                                for a in self.graph.operands(i)]) for r in range(2))
        for r in range(2):
            seen[r] = made[len(self.graph.nodes) - 1][r]

    def word(self, i, graph, inputs, operands):
        """Of a row. operands: words."""
        how, node = self.words.of[i], self.graph.nodes[i]
        if how == ROWS:
            return select(graph.node_at(i, **inputs), Uint32(ALL), Uint32(0))
        if how == LIMITS:
            steps, values = (self.words.steps[a] for a in node.args), [graph.node_at(a, **inputs) for a in node.args]
            whole = all(self.graph.nodes[a].op == "input" for a in node.args)
            return _compared(node.op, steps, values, whole)
        return _OF_WORDS[node.op](*operands)

    def word_of(self, bools):
        """Each lane has looked at 4 of a row's columns, for the 8 lanes that have them."""
        word = Uint32(0)
        for n, value in enumerate(bools):
            word = word | select(value, Uint32(1 << n), Uint32(0))
        word = word << Uint32(tk.lane_id() // 4 * 4)
        for offset in (4, 8, 16):
            word = word | Uint32(cute.arch.shuffle_sync_bfly(word, offset=offset))
        return word

    def words_of_equal(self, i, graph, captured, of):
        """Of an integer of each row, and those of columns. of: (inputs of the rows, of the lane)."""
        (inputs, lane), (row, column) = of, sides_of(self.graph, i, self.along)
        columns = self.values_of_columns(column, captured, lane)
        rows = [graph.node_at(row, **inputs[r]) for r in range(2)]
        found, left = cute.make_rmem_tensor((2,), Uint32), cute.make_rmem_tensor((1,), Int32)
        found[0], found[1], left[0] = Uint32(0), Uint32(0), Int32(3)  # a bit for each row that has no word yet

        def look_for(lanes):
            first = cute.arch.popc((lanes & -lanes) - Int32(1))
            value = from_lane(select((left[0] & Int32(1)) != Int32(0), rows[0], rows[1]), first)
            word = self.word_of([x == value for x in columns])
            for r in range(2):
                here = rows[r] == value
                found[r] = select(here, word, found[r])
                left[0] = select(here, left[0] & Int32(2 - r), left[0])

        self.each_number(left, look_for)
        return tuple(found[r] if self.graph.nodes[i].op == "eq" else ~found[r] for r in range(2))

    @cute.jit
    def each_number(self, left, look_for: Constexpr):
        """While there are lanes with rows left, with these lanes."""
        lanes = cute.arch.vote_ballot_sync(left[0] != 0)
        while lanes != 0:
            look_for(lanes)
            lanes = cute.arch.vote_ballot_sync(left[0] != 0)

    def values_of_columns(self, i, captured, lane):
        graph, (first, _) = Emitted(self.graph, captured), lane[self.along]
        return [graph.node_at(i, **{**lane, self.along: (first, column)}) for column in OWN]

    def each_word(self, elements, captured, of, width):
        """Of elements one by one: for each node a word for either row. of: (inputs of the rows, of the lane)."""
        (inputs, lane), graph = of, Emitted(self.graph, captured)
        shared = {i: self.values_of_columns(i, captured, lane) for i in self.words.shared}
        found, col = cute.make_rmem_tensor((2 * len(elements),), Uint32), inputs[0][self.along][0]
        for n in range(2 * len(elements)):
            found[n] = Uint32(0)
        for r in range(2):
            graph.prepare(self.along, **{name: x for name, x in inputs[r].items() if name != self.along})

        def look_at(part):
            inside, bits = Emitted(self.graph, captured), [Uint32(0) for _ in range(2 * len(elements))]
            inside.made.update(graph.made)
            for j in range(STEP):
                column = col + 32 * part, 8 * (j // 2) + j % 2
                for i, values in shared.items():
                    value = from_lane(values[j // 2 % 2 * 2 + j % 2], 8 * part + 4 * (j // 4) + tk.lane_id() % 4)
                    inside.know(i, value, **{**inputs[0], self.along: column})
                for n in range(2 * len(elements)):
                    value = inside.node_at(elements[n // 2], **{**inputs[n % 2], self.along: column})
                    bits[n] = bits[n] | select(value, Uint32(1 << j), Uint32(0))
            for n, word in enumerate(bits):
                found[n] = found[n] | (word << Uint32(STEP * part))

        self.each_part(width // (4 * STEP), look_at)
        return found

    @cute.jit
    def each_part(self, n: Constexpr[int], look_at: Constexpr):
        for part in cutlass.range(n, unroll=1):
            look_at(part)


def _compared(op, steps, values, indices):
    """Where a + step * x is less than, .. b + other * x, x a column past the thread's first; steps that are 1 apart.
    indices: are both indices, whose distance an int32 holds?"""
    (step, other), (a, b) = steps, values
    if step < other:
        op, a, b = _BACKWARDS[op], b, a  # with the sides changed, the first one grows faster
    limit = b - a if indices else _distance(a, b)
    if op in ("lt", "ge"):
        below = _below(limit)
        return below if op == "lt" else ~below
    past = _below(limit + type(limit)(1))
    if op in ("le", "gt"):
        return past if op == "le" else ~past
    equal = past & ~_below(limit)
    return equal if op == "eq" else ~equal


def _distance(a, b):
    """b - a as int64. That of two int64 may be longer: -1 stands for what is below 0, FAR for what is above it."""
    found = Int64(b) - Int64(a)
    if type(a) is not Int64:
        return found
    near = select(found < Int64(0), Int64(FAR), cutlass.min(found, Int64(FAR)))
    return select(b < a, Int64(-1), near)


def _below(limit):
    """A bit for each of the thread's columns, which are 0 1 8 9 .. past its first: is it below?"""
    kind = type(limit)
    limit = Int32(cutlass.max(cutlass.min(limit, kind(FAR)), kind(0)))
    pairs = Uint32(limit >> 3)
    return ~((Uint32(ALL) << pairs) << (pairs + Uint32(cutlass.min(limit & 7, 2))))


def all_seen(seen):
    """Every bit."""
    for r in range(2):
        seen[r] = Uint32(ALL)


def chosen(seen, r, j, value, otherwise):
    """value, where the score in row r and column j of the thread is seen."""
    return select((seen[r] & Uint32(1 << j)) != Uint32(0), value, Float32(otherwise))
