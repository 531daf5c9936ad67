"""A graph as code of a kernel: its nodes are visited once for each element when the kernel is traced. What does not
depend on an element's row or column is made once and shared."""
import math
from typing import Any, NamedTuple

import cutlass
import cutlass.cute as cute
from cutlass import Boolean, Float32, Int32, Int64, Uint32
from cutlass.cutlass_dsl import T, dsl_user_op, is_dynamic_expression

from tkq.attention.flex.functions.graph import FLOAT, Node
from tkq.tile.assembly import ptx

LOG2E, NEAR = math.log2(math.e), 0.06
# tanh(x) / x for |x| <= 1, of x ** 2: a relative error of 6e-7
NEAR_TANH = (0.99999941, -0.33329042, 0.13281434, -0.05160567, 0.01674312, -0.00306706)
_KINDS = {"bool": Boolean, "i32": Int32, "i64": Int64, "f32": Float32}
_MATH = {**{name: name for name in FLOAT}, "round": "roundeven", "pow": "pow"}
_PLAIN = {"add": lambda a, b: a + b, "sub": lambda a, b: a - b, "mul": lambda a, b: a * b, "div": lambda a, b: a / b,
          "lt": lambda a, b: a < b, "le": lambda a, b: a <= b, "gt": lambda a, b: a > b, "ge": lambda a, b: a >= b,
          "eq": lambda a, b: a == b, "ne": lambda a, b: a != b, "and": lambda a, b: a & b, "or": lambda a, b: a | b,
          "xor": lambda a, b: a ^ b, "shl": lambda a, b: a << b, "shr": lambda a, b: a >> b,
          "neg": lambda a: -a, "cast": lambda a: a,
          "where": lambda c, a, b: select(c, a, b)}


class Scaled(NamedTuple):
    """A score that is value * factor. factor: what all scores share."""

    value: Any
    factor: Any


