"""What autograd keeps of a call, and how it goes back: the same for every op of states."""
from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from tkq.runtime.call import ops


@dataclass(frozen=True)
class Recorder:
    """An op takes tensors or None, the third of which is v, then its scale and whether the final state is wanted; it
    gives o and that state, empty where it is not. Its backward's op takes their gradients, the tensors, the scale, and
    of each tensor whether its gradient is wanted.

    inputs: how many tensors. cuda, cpu: the op's functions; backward_cuda, backward_cpu, backward_op: its backward's,
    and the op."""

    inputs: int
    cuda: Callable
    cpu: Callable
    backward_cuda: Callable
    backward_cpu: Callable
    backward_op: Any

    def keep(self, ctx, given, scale, output_final_state):
        ctx.save_for_backward(*given)
        ctx.known = scale, output_final_state
        ctx.set_materialize_grads(False)  # None, and not a tensor of zeros, for what was not used

    def setup(self, ctx, inputs, output):
        self.keep(ctx, inputs[:self.inputs], *inputs[self.inputs:])

    def backward(self, ctx, do, dstate=None):
        given, needs, (scale, output_final_state) = ctx.saved_tensors, ctx.needs_input_grad[:self.inputs], ctx.known
        if not output_final_state:
            dstate = None
        if do is None and dstate is None:
            return (None,) * (self.inputs + 2)
        if do is None:  # the state alone was used
            do = torch.zeros_like(given[2])
        tensors = do, dstate, *given
        call = self.backward_op
        if ops.direct(*tensors):
            call = self.backward_cuda if do.is_cuda else self.backward_cpu
        found = call(*tensors, scale, *needs)
        return *(x if needed else None for x, needed in zip(found, needs)), None, None

    def record(self, ctx, *given):
        """The op in plain eager mode, past the dispatcher."""
        o, state = (self.cuda if given[0].is_cuda else self.cpu)(*given)
        self.keep(ctx, given[:self.inputs], *given[self.inputs:])
        return (o, state) if given[-1] else o
