"""What the user's functions make of a tile of transposed scores: logits, slopes, P, and what is seen."""
import math
from typing import Any, NamedTuple

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Uint32

import tkq.tile as tk
from tkq.attention.flex.backward.tanh import Tanh, sole_tanh
from tkq.attention.flex.emit import Emitted, select
from tkq.attention.flex.look import ALL, Look, all_seen, chosen

LARGEST = 3e38  # a score above it would make NaN of a row's -inf
ABSENT, MASKED = 0, 1  # states of a block; others are full
_FINITE = ("input", "const", "number", "cast", "where", "neg", "abs", "not", "add", "sub", "mul", "min", "max", "tanh",
           "erf", "and", "or", "xor", "shl", "shr", "lt", "le", "gt", "ge", "eq", "ne")


class Place(NamedTuple):
    """Of a tile of scores. t: its task; half: which 64 of the task's keys; head: of queries; tile: its number, None
    where nothing asks for it; emitted: of ``FlexScores.of_head``."""

    t: Any
    half: Any
    head: Any
    tile: Any
    emitted: Any = None


class FlexScores:
    """A tile's rows are keys, its columns queries.

    P of a key behind the last one is what the functions make of a score of 0, perhaps inf: of its dS, which the product
    of dQ takes, zeroes are made; rows of dK and dV behind the end are not written."""

    def __init__(self, graphs, config):
        """graphs: a ``FlexBackwardSpec``."""
        self.graphs, self.config, self.look_at = graphs, config, Look(graphs.mask, "q")
        self.safe = graphs.graph is None or finite(graphs.graph)
        tanh = None if graphs.joint is None else sole_tanh(graphs.joint)
        self.tanh = None if tanh is None else Tanh(graphs.graph, tanh)

    def of_head(self, g, t, head):
        """What the functions take of a head, made once: an ``Emitted``, or None."""
        if self.graphs.graph is None:
            return None
        emitted = Emitted(self.graphs.graph, g.score)
        emitted.prepare("q", "kv", "score", b=(t.batch_k, 0), h=(head, 0))
        return emitted

    def take_tanh(self, g, at, s):
        """Where scores count by one tanh alone, it takes the place of S."""
        if self.tanh is not None:
            self.tanh.replace(s, list(places(0, self.config.tile)), at.emitted, g.scale,
                              dict(b=(at.t.batch_k, 0), h=(at.head, 0)))

    def p_and_weights(self, g, at, s, to, lse, seen):
        """Of S, behind ``take_tanh``: to = (P as an operand, what takes P * d score: the number of a thread's element,
        fp32). seen: of ``look``, or None; lse: a vector along the queries."""
        p, keep = to
        logits, factor, slopes = self.functions_of(g, at)
        found = enumerate(places(0, self.config.tile))

        def element(x, lse):
            i, place = next(found)
            e = cute.math.exp2(cute.math.fma(logits(x, *place), factor, lse), fastmath=True)
            e = e if seen is None else chosen(seen, place[0], place[1], e, 0.0)
            weight = e * slopes(x, *place)
            keep(i, weight if self.safe else select(e == Float32(0.0), Float32(0.0), weight))
            return e

        tk.apply_narrow(p, element, s, lse)

    def ds_of_weight(self, weight, dp, delta):
        """Of an element."""
        ds = weight * (dp + delta)
        return ds if self.safe else select(weight == Float32(0.0), Float32(0.0), ds)

    def p_fp32(self, g, at, s, p, lse, seen=None):
        """Of S, without a slope. seen: of ``look``; None: all."""
        logits, factor, _ = self.functions_of(g, at)
        for i, place in enumerate(places(0, self.config.tile)):
            x = cute.math.fma(logits(s.tensor[i], *place), factor, lse.tensor[place[1]])
            e = cute.math.exp2(x, fastmath=True)
            p.tensor[i] = e if seen is None else chosen(seen, place[0], place[1], e, 0.0)

    def functions_of(self, g, at):
        """(score, the factor that makes a logit in base 2 of it, its slope or None): functions of (a product of q and
        k, r, j, column)."""
        of, shared = self.graphs, dict(b=(at.t.batch_k, 0), h=(at.head, 0))
        if at.emitted is None:
            return lambda x, *_: x, g.scores.outer, None
        places, emitted = self.places(at), at.emitted.again()

        def inputs(x, r, j, col):
            found = {**places(r, col), "score": (x * g.scale, (r, col))}
            if self.tanh is not None:  # x is that
                emitted.know(self.tanh.node, x, **found)
            return found

        at_most = lambda x: x if self.safe else select(x < Float32(LARGEST), x, Float32(LARGEST))
        value = len(of.graph.nodes) - 1 if of.joint is None else of.joint.value
        factor = Float32(1.0)
        if self.safe:
            value, factor = emitted.without_factor(value, **shared)
        return (lambda *place: at_most(emitted.node_at(value, **inputs(*place))), Float32(tk.LOG2E) * factor,
                None if of.joint is None else lambda *place: emitted.node_at(of.joint.slope, **inputs(*place)))

    def look(self, g, at):
        """Two words: which of a tile's queries the thread's keys are seen by."""
        seen = cute.make_rmem_tensor((2,), Uint32)
        if self.graphs.mask is None:
            all_seen(seen)
        else:
            places = self.places(at)(0, 0)
            self.look_at.look(g.mask, {name: places[name] for name in ("b", "h")}, (places["kv"][0], places["q"][0]),
                              self.config.tile, seen)
        if self.graphs.states:
            state = g.states[at.t.batch_k, at.head, g.row_block(at.tile), 2 * at.t.block + at.half]
            for r in range(2):
                seen[r] = select(state == ABSENT, Uint32(0), select(state == MASKED, seen[r], Uint32(ALL)))
        return seen

    def places(self, at):
        """(row, column of a thread's) -> inputs of the graphs."""
        key = self.first_key(at.t, at.half) + tk.first_row()
        query = None if at.tile is None else at.tile * self.config.tile + tk.first_col()
        return lambda r, col: dict(b=(at.t.batch_k, 0), h=(at.head, 0), q=(query, col), kv=(key, 8 * r))

    def first_key(self, t, half):
        return t.block * self.config.block + half * 64

    @cute.jit
    def clear_dead_keys(self, t, half, ds):
        """In shared memory, by the warp that has written them."""
        alive = t.rows_k - self.first_key(t, half)
        if alive < 64:
            cute.arch.sync_warp()
            first = tk.warp_id() % 4 * 16
            for row in cutlass.range(cutlass.max(alive, first), first + 16, unroll=1):
                for part in cutlass.range_constexpr(self.config.tile // 32):
                    ds.tensor[row, tk.lane_id() + 32 * part] = ds.type.dtype(0.0)


def places(first, columns):
    """(r, j, column) of a thread's elements, in the tile's order, from a column on: the column beside the thread's
    first, j its number."""
    for i in range(columns // 2):
        j = first // 4 + i // 4 * 2 + i % 2
        yield i // 2 % 2, j, 8 * (j // 2) + j % 2


def finite(graph) -> bool:
    """Does a graph make numbers of all numbers, whatever the indices? Else a query behind the last one may have NaN or
    inf, of which exp2(.. - inf) would not be 0, and a score that is not seen a slope that times 0 is not 0."""
    depends = graph.inputs_of()
    divides = lambda node: node.op == "div" and not depends[node.args[1]] & {"q", "kv", "score"}
    number = lambda node: node.op != "const" or math.isfinite(node.args[0])
    return all((node.op in _FINITE or divides(node)) and number(node) for node in graph.nodes)
