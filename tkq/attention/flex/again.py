"""What is kept of a call of flex_attention that autograd recorded: with it, of the next one like it no function is
traced, and nothing is looked at but what it is given."""
from __future__ import annotations

from operator import is_
from typing import NamedTuple

from tkq.attention.flex.functions.graph import Graph
from tkq.attention.flex.functions.trace import Traced
from tkq.attention.flex.launch import Call
from tkq.attention.flex.lists import Blocks
from tkq.attention.flex.operands import BlockLists

LISTS = 3  # their place among what a call with a mask is given beside query, key and value, those of keys first


class Function(NamedTuple):
    """A traced function. tensors: places among what the call is given."""

    graph: Graph
    tensors: tuple
    numbers: tuple

    def of(self, given: tuple) -> Traced:
        return Traced(self.graph, self.captured(given), self.numbers)

    def captured(self, given: tuple) -> tuple:
        return tuple([given[i] for i in self.tensors])


class Again(NamedTuple):
    """Of a call, by where what it takes stands among what it is given (``attend.given_of``) behind query, key and
    value: no tensor is held. size: of its ``Blocks``, None where there are none; queries: do these have lists of
    queries? kept: places of what may not change until a gradient is made."""

    score: Function | None
    mask: Function | None
    size: tuple | None
    queries: bool
    scale: float
    kept: tuple

    @staticmethod
    def of(call: Call, given: tuple) -> Again | None:
        """given: of the call, behind query, key and value. None where it takes a tensor that is none of it: a copy."""
        where, blocks = {id(x): i for i, x in enumerate(given)}, call.blocks
        lists = () if blocks is None else (*blocks.lists, *(blocks.queries or ()))
        tensors = [x for traced in (call.score, call.mask) if traced is not None for x in traced.tensors]
        if not all(map(is_, lists, given[LISTS:])) or not all(id(x) in where for x in tensors):
            return None
        score, mask = (x and Function(x.graph, tuple([where[id(t)] for t in x.tensors]), x.numbers)
                       for x in (call.score, call.mask))
        kept = *[where[id(x)] for x in tensors], *(range(LISTS, LISTS + 4) if lists else ())
        return Again(score, mask, blocks and blocks.size, len(lists) > 4, call.scale, kept)

    def call_of(self, tensors: tuple, given: tuple) -> Call:
        """Of another call like it, as it is given. tensors: query, key, value."""
        score, mask, size, queries, scale, _ = self
        if size is not None:
            lists = BlockLists(*given[LISTS:LISTS + 4])
            size = Blocks(lists, size, BlockLists(*given[LISTS + 4:LISTS + 8]) if queries else None)
        return Call(*tensors, score and score.of(given), mask and mask.of(given), size, scale)
