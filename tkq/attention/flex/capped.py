"""Scores under a softcap, cap * tanh(score / cap), made of Q @ K.T on the way to the exponentials."""
from typing import Any, NamedTuple, Optional

import cutlass
import cutlass.cute as cute
from cutlass import Boolean, Float32, Int32, Uint32

import tkq.tile as tk
from tkq.attention.flex.emit import LOG2E, Emitted, Scaled, select
from tkq.attention.flex.functions.graph import Graph
from tkq.attention.forward.softmax import RESCALE_THRESHOLD, largest_of_bits, of_three

# tanh(x) / x for |x| <= 1 is PLUS + BY / (SQUARE + x ** 2): a relative error of 1.5e-5
PLUS, BY, SQUARE = 0.16116185, 2.1128730, 2.5188534
SMALL, LARGE = 1e-9, 1e9  # factors of scores whose squares, and the numbers made of these, are far from float32's ends


class Softcap(NamedTuple):
    """Nodes of a graph that is cap * tanh(score * factor), or score / factor (``over``); no factor: of the score."""

    cap: int
    factor: Optional[int]
    over: bool


def softcap_of(graph: Graph) -> Optional[Softcap]:
    """None of another graph. Cap and factor are what all of a head's scores share."""
    nodes, depends = graph.nodes, graph.inputs_of()
    shared = lambda i: not depends[i] & {"score", "q", "kv"}
    is_score = lambda i: (nodes[i].op, nodes[i].args) == ("input", ("score",))
    last = nodes[-1]
    for cap, of in (last.args, last.args[::-1]) if last.op == "mul" else ():
        if nodes[of].op != "tanh" or not shared(cap):
            continue
        i = nodes[of].args[0]
        if is_score(i):
            return Softcap(cap, None, False)
        if nodes[i].op not in ("mul", "div"):
            continue
        for a, b in (nodes[i].args, nodes[i].args[::-1])[:2 if nodes[i].op == "mul" else 1]:
            if is_score(a) and shared(b):
                return Softcap(cap, b, nodes[i].op == "div")
    return None


class Numbers(NamedTuple):
    """Of a head: scores s of Q @ K.T become the exponents s * (plus + by / (square + s ** 2)), where these are of at
    most ``limit``: below 0 where the cap's numbers are none to compute with."""

    square: Any
    by: Any
    plus: Any
    limit: Any


class Exponents(NamedTuple):
    """What ``Numbers`` say, of a tile's scores. of: the exponent that a value in S stands for, in row r."""

    square: Any
    by: Any
    plus: Any

    def of(self, r, s):
        return s * self.factor(s)

    def factor(self, s):
        return cute.math.fma(cute.arch.rcp_approx(cute.math.fma(s, s, self.square)), self.by, self.plus)


class CappedScores:
    """Where no tanh of a warp's is of more than 1, as most scores are far below a softcap, it is a quotient of three
    numbers, which is made with the exponent itself: three instructions a score. Otherwise scores are made one by one as
    the graph says, and are their own exponents."""

    def __init__(self, graph: Graph):
        self.graph, self.nodes = graph, softcap_of(graph)

    def numbers(self, g, shared) -> Numbers:
        """shared: the inputs that all scores of a task share."""
        graph, (cap, factor, over) = Emitted(self.graph, g.score), self.nodes
        cap, by = graph.node_at(cap, **shared), g.score_scale
        if factor is not None:
            known = graph.node_at(factor, **shared)
            by = by * (cute.arch.rcp_approx(known) if over else known)
        size, exponent, inverse = cute.math.absf(by), cap * Float32(LOG2E), cute.arch.rcp_approx(by)
        plain = (cap * by > 0) & (size > SMALL) & (size < LARGE) & (cute.math.absf(cap) < LARGE)
        return Numbers(select(plain, Float32(SQUARE) * inverse * inverse, Float32(1.0)),
                       exponent * Float32(BY) * inverse, exponent * Float32(PLUS) * by,
                       select(plain, cute.math.absf(inverse), Float32(-1.0)))

    def ready(self, numbers: Numbers, inputs) -> Numbers:
        """Nothing is made of a tile before its scores are there."""
        return numbers

    @cute.jit
    def take(self, g, regs, numbers: cutlass.Constexpr, now, elements: cutlass.Constexpr):
        """now: of this tile ``by`` and ``plus``, and of either row what ``largest_of_bits`` says of its scores, and
        perhaps of some behind the keys. elements: of each score its place and the function's other inputs."""
        rows, now[0], now[1] = self.rows(regs), numbers.by, numbers.plus
        # Of bits without a sign negative numbers are the largest, and of these the lowest
        low = cutlass.max(*(of_three([v.bitcast(Uint32) for v in row]) for row in rows)).bitcast(Float32)
        now[2], now[3] = largest_of_bits(rows[0]), largest_of_bits(rows[1])
        top = cutlass.max(now[2].bitcast(Int32), now[3].bitcast(Int32)).bitcast(Float32)
        near = (top <= numbers.limit) & (cute.math.absf(low) <= numbers.limit)
        if not cute.arch.vote_all_sync(near):
            self.each(g, regs, elements)
            now[0], now[1] = Float32(0.0), Float32(1.0)
            self.tops(regs, now)

    def rows(self, regs):
        view = regs.s.rows_view
        return [[view[r, j] for j in range(regs.s.cols // 4)] for r in range(2)]

    def tops(self, regs, now):
        """Of the scores as they are, some of which the mask has hidden since."""
        for r, row in enumerate(self.rows(regs)):
            now[2 + r] = largest_of_bits(row)

    def each(self, g, regs, elements):
        view, graph = regs.s.rows_view, Emitted(self.graph, g.score)
        for at, inputs in elements:
            view[at] = graph.at(**inputs, score=(Scaled(view[at], g.score_scale), at)) * Float32(LOG2E)

    @staticmethod
    def exponents(numbers, now) -> Exponents:
        return Exponents(numbers.square, now[0], now[1])

    def shift(self, regs, exponents):
        """Max itself is what is subtracted."""

    def out_of_range(self, regs, exponents, now):
        """As ``Softmax.out_of_range``."""
        found = Boolean(False)
        for r in range(2):
            row_max = regs.max.tensor[r]
            found = found | (row_max < -RESCALE_THRESHOLD) | (exponents.of(r, now[2 + r]) - row_max > RESCALE_THRESHOLD)
        return cute.arch.vote_any_sync(found)

    def exponentials(self, regs, exponents):
        """As ``Softmax.exponentials``."""
        view = regs.s.rows_view
        for j in range(regs.s.cols // 4):
            for r in range(2):
                s = view[r, j]
                view[r, j] = cute.math.fma(s, exponents.factor(s), -regs.max.tensor[r])
        tk.exp2(regs.s, regs.s)
        tk.row_sum_partial(regs.norm, regs.s, regs.norm)
