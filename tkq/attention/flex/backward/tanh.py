"""A softcap's tanh, in the place of the scores while the tensor cores make dP: P and its slope are made of it."""
import cutlass.cute as cute
from cutlass import Float32

from tkq.attention.flex.capped import BY, PLUS, SQUARE
from tkq.attention.flex.emit import Scaled


def sole_tanh(joint):
    """The node by which alone a score function and its slope depend on the score: one tanh, of the score and of what
    all scores share. None where they depend on it otherwise."""
    graph, by_score = joint.graph, set()
    depends = graph.inputs_of()
    found = [i for i, node in enumerate(graph.nodes) if node.op == "tanh" and "score" in depends[i]]
    if len(found) != 1 or {"q", "kv"} & depends[found[0]]:
        return None
    for i, node in enumerate(graph.nodes):
        if i != found[0] and (node.args == ("score",) or by_score & {*graph.operands(i)}):
            by_score.add(i)
    return None if {joint.value, joint.slope} & by_score else found[0]


class Tanh:
    """Of a tile of scores. node: of ``sole_tanh``."""

    def __init__(self, graph, node):
        self.graph, self.node = graph, node
        self.argument, = graph.operands(node)

    @cute.jit
    def replace(self, s, places, emitted, scale, shared):
        """S becomes tanh of what the function makes of scale * S. Where none of a warp's is of more than 1, as most
        scores are far below a softcap, it is a quotient. places: of the tile's elements, (r, j, column); shared: inputs
        that all have in common."""
        if self.arguments(s, places, emitted, scale, shared):
            self.near(s)
        else:
            self.of_each(s, places, emitted, shared)

    def arguments(self, s, places, emitted, scale, shared):
        """In the place of S. Is none of a warp's beyond 1?"""
        top, of = [Float32(0.0) for _ in range(4)], emitted.again()
        for i, (r, _, column) in enumerate(places):
            x = of.node_at(self.argument, score=(Scaled(s.tensor[i], scale), (r, column)), **shared)
            top[i % 4], s.tensor[i] = cute.arch.fmax(top[i % 4], cute.math.absf(x)), x
        top = cute.arch.fmax(cute.arch.fmax(top[0], top[1]), cute.arch.fmax(top[2], top[3]))
        return cute.arch.vote_all_sync(top <= Float32(1.0))

    def near(self, s):
        for i in range(cute.size(s.tensor)):
            s.tensor[i] = near_tanh(s.tensor[i])

    def of_each(self, s, places, emitted, shared):
        of = emitted.again()
        for i, (r, _, column) in enumerate(places):
            inputs = {**shared, "score": (None, (r, column))}
            of.know(self.argument, s.tensor[i], **inputs)
            s.tensor[i] = of.node_at(self.node, **inputs)


def near_tanh(x):
    """Of a number from -1 to 1: see ``capped``."""
    inverse = cute.arch.rcp_approx(cute.math.fma(x, x, Float32(SQUARE)))
    return x * cute.math.fma(inverse, Float32(BY), Float32(PLUS))
