"""The derivatives of a score function by the elements of captured tensors that it loads: backwards through its graph.
Pure Python."""
from __future__ import annotations

import functools
from typing import NamedTuple

from tkq.attention.flex.functions.derivative import Derivative, changed
from tkq.attention.flex.functions.graph import Graph


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
    of, of_slots = Derivative(graph), [
        node.op == "load" and node.type == "f32" and node.args[0] in slots for node in graph.nodes]
    needs = changed(graph, of_slots)
    adjoint = of.adjoints(needs)
    loads = [i for i in sorted(adjoint) if of_slots[i]]
    results = [of.value[a] for i in loads for a in graph.operands(i)] + [adjoint[i] for i in loads]
    joint, tensors, numbers, nodes = of.build.finish_all(tuple(results))
    nodes, found = iter(nodes), []
    at = [tuple(next(nodes) for _ in graph.operands(i)) for i in loads]
    for i, indices in zip(loads, at):
        found.append(Load(slots.index(graph.nodes[i].args[0]), indices, next(nodes)))
    return Derivatives(joint, tensors, numbers, tuple(found))
