"""A score or mask function as a small graph: pointwise operations on scalars, and elements of captured tensors. Pure
Python: its ``repr`` is part of a kernel's compile key, and equal functions have equal graphs."""
from __future__ import annotations

import math
from dataclasses import dataclass

TYPES = ("bool", "i32", "i64", "f32")  # in the order in which two of them become one
INPUTS = {"score": "f32", "b": "i32", "h": "i32", "q": "i32", "kv": "i32"}

# Operations by what they take: numbers of one type, which is the result's, too, but for comparisons.
FLOAT = ("exp", "exp2", "log", "log2", "sqrt", "rsqrt", "tanh", "sin", "cos", "erf", "floor", "ceil", "round", "trunc")
UNARY = (*FLOAT, "neg", "abs", "not")
COMPARISONS = ("lt", "le", "gt", "ge", "eq", "ne")
BINARY = ("add", "sub", "mul", "div", "floordiv", "truncdiv", "mod", "pow", "min", "max", "and", "or", "xor", "shl",
          "shr", *COMPARISONS)
OPS = ("input", "const", "number", "load", "cast", "where", *UNARY, *BINARY)


@dataclass(frozen=True)
class Node:
    """op: one of ``OPS``. type: of its value. args: numbers of earlier nodes, but of an input its name, of a constant
    its value, of a number its slot, of a load the slot, the tensor's dtype, its rank, and then its indices."""

    op: str
    type: str
    args: tuple


@dataclass(frozen=True)
class Graph:
    """nodes: each after those that it takes, the last one is the result. tensors: (dtype, rank) of each captured
    tensor. numbers: the type of each captured number, which is an argument at run time."""

    nodes: tuple
    tensors: tuple = ()
    numbers: tuple = ()

    def __hash__(self):
        """Made once: a graph is part of what a launch is looked up by."""
        found = self.__dict__.get("_hash")
        if found is None:
            found = hash((self.nodes, self.tensors, self.numbers))
            object.__setattr__(self, "_hash", found)
        return found

    def operands(self, i: int) -> tuple:
        """The nodes that node i takes."""
        node = self.nodes[i]
        if node.op in ("input", "const", "number"):
            return ()
        return node.args[3:] if node.op == "load" else node.args

    def is_detached(self, i: int) -> bool:
        """Is node i one of ``Builder.detached``?"""
        node = self.nodes[i]
        return node.op == "cast" and node.type == "f32" == self.nodes[node.args[0]].type

    def inputs_of(self) -> tuple:
        """For each node the set of inputs (of ``INPUTS``) that it depends on."""
        found = []
        for i, node in enumerate(self.nodes):
            own = {node.args[0]} if node.op == "input" else set()
            found.append(frozenset(own.union(*(found[a] for a in self.operands(i)))))
        return tuple(found)

    def affine(self) -> tuple:
        """For each node how much it grows with q and with kv, (n, m), where that is the same everywhere and the node is
        an integer or one as a float; None of others, and of what depends on neither."""
        found, depends = [], self.inputs_of()
        for i, node in enumerate(self.nodes):
            of = self.operands(i)
            if not depends[i] & {"q", "kv", "score"}:
                found.append((0, 0) if node.type == "i32" else None)
            elif any(found[a] is None for a in of):
                found.append(None)
            else:
                found.append(self._steps(node, [found[a] for a in of]))
        return tuple(None if steps == (0, 0) else steps for steps in found)

    def _steps(self, node, of):
        if node.op == "input":
            return {"q": (1, 0), "kv": (0, 1)}.get(node.args[0])
        if node.op in ("neg", "add", "sub") and node.type == "i32":
            sign = 1 if node.op == "add" else -1
            first = (0, 0) if node.op == "neg" else of[0]
            return tuple(a + sign * b for a, b in zip(first, of[-1]))
        if node.op == "mul" and node.type == "i32":
            for a, b in ((0, 1), (1, 0)):
                factor = self.nodes[node.args[a]]
                if factor.op == "const":
                    return tuple(n * factor.args[0] for n in of[b])
        from_i32 = node.op == "cast" and node.type == "f32" and self.nodes[node.args[0]].type == "i32"
        # multiples of indices soon are more than a float holds exactly: their rounding is not even
        return of[0] if from_i32 and max(map(abs, of[0])) <= 1 else None

    def text(self) -> str:
        """One line a node, for a reader."""
        lines = []
        for i, node in enumerate(self.nodes):
            plain = node.op in ("input", "const", "number")
            args = node.args if plain else [*node.args[:3], *(f"%{a}" for a in node.args[3:])] if node.op == "load" \
                else [f"%{a}" for a in node.args]
            lines.append(f"%{i} = {node.op} {node.type} {' '.join(map(str, args))}")
        return "\n".join(lines)