class Emitted:
    """A graph in a kernel. captured: what its slots hold, the kernel's own (tensors, numbers), or None. near: every
    tanh is taken of numbers from -1 to 1. sums: a product of indices that is a term of the result may be that at the
    bases and a multiple of its other factor, rounded once more.

    ``at(b=.., h=.., q=.., kv=.., score=..)`` is its value for one element. An input is (base, offset): an index is
    their sum, the offset a number that is known when traced; of a score the base is its value, or ``Scaled``. Equal
    offsets mean equal values, and what depends on these inputs alone is not made again: what is affine in indices is
    its value at the bases and a constant."""

    def __init__(self, graph, captured, near=False, sums=False):
        self.graph, self.near, self.sums = graph, near, sums
        self.tensors, self.numbers = (None, None) if captured is None else captured
        self.depends = [tuple(sorted(of)) for of in graph.inputs_of()]
        self.affine, self.needs, self.made = graph.affine(), _needs(graph), {}
        self.terms = terms_of(graph) if sums else ()

    def at(self, **inputs):
        return self._value(len(self.graph.nodes) - 1, inputs)

    def node_at(self, i, **inputs):
        """Of a node other than the last."""
        return self._value(i, inputs)

    def know(self, i, value, **inputs):
        """A node's value at these inputs, which was made elsewhere."""
        self.made[self._key(i, inputs)] = value

    def prepare(self, *without, **inputs):
        """Make what depends on none of the inputs ``without``: before a loop over these. inputs: the others."""
        for i, depends in enumerate(self.depends):
            if not set(without) & set(depends):
                self._value(i, inputs)

    def again(self):
        """For other elements, with what has been made so far: of inputs that they share."""
        other = Emitted(self.graph, (self.tensors, self.numbers), self.near, self.sums)
        other.made.update(self.made)
        return other

    def without_factor(self, i, **inputs):
        """(node, factor): of a product by what all scores share the other factor and that. inputs: those shared."""
        node = self.graph.nodes[i]
        for a, b in (node.args, node.args[::-1]) if node.op == "mul" and node.type == "f32" else ():
            if not {"score", "q", "kv"} & {*self.depends[a]}:
                return b, self._value(a, inputs)
        return i, Float32(1.0)

    def _key(self, i, inputs):
        return i, *(inputs[name][1] for name in self.depends[i])

    def _value(self, i, inputs):
        known = self._key(i, inputs)
        if known not in self.made:
            for j in self.needs[i]:  # in order: no recursion as deep as the graph
                each = self._key(j, inputs)
                if each not in self.made:
                    self.made[each] = self._node(j, inputs)
        return self.made[known]

    def _node(self, i, inputs):
        node, graph = self.graph.nodes[i], self.graph
        first, kind = node.args[0], _KINDS[node.type]
        if node.op in ("number", "const"):
            return self.numbers[first] if node.op == "number" else kind(first)
        shift = self._shift(i, inputs)
        if shift:
            return self._value(i, self._at_bases(inputs)) + kind(shift)
        for a, b in (node.args, node.args[::-1]) if i in self.terms else ():
            shift = self._shift(b, inputs)
            if shift and self._is_shared(a):
                at = self._at_bases(inputs)
                return cute.math.fma(self._value(a, at), kind(shift), self._value(i, at))
        if node.op == "input":
            value = inputs[first][0]
            return value.value * value.factor if isinstance(value, Scaled) else value
        return self._applied(i, [self.made[self._key(a, inputs)] for a in graph.operands(i)], inputs)

    def _applied(self, i, args, inputs):
        """A node's operation."""
        node, graph = self.graph.nodes[i], self.graph
        first, kind = node.args[0], _KINDS[node.type]
        if node.op == "load":
            from_start = [graph.nodes[a].op == "input" for a in graph.operands(i)]
            return _load(self.tensors[first], args, node.type, from_start)
        if node.type == "f32" and node.op in ("mul", "div", "tanh"):
            for way in (self._product_of_score, self._near_tanh):
                found = way(i, args, inputs)
                if found is not None:
                    return found
        if node.op == "div" and self._shares_divisor(*node.args):
            args = args[0], self._inverse(self._key(node.args[1], inputs), args[1])
            node = Node("mul", node.type, node.args)
        if node.op == "div" and "score" not in self.depends[i]:
            return _rounded_quotient(*args)
        return kind(_operation(node, args, [graph.nodes[a] for a in graph.operands(i)]))

    def _shift(self, i, inputs):
        """How much more a node is than at the bases; 0 where that is not known."""
        steps = self.affine[i]
        return 0 if steps is None else sum(n * inputs[name][1] for name, n in zip(("q", "kv"), steps) if n)

    @staticmethod
    def _at_bases(inputs):
        return {name: (base, 0 if name in ("q", "kv") else offset) for name, (base, offset) in inputs.items()}

    def _product_of_score(self, i, args, inputs):
        """A ``Scaled`` score times, or over, what all scores share: of one product; None of another node."""
        node, score = self.graph.nodes[i], inputs.get("score", (None,))[0]
        for a, b in ((0, 1), (1, 0))[:{"mul": 2, "div": 1}.get(node.op, 0) if isinstance(score, Scaled) else 0]:
            of, by = self.graph.nodes[node.args[a]], node.args[b]
            if (of.op, of.args) == ("input", ("score",)) and self._is_shared(by):
                known = "factor", i
                if known not in self.made:
                    by = args[b] if node.op == "mul" else self._inverse(self._key(by, inputs), args[b])
                    self.made[known] = score.factor * by
                return score.value * self.made[known]
        return None

    def _near_tanh(self, i, args, inputs):
        """Of a number from -1 to 1, and times what all scores share, which the polynomial's numbers are multiplied by;
        None of another node."""
        node, nodes = self.graph.nodes[i], self.graph.nodes
        if not self.near:
            return None
        if node.op == "tanh":
            return _polynomial(args[0], [Float32(c) for c in NEAR_TANH])
        for a, b in ((0, 1), (1, 0))[:2 * (node.op == "mul")]:
            of = nodes[node.args[a]]
            if of.op == "tanh" and self._is_shared(node.args[b]):
                known = "polynomial", i
                if known not in self.made:
                    self.made[known] = [args[b] * Float32(c) for c in NEAR_TANH]
                return _polynomial(self.made[self._key(of.args[0], inputs)], self.made[known])
        return None

    def _is_shared(self, i):
        """By all scores?"""
        return not {"score", "q", "kv"} & {*self.depends[i]}

    def _shares_divisor(self, dividend, divisor):
        """Is it a score over what all scores share?"""
        return "score" in self.depends[dividend] and self._is_shared(divisor)

    def _inverse(self, of, divisor):
        """1 / a divisor that all scores share, made once. Of scores alone: a quotient of indices may be looked at for
        what it is exactly."""
        known = "inverse", of
        if known not in self.made:
            self.made[known] = Float32(1.0) / divisor
        return self.made[known]


