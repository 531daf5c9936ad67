"""`checkpoint_every` of mamba2_ssd: the states after each multiple of it, in tokens. Forward only."""
from typing import Optional

import torch
from torch import Tensor

from tkq.linear_attention.checkpoints import multiple_of_chunks, refuse_gradients
from tkq.linear_attention.launch import launch
from tkq.linear_attention.ssd.check import NAMES, OP, check_call, check_ssd_layouts, every_option
from tkq.linear_attention.ssd.forward import SsdSaved, forward
from tkq.reference import ssd as reference
from tkq.runtime.call import check, ops

OF_TOKENS = 0, 1, 3, 4, 6  # x, dt, B, C, z


def call(given, how, return_final_states, every):
    """As a caller has it: y, the states where they are wanted, the checkpoints. given: the tensors; how: dt_softplus
    and dt_limit's two numbers."""
    every = multiple_of_chunks(OP, every_option(every))
    refuse_gradients(OP, given)
    given = *given, *how, return_final_states, every
    tensors = given[:len(NAMES)]
    if ops.direct(*tensors):
        y, states, checkpoints = (_cuda if tensors[0].is_cuda else _cpu)(*given)
    else:
        check.refuse_tangent(OP, **dict(zip(NAMES, tensors)))
        check_call(*tensors)
        y, states, checkpoints = _op(*given)
    return (y, states, checkpoints) if return_final_states else (y, checkpoints)


def refuse_places(cu_seqlens, state_indices):
    """What checkpoints do not go with."""
    for name, x in (("cu_seqlens", cu_seqlens), ("state_indices", state_indices)):
        if x is not None:
            raise NotImplementedError(f"{OP}: checkpoint_every: with {name}, which is not supported; call it without")


def _cuda(x: Tensor, dt: Tensor, A: Tensor, B: Tensor, C: Tensor, D: Optional[Tensor], z: Optional[Tensor],
          dt_bias: Optional[Tensor], initial_states: Optional[Tensor], dt_softplus: bool, dt_low: float, dt_high: float,
          return_final_states: bool, checkpoint_every: int) -> tuple[Tensor, Tensor, Tensor]:
    given = x, dt, A, B, C, D, z, dt_bias, initial_states
    check_call(*given)
    check_ssd_layouts(x, B, C, z)
    saved = SsdSaved(*given, dt_softplus, (float(dt_low), float(dt_high)))
    final = torch.float32 if return_final_states else None
    made = launch(forward(saved, final)._replace(checkpoint_every=checkpoint_every), 1.0)
    return made.o, x.new_empty(0, dtype=torch.float32) if made.state is None else made.state, made.checkpoints.mT


def _cpu(x, dt, A, B, C, D, z, dt_bias, initial_states, dt_softplus, low, high, return_final_states, every):
    given = [x, dt, A, B, C, D, z, dt_bias, initial_states]
    made = _fake(*given, dt_softplus, low, high, return_final_states, every)
    check_ssd_layouts(x, B, C, z)
    if x.is_meta:
        return made
    ys, found, wide = [], [], torch.promote_types(x.dtype, torch.float32)
    states = x.new_zeros(x.shape[0], *x.shape[2:], B.shape[3], dtype=wide) if initial_states is None else initial_states
    for begin in range(0, x.shape[1], every):
        part = [t[:, begin:begin + every] if i in OF_TOKENS and t is not None else t for i, t in enumerate(given[:-1])]
        y, states = reference.mamba2_ssd(*part, states, dt_softplus, (low, high))
        ys.append(y)
        if begin + every <= x.shape[1]:
            found.append(states)
    y = torch.cat(ys, 1).to(x.dtype) if ys else made[0]
    checkpoints = torch.stack(found, 1).float().contiguous() if found else made[2]
    return y, states.float().contiguous().clone() if return_final_states else made[1], checkpoints


def _fake(x, dt, A, B, C, D, z, dt_bias, initial_states, dt_softplus, low, high, return_final_states, every):
    check_call(x, dt, A, B, C, D, z, dt_bias, initial_states)
    of_states = *x.shape[2:], B.shape[3]

    def room(*shape):
        return x.new_empty(shape, dtype=torch.float32)

    return (x.new_empty(x.shape), room(x.shape[0], *of_states) if return_final_states else room(0),
            room(x.shape[0], x.shape[1] // every, *of_states))


_op = ops.torch_op("mamba2_ssd_checkpoints", cuda=_cuda, cpu=_cpu, fake=_fake, of=OP)
