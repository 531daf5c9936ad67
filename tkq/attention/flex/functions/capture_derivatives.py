"""The derivatives of a score function by the elements of captured tensors that it loads: backwards through its graph.
Pure Python."""
from __future__ import annotations

import functools
from typing import NamedTuple

from tkq.attention.flex.functions.derivative import Derivative
from tkq.attention.flex.functions.graph import COMPARISONS, Graph


class Load(NamedTuple):
    """A load of a captured tensor. gradient: which of the gradients it adds to. at: the nodes of its indices, as they
    are before they are wrapped and clamped. factor: the node of d score_mod / d element."""

    gradient: int
    at: tuple
    factor: int


class Derivatives(NamedTuple):
    """graph: a node of it is each of the loads' indices and factors; its last node is no result. tensors, numbers: the
    slots of the score function's graph that it takes."""

    graph: Graph
    tensors: tuple
    numbers: tuple
    loads: tuple


@functools.lru_cache(1024)
def capture_derivatives(graph: Graph, slots: tuple) -> Derivatives:
    """By the tensors in ``slots``. A tensor whose elements count for nothing has no load.

    Raises:
        NotImplementedError: an operation that has no derivative here, by name.
    """
    of, needs = Derivative(graph), _needs(graph, slots)
    adjoint = {len(graph.nodes) - 1: of.number(1.0)}
    for i in reversed(range(len(graph.nodes))):
        node = graph.nodes[i]
        if i not in adjoint or not needs[i] or node.op == "load":
            continue
        for k, a in enumerate(node.args):
            if needs[a]:
                found = of.of(node, [adjoint[i] if j == k else None for j in range(len(node.args))])
                if found is not None:
                    adjoint[a] = of.add(adjoint.get(a), found)
    loads = [i for i in sorted(adjoint) if needs[i] and graph.nodes[i].op == "load"]
    results = [of.value[a] for i in loads for a in graph.operands(i)] + [adjoint[i] for i in loads]
    joint, tensors, numbers, nodes = of.build.finish_all(tuple(results))
    nodes, found = iter(nodes), []
    at = [tuple(next(nodes) for _ in graph.operands(i)) for i in loads]
    for i, indices in zip(loads, at):
        found.append(Load(slots.index(graph.nodes[i].args[0]), indices, next(nodes)))
    return Derivatives(joint, tensors, numbers, tuple(found))


def _needs(graph, slots):
    """Of each node: may it change with an element of the tensors?"""
    found = []
    for i, node in enumerate(graph.nodes):
        if node.op == "load":
            found.append(node.type == "f32" and node.args[0] in slots)
        else:
            found.append(node.type == "f32" and node.op not in COMPARISONS and not graph.is_detached(i) and any(
                found[a] for a in graph.operands(i)))
    return found
