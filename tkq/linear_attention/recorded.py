"""What autograd keeps of a call, and how it goes back: the same for every op of states."""
from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from tkq.runtime.call import ops


@dataclass(frozen=True)
class Recorder:
    """An op takes tensors or None, the third of which is v, then its scale, whether the final state is wanted,
    cu_seqlens or None, and perhaps more; it gives o and that state, empty where it is not. Its backward's op takes
    their gradients, the tensors, the scale, of each tensor whether its gradient is wanted, and cu_seqlens.

    saving: None, or the op's function on a GPU in plain eager mode: it also gives tensors that the backward would
    have to make again, which backward_cuda takes behind all else.
    inputs: how many tensors. cuda, cpu: the op's functions; backward_cuda, backward_cpu, backward_op: its backward's,
    and the op."""

    inputs: int
    cuda: Callable
    cpu: Callable
    backward_cuda: Callable
    backward_cpu: Callable
    backward_op: Any
    saving: Callable | None = None

    def keep(self, ctx, given, scale, output_final_state, cu_seqlens=None, *_, made=()):
        ctx.save_for_backward(*given, cu_seqlens, *made)
        ctx.known = scale, output_final_state
        ctx.set_materialize_grads(False)  # None, and not a tensor of zeros, for what was not used

    def setup(self, ctx, inputs, output, made=()):
        ctx.more = len(inputs) - self.inputs
        self.keep(ctx, inputs[:self.inputs], *inputs[self.inputs:], made=made)

    def backward(self, ctx, do, dstate=None):
        (scale, output_final_state), saved = ctx.known, ctx.saved_tensors
        given, cu_seqlens, made = saved[:self.inputs], saved[self.inputs], saved[self.inputs + 1:]
        needs = ctx.needs_input_grad[:self.inputs]
        if not output_final_state:
            dstate = None
        if do is None and dstate is None:
            return (None,) * (self.inputs + ctx.more)
        if do is None:  # the state alone was used
            do = torch.zeros_like(given[2])
        tensors = do, dstate, *given
        call = self.backward_op
        if ops.direct(*tensors, cu_seqlens):
            call = self.backward_cuda if do.is_cuda else self.backward_cpu
        else:
            made = ()
        found = call(*tensors, scale, *needs, cu_seqlens, *made)
        return *(x if needed else None for x, needed in zip(found, needs)), *(None,) * ctx.more

    def record(self, ctx, *given):
        """The op in plain eager mode, past the dispatcher."""
        run = self.cpu if not given[0].is_cuda else self.saving or self.cuda
        o, state, *made = run(*given)
        self.setup(ctx, given, None, made)
        return (o, state) if given[self.inputs + 1] else o


def results(o, state, output_final_state, state_v_first):
    """As a caller has them; state: (.., K, V)."""
    if not output_final_state:
        return o
    return o, state.mT if state_v_first else state
