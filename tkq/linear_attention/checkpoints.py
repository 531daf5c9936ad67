"""`checkpoint_every`: the states after each multiple of it, in tokens, beside what a call returns. Forward only."""
from __future__ import annotations

import itertools
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from tkq.linear_attention.config import CHUNK
from tkq.linear_attention.pools import NAMES, laid_out
from tkq.reference.linear_attention import edges
from tkq.runtime.call import check, ops


@dataclass(frozen=True)
class Checkpoints:
    """name: the op's. cuda, cpu: the op's functions, and op: of its tensors, the last of which is the state (.., K, V)
    that sequences begin with, the scale, whether the final state is wanted, cu_seqlens, state_v_first and
    checkpoint_every; they give o, that state, empty where it is not, and the checkpoints, (.., K, V). options: checks
    checkpoint_every. check: of the tensors and a `check.Where`."""

    name: str
    cuda: Callable
    cpu: Callable
    op: Any
    options: Callable
    check: Callable

    def call(self, tensors, scale, output_final_state, where, every):
        """As a caller has it: o, the final state where it is wanted, the checkpoints."""
        every = multiple_of_chunks(self.name, self.options(every))
        self.refuse(tensors, where)
        given = *tensors, scale, output_final_state, where.cu_seqlens, where.state_v_first, every
        if ops.direct(*tensors, where.cu_seqlens):
            found = (self.cuda if tensors[0].is_cuda else self.cpu)(*given)
        else:
            self.check(*tensors, where)
            check.refuse_tangent(self.name, **dict(zip(NAMES[len(tensors)], tensors)))
            found = self.op(*given)
        o, state, checkpoints = found
        if where.state_v_first:
            state, checkpoints = state.mT if output_final_state else state, checkpoints.mT
        return (o, state, checkpoints) if output_final_state else (o, checkpoints)

    def refuse(self, tensors, where):
        """What checkpoints do not go with."""
        if where.state_indices is not None:
            raise NotImplementedError(f"{self.name}: checkpoint_every: with state_indices, which is not supported; "
                                      "pass the rows as initial_state")
        if isinstance(tensors[3], Tensor) and tensors[3].dim() == 4:
            raise NotImplementedError(f"{self.name}: checkpoint_every: with a g of four dimensions, which is not "
                                      "supported; supported are gates of heads and of tokens")
        refuse_gradients(self.name, tensors)


def multiple_of_chunks(op: str, every: int) -> int:
    """checkpoint_every, or ValueError."""
    if every % CHUNK:
        raise ValueError(f"{op}: checkpoint_every: is {every}, allowed are multiples of {CHUNK}")
    return every


def refuse_gradients(op: str, tensors) -> None:
    """NotImplementedError where a call would be recorded."""
    if torch.is_grad_enabled() and any(isinstance(x, Tensor) and x.requires_grad for x in tensors):
        raise NotImplementedError(f"{op}: checkpoint_every: with a tensor that requires a gradient, which is not "
                                  "supported; call it under torch.no_grad()")


def no_checkpoints(q: Tensor, v: Tensor, every: int, v_first: bool) -> Tensor:
    """Zeros in their place, (B, S / every, HV, K, V), of which K or V comes first in memory; or (S / every, ..), see
    `of_packed`."""
    (B, S, _, K), (HV, V) = q.shape, v.shape[2:]
    found = q.new_zeros(B, S // every, HV, *((V, K) if v_first else (K, V)), dtype=torch.float32)
    return found.mT if v_first else found


def of_packed(checkpoints: Tensor, cu_seqlens: Tensor | None) -> Tensor:
    """Of packed sequences without the dimension of B."""
    return checkpoints if cu_seqlens is None else checkpoints.squeeze(0)


def on_cpu(run: Callable, tokens: tuple, initial: Tensor | None, cu_seqlens: Tensor | None, every: int) -> tuple:
    """(o, final states, checkpoints (B, S / every, HV, K, V)) by calls of `every` tokens, each of which begins with the
    state of the one before. run: of (B, S, ..) tensors, or others, and a state: o and the state behind. tokens: those
    tensors, q and k, v behind them."""
    q, _, v, *_ = tokens
    (B, S, _, K), (HV, V) = q.shape, v.shape[2:]
    pieces = [(b, 0, S) for b in range(B)]
    if cu_seqlens is not None:
        cuts = edges(cu_seqlens, S).tolist()
        pieces = [(0, *pair) for pair in itertools.pairwise(cuts)]
    outs, finals, found = [], [], {}
    for n, (b, first, end) in enumerate(pieces):
        state = v.new_zeros(1, HV, K, V, dtype=torch.float32) if initial is None else initial[n:n + 1]
        for begin in range(first, end, every):
            behind = min(begin + every, end)
            o, state = run(*(x if x is None or x.dim() < 3 else x[b:b + 1, begin:behind] for x in tokens), state)
            outs.append((b, begin, behind, o))
            if behind - begin == every:
                found[b, first // every + (behind - first) // every - 1] = state[0]
        finals.append(state)
    wide = torch.promote_types(v.dtype, torch.float32)
    o, checkpoints = (v.new_zeros(shape, dtype=wide) for shape in ((B, S, HV, V), (B, S // every, HV, K, V)))
    for b, begin, behind, x in outs:
        o[b, begin:behind] = x[0]
    for at, state in found.items():
        checkpoints[at] = state
    return o, torch.cat(finals) if finals else o.new_zeros(0, HV, K, V), checkpoints


def cpu_results(found: tuple, q: Tensor, output_final_state: bool, v_first: bool, cu_seqlens: Tensor | None) -> tuple:
    """What `on_cpu` gives as an op gives it."""
    o, state, checkpoints = found
    state = laid_out(state.float(), v_first) if output_final_state else q.new_empty(0, dtype=torch.float32)
    return o.to(q.dtype), state, of_packed(laid_out(checkpoints.float(), v_first), cu_seqlens)
