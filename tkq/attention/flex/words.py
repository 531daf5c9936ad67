"""How a mask is evaluated on a row of a tile: which of its bools are made for all columns at once. Pure Python.

Of a bool there is a word, a bit for each of a thread's columns. What masks are mostly made of takes a few instructions
for a word: a comparison of two numbers whose distance grows by 1 or falls by 1 from column to column holds in the
columns on one side of a limit, and logical operations are those of words."""
from __future__ import annotations

from dataclasses import dataclass

from tkq.attention.flex.functions.graph import COMPARISONS, Graph

ROWS, LIMITS, LOGIC, COLUMNS, EQUAL, ELEMENTS = "rows", "limits", "logic", "columns", "equal", "elements"
CHEAP = ("input", "const", "number", "cast", "where", "neg", "abs", "not", "add", "sub", "mul", "min", "max", "and",
         "or", "xor", "shl", "shr", *COMPARISONS)  # an instruction or two


@dataclass(frozen=True)
class Words:
    """of: for each bool that is wanted how its word is made, the result's at last: "rows": the same in all columns;
    "limits": by where it begins or ends to hold; "logic": of other words; "columns": it depends on columns alone, so
    that lanes share them; "equal": is an integer of the row a column's, which takes long: a word for one after the
    other of those that a warp's rows have; "elements": one by one. shared: what depends on columns alone, takes long,
    and is taken by elements. steps: of each node how much it grows from a column to the next, None where that is not
    known."""

    of: dict
    shared: tuple
    steps: tuple


def words(graph: Graph, along: str) -> Words:
    """along: the input that columns are."""
    across, depends, steps = {"q": "kv", "kv": "q"}[along], graph.inputs_of(), steps_of(graph, along)
    bools = lambda i: all(graph.nodes[a].type == "bool" for a in graph.operands(i))
    found, long = {}, _long(graph)

    def want(i):
        node = graph.nodes[i]
        if i in found:
            return
        if along not in depends[i]:
            found[i] = ROWS
        elif _has_limit(graph, i, steps):
            found[i] = LIMITS
        elif bools(i) and node.op in ("and", "or", "xor", "not", "eq", "ne", "where"):
            for a in graph.operands(i):
                want(a)
            found[i] = LOGIC
        elif across not in depends[i]:
            found[i] = COLUMNS
        else:
            sides = sides_of(graph, i, along)
            found[i] = EQUAL if sides and long[sides[1]] else ELEMENTS

    want(len(graph.nodes) - 1)
    elements = [i for i, how in found.items() if how == ELEMENTS]
    return Words(found, _shared(graph, elements, along, across, long), steps)


def sides_of(graph: Graph, i: int, along: str):
    """(the one that does not depend on columns, the one that depends on them alone) of two integers that are compared
    for being equal, or not; None of another node."""
    node, depends = graph.nodes[i], graph.inputs_of()
    for row, column in (node.args, node.args[::-1]) if node.op in ("eq", "ne") else ():
        if along not in depends[row] and not ({"q", "kv"} - {along}) & depends[column] and \
                graph.nodes[row].type in ("i32", "i64"):
            return row, column
    return None


def _long(graph):
    """For each node: does it take long, or hold what does?"""
    long = []
    for i, node in enumerate(graph.nodes):
        long.append(node.op not in CHEAP or any(long[a] for a in graph.operands(i)))
    return long


def steps_of(graph: Graph, along: str) -> tuple:
    """How much each node grows with ``along``: of integers that are sums of it and of what does not depend on it."""
    found, depends = [], graph.inputs_of()
    for i, node in enumerate(graph.nodes):
        of = [found[a] for a in graph.operands(i)]
        if along not in depends[i]:
            found.append(0)
        elif node.type not in ("i32", "i64") or None in of:
            found.append(None)
        elif node.op in ("input", "cast"):
            whole = node.op == "input" or graph.nodes[node.args[0]].type in ("i32", "i64")
            found.append((of or [1])[0] if whole else None)
        elif node.op in ("neg", "add", "sub"):
            found.append({"neg": -of[0], "add": of[0] + of[-1], "sub": of[0] - of[-1]}[node.op])
        else:
            found.append(None)
    return tuple(found)


def _has_limit(graph, i, steps):
    node = graph.nodes[i]
    if node.op not in COMPARISONS or any(steps[a] is None or graph.nodes[a].type not in ("i32", "i64")
                                         for a in node.args):
        return False
    return abs(steps[node.args[0]] - steps[node.args[1]]) == 1


def _shared(graph, elements, along, across, long):
    """The largest parts of elements that depend on columns alone, of those that hold what takes long."""
    depends, found, seen = graph.inputs_of(), [], set()
    stack = list(elements)
    while stack:
        i = stack.pop()
        if i in seen or along not in depends[i]:
            continue
        seen.add(i)
        if across not in depends[i]:
            if long[i]:
                found.append(i)
        else:
            stack.extend(graph.operands(i))
    return tuple(sorted(found))