class Builder:
    """Makes a graph, node by node; an equal node is made once."""

    def __init__(self):
        self.nodes, self._known = [], {}

    def add(self, op: str, type: str, *args) -> int:
        """The number of a node."""
        key = op, type, tuple((a.__class__, repr(a)) for a in args)
        if key not in self._known:
            self._known[key] = len(self.nodes)
            self.nodes.append(Node(op, type, args))
        return self._known[key]

    def type_of(self, i: int) -> str:
        return self.nodes[i].type

    def const(self, value, type: str) -> int:
        """A number that is known when traced."""
        value = {"bool": bool, "i32": int, "i64": int, "f32": float}[type](value)
        if type in ("i32", "i64") and not -(1 << (31 if type == "i32" else 63)) <= value < 1 << (
                31 if type == "i32" else 63):
            raise OverflowError(f"{value} does not fit into {type}")
        if type == "f32" and value == 0 and math.copysign(1.0, value) < 0:  # else equal to a graph with 0
            return self.unary("neg", self.const(0.0, type))
        return self.add("const", type, value)

    def value(self, i: int):
        """Of a constant; None of another node."""
        node = self.nodes[i]
        return node.args[0] if node.op == "const" else None

    def cast(self, i: int, type: str) -> int:
        """Node i as another type; a float becomes an integer towards zero."""
        if self.nodes[i].type == type:
            return i
        known = self.value(i)
        if known is not None and not (isinstance(known, float) and not math.isfinite(known)):
            return self.const(known, type)
        return self.add("cast", type, i)

    def detached(self, i: int) -> int:
        """Node i, as a constant of all derivatives: a cast of a float to its own type."""
        return i if self.nodes[i].type != "f32" or self.value(i) is not None else self.add("cast", "f32", i)

    def unary(self, op: str, i: int) -> int:
        return self.add(op, self.nodes[i].type, i)

    def binary(self, op: str, a: int, b: int) -> int:
        """Of nodes of one type. Constants of ``and``, ``or``, ``add``, ``mul`` that change nothing go."""
        if self.nodes[a].type != self.nodes[b].type:
            raise TypeError(f"{op} of {self.nodes[a].type} and {self.nodes[b].type}")
        type = self.nodes[a].type
        for x, other in ((a, b), (b, a)):
            known = self.value(x)
            if known is None:
                continue
            if type == "bool" and op in ("and", "or"):
                return other if known == (op == "and") else x
            if type != "bool" and op == "mul" and known == 1:
                return other
            if type in ("i32", "i64") and op == "add" and known == 0:
                return other
        return self.add(op, "bool" if op in COMPARISONS else type, a, b)

    def where(self, condition: int, a: int, b: int) -> int:
        """Of a condition and two nodes of one type."""
        known = self.value(condition)
        if known is not None:
            return a if known else b
        return a if a == b else self.add("where", self.nodes[a].type, condition, a, b)

    def finish(self, result: int) -> tuple:
        """(the graph of what ``result`` depends on, the slots of its tensors, the slots of its numbers): slots count
        anew, in the order of use."""
        return self.finish_all((result,))[:3]

    def finish_all(self, results: tuple) -> tuple:
        """As ``finish``, of several results: (graph, slots of tensors, slots of numbers, the results' nodes in it)."""
        order, new, tensors, numbers = [], {}, {}, {}

        def visit(i):
            stack = [(i, False)]
            while stack:
                at, ready = stack.pop()
                if at in new:
                    continue
                node = self.nodes[at]
                if not ready:
                    stack.append((at, True))
                    stack.extend((a, False) for a in reversed(operands_of(node)))
                    continue
                order.append(_renumbered(node, new, tensors, numbers))
                new[at] = len(order) - 1

        for result in results:
            visit(result)
        graph = Graph(tuple(order), tuple(kind for _, kind in tensors.values()),
                      tuple(kind for _, kind in numbers.values()))
        return graph, tuple(tensors), tuple(numbers), tuple(new[i] for i in results)

    def include(self, graph: Graph, inputs: dict | None = None) -> list:
        """The numbers here of a graph's nodes, slots as they are there. inputs: nodes in the place of inputs."""
        new = []
        for i, node in enumerate(graph.nodes):
            if node.op == "input" and inputs and node.args[0] in inputs:
                new.append(inputs[node.args[0]])
                continue
            args = node.args
            if graph.operands(i):
                args = tuple(new[a] for a in args) if node.op != "load" else (
                    *args[:3], *(new[a] for a in args[3:]))
            new.append(self.add(node.op, node.type, *args))
        return new


def operands_of(node):
    if node.op in ("input", "const", "number"):
        return ()
    return node.args[3:] if node.op == "load" else node.args


def _renumbered(node, new, tensors, numbers):
    if node.op in ("input", "const"):
        return node
    if node.op == "number":
        slot = numbers.setdefault(node.args[0], (len(numbers), node.type))[0]
        return Node("number", node.type, (slot,))
    if node.op == "load":
        slot, dtype, rank, *at = node.args
        number = tensors.setdefault(slot, (len(tensors), (dtype, rank)))[0]
        return Node("load", node.type, (number, dtype, rank, *(new[a] for a in at)))
    return Node(node.op, node.type, tuple(new[a] for a in node.args))
