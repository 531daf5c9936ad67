"""Scores that are Q @ K.T, scaled, and a bias that grows evenly with the key, as ALiBi's does."""
from typing import Any, NamedTuple, Optional

import cutlass
import cutlass.cute as cute
from cutlass import Boolean, Float32
from cutlass.cutlass_dsl import T, dsl_user_op

import tkq.tile as tk
from tkq.attention.flex.emit import LOG2E, Emitted
from tkq.attention.flex.functions.graph import Graph
from tkq.attention.forward.softmax import RESCALE_THRESHOLD, largest_of_bits
from tkq.tile.assembly import ptx


def slopes_of(graph: Graph) -> Optional[tuple]:
    """Of a sum of the score, of what does not depend on keys, and of products of a number that a head's scores share
    by an index or the distance of two: (the shared factor's node, how much the term grows with a key by it) of each
    product. None of another graph, or where there is no product."""
    nodes, depends, affine, found, scores = graph.nodes, graph.inputs_of(), graph.affine(), [], []
    stack = [(len(nodes) - 1, 1)]
    while stack:
        i, sign = stack.pop()
        node = nodes[i]
        if node.type == "f32" and node.op in ("add", "sub") and {"score", "kv"} & depends[i]:
            stack += [(node.args[0], sign), (node.args[1], sign if node.op == "add" else -sign)]
        elif (node.op, node.args) == ("input", ("score",)):
            scores.append(sign)
        elif not {"score", "kv"} & depends[i]:
            continue
        else:
            for a, b in (node.args, node.args[::-1]) if node.op == "mul" else ():
                if not {"score", "q", "kv"} & depends[a] and affine[b] is not None:
                    found.append((a, sign * affine[b][1]))
                    break
            else:
                return None
    return tuple(found) if scores == [1] and found else None


class Slope(NamedTuple):
    """Of a head. columns: the bias of each of a thread's columns beyond a tile's first one's, in registers. graph: what
    is made of the head."""

    columns: Any
    graph: Emitted


class LinearScores:
    """What grows from column to column is the same in all tiles, and is added to Q @ K.T by the instruction that
    scales it; what a row has besides is subtracted with its maximum."""

    def __init__(self, graph: Graph, columns: int):
        """columns: of a thread, in a row."""
        self.graph, self.slopes, self.columns = graph, slopes_of(graph), columns

    def numbers(self, g, shared) -> Slope:
        """shared: the inputs that all scores of a task share."""
        graph, step = Emitted(self.graph, g.score), Float32(0.0)
        graph.prepare("score", "q", "kv", **shared)
        for node, times in self.slopes:
            step = step + graph.node_at(node, **shared) * Float32(times)
        first = Float32(tk.first_col())
        return Slope([_kept(step * (first + Float32(8 * (j // 2) + j % 2))) for j in range(self.columns)], graph)

    def ready(self, numbers: Slope, inputs) -> tuple:
        """(numbers, either row's bias at the tile's first column: the same in all threads that share the row, as its
        maximum has to be). inputs: of a row and a column."""
        graph, found = numbers.graph.again(), []
        for r in range(2):
            given = inputs(r, 0)
            first = given["kv"][0] - tk.first_col()
            found.append(graph.at(**{**given, "kv": (first, 0), "score": (Float32(0.0), (r, 0))}) * Float32(LOG2E))
        return numbers, found

    def take(self, g, regs, ready, now, elements: cutlass.Constexpr):
        """S becomes what grows from column to column."""
        columns, view = ready[0].columns, regs.s.rows_view
        for (r, j), _ in elements:
            view[r, j] = cute.math.fma(view[r, j], g.score_scale, columns[j])

    @staticmethod
    def exponents(ready, now):
        return Biased(ready[1])

    def tops(self, regs, now):
        """Nothing is kept of them."""

    def shift(self, regs, exponents):
        """What is added to exponents, whenever max has moved: not first thing behind the branch where it may, or the
        wait for P @ V comes before all of them."""
        for r in range(2):
            regs.shift.tensor[r] = exponents.bias[r] - regs.max.tensor[r]

    def out_of_range(self, regs, exponents, now):
        """Is an exponent beyond `RESCALE_THRESHOLD`? The largest of bits is the largest score, or none is positive.
        Unlike in ``Softmax.out_of_range`` a maximum far below zero stays where it is."""
        found, view = Boolean(False), regs.s.rows_view
        self.shift(regs, exponents)
        for r in range(2):
            top = cute.arch.fmax(largest_of_bits([view[r, j] for j in range(regs.s.cols // 4)]), Float32(0.0))
            found = found | (cute.math.fma(top, Float32(LOG2E), regs.shift.tensor[r]) > RESCALE_THRESHOLD)
        return cute.arch.vote_any_sync(found)

    def exponentials(self, regs, exponents):
        """As ``Softmax.exponentials``."""
        view = regs.s.rows_view
        for j in range(regs.s.cols // 4):
            for r in range(2):
                view[r, j] = cute.math.fma(view[r, j], Float32(LOG2E), regs.shift.tensor[r])
        tk.exp2(regs.s, regs.s)
        tk.row_sum_partial(regs.norm, regs.s, regs.norm)


class Biased(NamedTuple):
    """of: the exponent that a value in S stands for, in row r."""

    bias: Any

    def of(self, r, s):
        return cute.math.fma(s, Float32(LOG2E), self.bias[r])


@dsl_user_op
def _kept(x, *, loc=None, ip=None):
    """x, of which the compiler knows nothing: what it sees how to make it makes anew in each tile."""
    return Float32(ptx([Float32(x)], "mov.b32 $0, $1;", "=f,f", loc, ip, T.f32()))
