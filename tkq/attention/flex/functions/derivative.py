"""The derivative of a score function by the score: a graph made of its graph. Pure Python."""
from __future__ import annotations

import functools
import math
from dataclasses import dataclass

from tkq.attention.flex.functions.graph import COMPARISONS, Builder, Graph, operands_of

OP = "flex_attention"
_FLAT = ("floor", "ceil", "round", "trunc", "floordiv", "truncdiv", "and", "or", "xor", "shl", "shr", "not")


@functools.lru_cache(1024)
def derivative(graph: Graph) -> tuple:
    """(a graph or a number, the slots of the tensors that it takes, those of the numbers): slots of ``graph``.

    Raises:
        NotImplementedError: an operation that has no derivative here, by name.
    """
    return Derivative(graph).run()


def changed(graph: Graph, with_these) -> list:
    """Of each node: may its value change with nodes of which ``with_these`` is true?"""
    found = []
    for i, node in enumerate(graph.nodes):
        may = node.type == "f32" and node.op not in COMPARISONS and not graph.is_detached(i)
        found.append(with_these[i] or (may and any(found[a] for a in graph.operands(i))))
    return found


@dataclass(frozen=True)
class Joint:
    """A score function and its derivative in one graph, where each can take what the other has made. value, slope:
    their nodes."""

    graph: Graph
    value: int
    slope: int


@functools.lru_cache(1024)
def joint(graph: Graph) -> tuple:
    """(``Joint``, the slots of tensors, those of numbers); raises as ``derivative``."""
    of = Derivative(graph)
    slope = of.slope_node()
    found, tensors, numbers, nodes = of.build.finish_all((of.value[-1], of.number(0.0) if slope is None else slope))
    return Joint(found, *nodes), tensors, numbers


class Derivative:
    """Backwards through a graph, as autograd goes. What a branch does not take is left out of what it is multiplied by,
    before or behind, which may be infinite there."""

    def __init__(self, graph):
        self.graph, self.build, self._shared = graph, Builder(), []
        self.value = self.build.include(graph)

    def slope_node(self):
        """By the score: a node, None for 0."""
        scores = [node.op == "input" and node.args[0] == "score" for node in self.graph.nodes]
        adjoint = self.adjoints(changed(self.graph, scores))
        found = None
        for i in sorted(adjoint):
            found = self.add(found, adjoint[i]) if scores[i] else found
        return found

    def adjoints(self, needs) -> dict:
        """Of the graph's nodes, where ``needs`` says so: by each of them, a node."""
        found = {len(self.graph.nodes) - 1: self.number(1.0)} if needs[-1] else {}
        for i in reversed(range(len(self.graph.nodes))):
            node = self.graph.nodes[i]
            if i not in found or node.op in ("input", "load"):
                continue
            for k, a in enumerate(node.args):
                if needs[a]:
                    one = self.of(node, [found[i] if j == k else None for j in range(len(node.args))])
                    if one is not None:
                        found[a] = self.add(found.get(a), one)
        return found

    def run(self):
        found = self.slope_node()
        if found is None:
            return 0.0, (), ()
        known = self.build.value(found)
        return (known, (), ()) if known is not None else self.build.finish(found)

    def number(self, x):
        return self.build.const(x, "f32")

    def mul(self, a, b):
        """Of nodes, None for 0."""
        if a is None or b is None:
            return None
        x, y = self.build.value(a), self.build.value(b)
        if x is not None and y is not None:
            return self.number(x * y)
        for branch, factor in ((a, b), (b, a)):
            found = self.inside(branch, lambda i, factor=factor: self.mul(i, factor))
            if found is not None:
                return found
        for factor, other in ((a, b), (b, a)):  # factors that all scores share come together
            node = self.build.nodes[other]
            if self.shared(factor) and node.op == "mul" and not self.shared(other):
                for i in range(2):
                    if self.shared(node.args[i]):
                        return self.mul(self.mul(factor, node.args[i]), node.args[1 - i])
        return self.build.binary("mul", a, b)

    def shared(self, i):
        """Is a node the same for all scores?"""
        for j in range(len(self._shared), i + 1):
            node = self.build.nodes[j]
            own = node.op in ("const", "number") or (node.op == "input" and node.args[0] in ("b", "h"))
            below = operands_of(node)
            self._shared.append(own or (bool(below) and all(self._shared[a] for a in below)))
        return self._shared[i]

    def add(self, a, b):
        if a is None or b is None:
            return b if a is None else a
        return self.build.binary("add", a, b)

    def neg(self, a):
        if a is None:
            return None
        known = self.build.value(a)
        return self.build.unary("neg", a) if known is None else self.number(-known)

    def of(self, node, slopes):
        """The slope of a node whose operands have these slopes, of which it is a linear function."""
        args = [self.value[a] for a in node.args]
        if node.op in _FLAT:
            return None
        if node.op in _FUNCTIONS:
            return self.mul(_FUNCTIONS[node.op](self, args[0]), slopes[0])
        rule = _RULES.get(node.op)
        return self.refuse(node.op, "") if rule is None else rule(self, args, slopes)

    def extreme(self, op, args, slopes):
        """Of two that are the same half of each, as in PyTorch."""
        a, b = slopes
        other = self.choice(self.build.binary(op, args[1], args[0]), b, self.mul(self.number(0.5), self.add(a, b)))
        return self.choice(self.build.binary(op, *args), a, other)

    def choice(self, condition, a, b):
        if a is None and b is None:
            return None
        zero = self.number(0.0)
        return self.build.where(condition, zero if a is None else a, zero if b is None else b)

    def inside(self, i, function):
        """A function of a branch one side of which is 0: of the other side, as it may be infinite where the branch is
        not taken. None of other nodes."""
        node = self.build.nodes[i]
        if node.op != "where" or not any(self.build.value(side) == 0 for side in node.args[1:]):
            return None
        condition, *sides = node.args
        return self.choice(condition, *(None if self.build.value(side) == 0 else function(side) for side in sides))

    def over(self, a, b):
        """a / b."""
        found = self.inside(a, lambda i: self.over(i, b))
        if found is not None:
            return found
        node = self.build.nodes[a]
        if node.op == "mul" and self.shared(b) and b in node.args:  # a softcap's, over itself
            return node.args[1 - node.args.index(b)]
        return self.build.binary("div", a, b)

    def quotient(self, args, slopes):
        over = None if slopes[0] is None else self.over(slopes[0], args[1])
        if slopes[1] is None:
            return over
        under = self.build.binary("div", self.build.binary("div", *args), args[1])  # a square could be infinite
        return self.add(over, self.neg(self.mul(under, slopes[1])))

    def remainder(self, args, slopes):
        if slopes[1] is not None:
            self.refuse("mod", "by what depends on the score, or on a captured tensor that requires one")
        return slopes[0]

    def power(self, args, slopes):
        build, (x, y) = self.build, args
        below = self.mul(y, build.binary("pow", x, build.binary("sub", y, self.number(1.0))))
        if self.build.value(y) is None:
            below = self.choice(build.binary("eq", y, self.number(0.0)), None, below)  # not 0 times infinity
        first = None if self.build.value(y) == 0 else self.mul(below, slopes[0])
        if slopes[1] is None:
            return first
        up = build.binary("mul", build.binary("pow", x, y), build.unary("log", x))
        up = self.choice(build.binary("eq", x, self.number(0.0)), None, up)  # 0, as in PyTorch
        return self.add(first, self.mul(up, slopes[1]))

    @staticmethod
    def refuse(op, what):
        raise NotImplementedError(f"{OP}: score_mod: no gradient of {op} {what}".rstrip())


