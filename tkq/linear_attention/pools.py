"""Calls whose states are rows of a pool, which they write: in place, without gradients."""
from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from tkq.linear_attention.check import refuse_recorded, turned
from tkq.runtime.call import check, memory, ops

# the tensors of a call, by how many these are
NAMES = {5: ("q", "k", "v", "g", "initial_state"), 6: ("q", "k", "v", "g", "beta", "initial_state")}


@dataclass(frozen=True)
class Pools:
    """name: the op's. All but check take the op's tensors, of which the pool is the last one, the scale or other
    options, and what a `check.Where` has, and give o. replayed: of a call like one that came before, or None. cuda,
    cpu: the op's functions, and op. check: of the tensors, the pool as (.., K, V), and a `check.Where`. names: of the
    tensors, as errors say them."""

    name: str
    replayed: Callable
    cuda: Callable
    cpu: Callable
    op: Any
    check: Callable
    names: tuple

    def call(self, tensors, scale, where) -> Tensor:
        return self.with_options(tensors, (scale, *where), where)

    def with_options(self, tensors, options, where) -> Tensor:
        """options: all that a call takes behind its tensors; where: what of it a `check.Where` has."""
        given = *tensors, *options
        if not ops.traced():
            found = self.replayed(*given)
            if found is not None:
                return found
            if isinstance(tensors[-1], Tensor):
                memory.refuse_shared(self.name, {self.names[-1]: tensors[-1]},
                                     {name: x for name, x in zip(self.names, tensors[:-1]) if isinstance(x, Tensor)})
        if ops.direct(*tensors, *where[:2]):
            return (self.cuda if tensors[0].is_cuda else self.cpu)(*given)
        self.check(*tensors[:-1], turned(self.name, tensors[-1], where.state_v_first), where)
        check.refuse_tangent(self.name, **dict(zip(self.names, tensors)))
        refuse_recorded(self.name, *tensors)
        check.settled(f"{self.name}: {self.names[-1]}", tensors[-1])  # the dispatcher would write a copy
        return self.op(*given)


def may_be_written(op: str, pool: Tensor, name: str = "initial_state") -> None:
    """Raises where it may not."""
    check.refuse_inference(op, **{name: pool})
    check.refuse_overlap(op, **{name: pool})


def written(pool: Tensor) -> None:
    """A backward that saved it raises."""
    torch.autograd.graph.increment_version(pool)


def rows_of(pool: Tensor, indices: Tensor) -> Tensor:
    """The states that sequences begin with: zeros where there is no such row. On the CPU."""
    states = pool.new_zeros(len(indices), *pool.shape[1:])
    for n, row in _there(pool, indices):
        states[n] = pool[row]
    return states


def put_rows(pool: Tensor, indices: Tensor, states: Tensor) -> None:
    """Likewise, those that sequences end with."""
    for n, row in _there(pool, indices):
        pool[row] = states[n]


def _there(pool, indices):
    return [(n, row) for n, row in enumerate(indices.tolist()) if 0 <= row < len(pool)]


def laid_out(states: Tensor, v_first: bool) -> Tensor:
    """A copy of (.., K, V) with K or V first in memory."""
    return states.mT.clone(memory_format=torch.contiguous_format).mT if v_first else states.clone()
