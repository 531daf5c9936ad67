"""Tasks of two parts: the part that arrives last adds the other one's result to its own, which it has in registers."""
import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32, Int64, const_expr
from cutlass.cutlass_dsl import T, dsl_user_op

import tkq.tile as tk
from tkq.attention.decode import words
from tkq.attention.decode.plan import ROWS
from tkq.attention.decode.walk import Walk
from tkq.attention.mla.spec import HEAD_DIM_V
from tkq.attention.mla.tiles import place_in_slot
from tkq.tile.assembly import ptx

INF = Float32.inf
PAIR = 2  # splits
ARRIVED, BOTH = 6, 2 * tk.WARPGROUP  # a barrier of both halves of the values
TOGETHER = 4  # times 16 bytes that a thread has on their way: the sums leave no more registers


class Pairs:
    """Both parts write their results, and a bit of the task's counter says whether one of them has. The sum of the two,
    in the order of the keys, has the same bits whichever is last: what the other one wrote is what it would have had
    in registers."""

    def __init__(self, spec, config):
        self.config, self.walk = config, Walk(spec)

    def places(self, g, row, columns, column):
        """Of a thread's columns, from ``column`` on, of a row of all slots: where some of them lie beside each other,
        and which they are. See MlaConfig, packed: columns 8 j and on, and 8 (j + 1)."""
        at = g.partial.iterator + (row * HEAD_DIM_V + column)
        each = 4 if self.config.packed else 2
        return [(cute.make_tensor((at + (8 * j + tk.first_col() * (each // 2))).align(4 * each),
                                  cute.make_layout(each)), range(2 * j, 2 * j + each))
                for j in range(0, columns // 8, each // 2)]

    @cute.jit
    def last(self, g, smem, s, leads: cutlass.Constexpr[bool]):
        """Has the other part been here? Then it is seen, and the bit is 0 again. Blocks that go together, up to 16,
        have bits of their own. leads: a thread of this half asks."""
        ticket = smem.ticket
        tk.sync(ARRIVED, BOTH)
        if const_expr(leads):
            if tk.thread_in_warpgroup() == 0:
                task, bit = s.batch * g.tiles + s.tile // g.together, Int32(1) << cute.arch.block_idx()[1]
                counter = g.plan.iterator.toint() + Int64(words.counters(g.batch) + task) * 4
                ticket[0, 0] = change_bit(counter, bit) & bit
        tk.sync(ARRIVED, BOTH)
        return ticket[0, 0] != 0

    def first(self, g, s):
        """Is this the first split of the task? By its slot: see `decode.walk`."""
        if self.walk.fixed:
            return s.slot % self.walk.most_splits(g) == 0
        return s.slot % 2 == 1

    def other(self, g, s):
        """Of the other part's rows in its slot: the first one, among all rows of all slots, and how many there are."""
        begin, rows = place_in_slot(g, cutlass.select_(self.first(g, s), s.slot + 1, s.slot - 1))
        return begin, cutlass.min(rows, g.queries * g.group - s.tile * ROWS)

    @cute.jit
    def weigh(self, g, lse, weights, s):
        """Weights of this part's rows and of the other's, which sum up to 1; lse: of this part, then of both. The same
        numbers whichever of the two asks."""
        mine, others = weights
        begin, here = self.other(g, s)
        for r in cutlass.range_constexpr(2):
            row, other = tk.first_row() + 8 * r, Float32(-INF)
            if row < here:
                other = cute.make_tensor(g.partial_lse.iterator + (begin + row), cute.make_layout(1))[0]
            top = cute.arch.fmax(lse.tensor[r], other)
            base = cutlass.select_(top == -INF, Float32(0.0), top)
            a, b = (cute.math.exp2(x - base, fastmath=True) for x in (lse.tensor[r], other))
            nothing = a + b == Float32(0.0)
            inverse = cutlass.select_(nothing, Float32(0.0), cute.arch.rcp_approx(a + b))
            mine.tensor[r], others.tensor[r] = a * inverse, b * inverse
            lse.tensor[r] = cutlass.select_(nothing, Float32(-INF), base + cute.math.log2(a + b, fastmath=True))

    @cute.jit
    def add(self, g, o, weights, s, column: cutlass.Constexpr[int]):
        """Of this part's columns from ``column`` on, as it has written them, and the other's: the weighted sum."""
        begin, here = self.other(g, s)
        first, view = self.first(g, s), o.rows_view
        for r in cutlass.range_constexpr(2):
            row = tk.first_row() + 8 * r
            if row < here:
                self.row(view, r, self.places(g, begin + row, o.cols, column), (first, *weights))

    def row(self, view, r, places, how):
        """Some loads, then the sums, the first part's columns first."""
        first, mine, others = how
        before, behind = ordered(first, mine.tensor[r], others.tensor[r])
        for n in range(0, len(places), TOGETHER):
            found = []
            for place, columns in places[n:n + TOGETHER]:
                some = cute.make_rmem_tensor((len(columns),), Float32)
                cute.autovec_copy(place, some)
                found.append((some, columns))
            for some, columns in found:
                for e, j in enumerate(columns):
                    a, b = ordered(first, view[r, j], some[e])
                    view[r, j] = cute.math.fma(behind, b, before * a)


def ordered(first, mine, other):
    """Mine and the other one, or the other way round."""
    return cutlass.select_(first, mine, other), cutlass.select_(first, other, mine)


@dsl_user_op
def change_bit(counter, bit, *, loc=None, ip=None):
    """The word as it was, in which the bit is another one now. Releases what this thread wrote, and what it has seen of
    its block's; sees what was released."""
    return Int32(ptx([Int64(counter), Int32(bit)], "atom.acq_rel.gpu.global.xor.b32 $0, [$1], $2;", "=r,l,r", loc, ip,
                     T.i32()))