@dsl_user_op
def _rounded_quotient(a, b, *, loc=None, ip=None):
    """a / b, rounded once: of indices floor or ceil may be taken of it. The DSL's own is good to 2 ulp."""
    return Float32(ptx([Float32(a), Float32(b)], "div.rn.f32 $0, $1, $2;", "=f,f,f", loc, ip, T.f32(), pure=True))


def _needs(graph):
    """For each node the nodes that it depends on, itself the last."""
    found = []
    for i in range(len(graph.nodes)):
        found.append(sorted({i}.union(*(found[a] for a in graph.operands(i)))))
    return found


def terms_of(graph) -> tuple:
    """The products that nothing but sums takes, of which the result is the last."""
    last, takers = len(graph.nodes) - 1, [[] for _ in graph.nodes]
    for i in range(len(graph.nodes)):
        for a in graph.operands(i):
            takers[a].append(i)
    found, terms = set(), []
    for i in range(last, -1, -1):
        node = graph.nodes[i]
        if node.type == "f32" and (i == last or (takers[i] and found.issuperset(takers[i]))):
            if node.op in ("add", "sub"):
                found.add(i)
            elif node.op == "mul":
                terms.append(i)
    return tuple(terms)


def select(condition, a, b):
    """a where the condition holds, else b, also of what is known when traced."""
    if not is_dynamic_expression(condition):
        return a if bool(condition) else b
    return type(a)(cutlass.select_(condition, a, b))


def from_lane(value, lane):
    """What a lane has, of any type."""
    kind = type(value)
    if kind is Boolean:
        return from_lane(select(value, Int32(1), Int32(0)), lane) != Int32(0)
    if kind is Int64:
        high, low = (from_lane(word, lane) for word in (Int32(value >> Int64(32)), Uint32(value & Int64(0xffffffff))))
        return (Int64(high) << Int64(32)) | Int64(low)
    return kind(cute.arch.shuffle_sync(value, lane))


def _operation(node, args, of):
    op, whole = node.op, of[0].type in ("i32", "i64")
    if op in ("shl", "shr") and of[1].op == "const":
        return _shifted(op, args[0], of[1].args[0], 32 if of[0].type == "i32" else 64)
    if op in _PLAIN:
        return _PLAIN[op](*args)
    if op == "tanh":
        return _tanh(args[0])
    if op in _MATH:
        return getattr(cute.math, _MATH[op])(*args)
    if op in ("floordiv", "mod", "truncdiv"):
        return _divided(op, *args, of[1], whole)
    return _OF_BOTH[op](*args, whole)


def _shifted(op, x, n, bits):
    """By a number that is known when traced: by one that is negative, or as many as there are bits, as torch has it."""
    if not 0 <= n < bits:
        op, n = ("mul", 0) if op == "shl" else ("shr", bits - 1)
    return _PLAIN[op](x, type(x)(n))