_RULES = {
    "cast": lambda of, args, slopes: slopes[0],
    "neg": lambda of, args, slopes: of.neg(slopes[0]),
    "add": lambda of, args, slopes: of.add(*slopes),
    "sub": lambda of, args, slopes: of.add(slopes[0], of.neg(slopes[1])),
    "mul": lambda of, args, slopes: of.add(of.mul(slopes[0], args[1]), of.mul(args[0], slopes[1])),
    "div": Derivative.quotient, "mod": Derivative.remainder, "pow": Derivative.power,
    "where": lambda of, args, slopes: of.choice(args[0], *slopes[1:]),
    "min": lambda of, args, slopes: of.extreme("lt", args, slopes),
    "max": lambda of, args, slopes: of.extreme("gt", args, slopes)}


def _of_root(of, x):
    return of.mul(of.number(0.5), of.build.unary("rsqrt", x))


def _of_inverse_root(of, x):
    root = of.build.unary("rsqrt", x)
    return of.mul(of.number(-0.5), of.mul(root, of.mul(root, root)))


def _of_tanh(of, x):
    t = of.build.unary("tanh", x)
    return of.build.binary("sub", of.number(1.0), of.mul(t, t))


def _of_erf(of, x):
    bell = of.build.unary("exp", of.build.unary("neg", of.mul(x, x)))
    return of.mul(of.number(2 / math.sqrt(math.pi)), bell)


def _of_abs(of, x):
    zero = of.number(0.0)
    up = of.choice(of.build.binary("gt", x, zero), of.number(1.0), None)
    return of.choice(of.build.binary("lt", x, zero), of.number(-1.0), up)


_FUNCTIONS = {  # f'(x) of a function of one number
    "exp": lambda of, x: of.build.unary("exp", x),
    "exp2": lambda of, x: of.mul(of.number(math.log(2.0)), of.build.unary("exp2", x)),
    "log": lambda of, x: of.build.binary("div", of.number(1.0), x),
    "log2": lambda of, x: of.build.binary("div", of.number(1 / math.log(2.0)), x),
    "sin": lambda of, x: of.build.unary("cos", x),
    "cos": lambda of, x: of.neg(of.build.unary("sin", x)),
    "sqrt": _of_root, "rsqrt": _of_inverse_root, "tanh": _of_tanh, "erf": _of_erf, "abs": _of_abs}