def _tanh(x):
    """1 - 2 / (exp(2 x) + 1), and near 0, where that cancels, x - x ** 3 / 3 + 2 / 15 x ** 5: a relative error below
    5e-6."""
    square = x * x
    e = cute.math.exp2(x * Float32(2 * LOG2E), fastmath=True)
    far = cute.math.fma(cute.arch.rcp_approx(e + Float32(1.0)), Float32(-2.0), Float32(1.0))
    near = cute.math.fma(square, cute.math.fma(square, Float32(2 / 15), Float32(-1 / 3)), Float32(1.0)) * x
    return select(square < Float32(NEAR * NEAR), near, far)


def _polynomial(x, factors):
    """x times a polynomial of x ** 2."""
    square, found = x * x, factors[-1]
    for factor in factors[-2::-1]:
        found = cute.math.fma(found, square, factor)
    return x * found


def near_arguments(graph) -> tuple:
    """The nodes of which a graph takes the tanh, where these depend on the score and on what all share alone, and no
    other function takes long, as its code is there twice; else none."""
    depends, found = graph.inputs_of(), {node.args[0] for node in graph.nodes if node.op == "tanh"}
    near = all("score" in depends[i] and not {"q", "kv"} & depends[i] for i in found)
    long = any((node.op in FLOAT and node.op != "tanh") or node.op == "pow" for node in graph.nodes)
    return tuple(sorted(found)) if near and not long else ()


def _least(a, b, whole):
    return cutlass.min(a, b) if whole else _or_nan(a, select(a < b, a, b))


def _most(a, b, whole):
    return cutlass.max(a, b) if whole else _or_nan(a, select(a > b, a, b))


def _or_nan(a, found):
    """NaN, as torch has it, if either of two is; of b it is already."""
    return select(a != a, a, found)


_OF_BOTH = {"min": _least, "max": _most,
            "not": lambda a, whole: ~a if whole else a ^ Boolean(True),
            "abs": lambda a, whole: cutlass.max(a, -a) if whole else cute.math.absf(a)}


def _divided(op, a, b, divisor, whole):
    """Quotients towards minus infinity or zero, and the remainder that goes with the first."""
    if not whole:
        quotient = _rounded_quotient(a, b)
        if op == "truncdiv":
            return cute.math.trunc(quotient)
        down = cute.math.floor(quotient)
        return down if op == "floordiv" else a - b * down
    known = divisor.args[0] if divisor.op == "const" else 0
    if known > 0 and known & (known - 1) == 0 and op != "truncdiv":
        shift = known.bit_length() - 1
        return a >> type(a)(shift) if op == "floordiv" else a & type(a)(known - 1)
    rest = a % b  # of the dividend's sign
    wrong = (rest != type(rest)(0)) & ((rest ^ b) < type(rest)(0))
    if op == "mod":
        return select(wrong, rest + b, rest)
    quotient = (a - rest) // b  # a multiple: towards zero or minus infinity is the same
    return select(wrong, quotient - type(a)(1), quotient) if op == "floordiv" else quotient


def place_in(x, at, from_start=()) -> tuple:
    """Where the indices of a load lead in a captured tensor: negative ones count from its end, and none leads
    outside. from_start: of each, is it known not to be negative?"""
    place = []
    for d, index in enumerate(at):
        size = x.shape[d]
        if from_start and from_start[d]:
            place.append(cutlass.min(index, size - 1))
            continue
        index = select(index < 0, index + size, index)
        place.append(Int32(select(index < 0, type(index)(0), select(index < size, index, type(index)(size - 1)))))
    return tuple(place) or (Int32(0),)


def _load(x, at, kind, from_start):
    """An element of a captured tensor."""
    value = x[place_in(x, at, from_start)]
    if kind == "bool":
        return value != 0
    return _KINDS[kind](value)
