"""mamba_ssm's functions on tkq: its names and order of arguments (of 2.3).

    from tkq.integrations.mamba_ssm import mamba_chunk_scan_combined   # mamba_ssm.ops.triton.ssd_combined
    from tkq.integrations.mamba_ssm import selective_state_update      # mamba_ssm.ops.triton.selective_state_update

Tensors, results and states are as mamba_ssm has them: bf16 and fp16, headdim and d_state
multiples of 16 to 256: see `tkq.mamba2_ssd` and `tkq.ssd_step`, whose errors say what these do not take. chunk_size
says how mamba_ssm computes, not what, and is passed over. An argument that tkq's function has not is refused by name,
with NotImplementedError, unless it is None or False. x, B, C and z whose rows do not lie at multiples of 16 bytes, as
slices of a projection may, are copied; under torch.compile and torch.export, which do not say where they lie, all are.
"""
from __future__ import annotations

import math

from torch import Tensor

from .. import mamba2_ssd, ssd_step
from ..linear_attention.check import for_tma
from ..runtime import arguments
from ..runtime.call import check

__all__ = ["mamba_chunk_scan_combined", "selective_state_update"]

SCAN, UPDATE = "mamba_chunk_scan_combined", "selective_state_update"
_decay = arguments.checker("ssd_step", "A", called=SCAN)  # of 16 bits too, unlike mamba2_ssd's


def mamba_chunk_scan_combined(x: Tensor, dt: Tensor, A: Tensor, B: Tensor, C: Tensor, chunk_size: int,
                              D: Tensor | None = None, z: Tensor | None = None, dt_bias: Tensor | None = None,
                              initial_states: Tensor | None = None, seq_idx: Tensor | None = None,
                              cu_seqlens: Tensor | None = None, dt_softplus: bool = False,
                              dt_limit: tuple = (0.0, math.inf), return_final_states: bool = False,
                              return_varlen_states: bool = False):
    """`tkq.mamba2_ssd`, whose arguments these are, in mamba_ssm's order. A may be of 16 bits: it is made float32.

    Returns out (batch, seqlen, nheads, headdim), or (out, final_states (batch, nheads, headdim, dstate) float32)."""
    for name, value, default in (("seq_idx", seq_idx, None), ("cu_seqlens", cu_seqlens, None),
                                 ("return_varlen_states", return_varlen_states, False)):
        if value is not None and value is not False:
            shown = f"a {type(value).__name__}" if isinstance(value, Tensor) else repr(value)
            raise NotImplementedError(f"{SCAN}: {name}: got {shown}, supported is {default}; tkq.mamba2_ssd takes "
                                      "packed sequences by its own cu_seqlens")
    x, B, C, z = _laid_out(SCAN, x=x, B=B, C=C, z=z)
    return mamba2_ssd(x, dt, _decay(A).float(), B, C, D, z, dt_bias, initial_states, dt_softplus, dt_limit,
                      return_final_states)


def selective_state_update(state: Tensor, x: Tensor, dt: Tensor, A: Tensor, B: Tensor, C: Tensor,
                           D: Tensor | None = None, z: Tensor | None = None, dt_bias: Tensor | None = None,
                           dt_softplus: bool = False, state_batch_indices: Tensor | None = None) -> Tensor:
    """`tkq.ssd_step`, whose arguments these are, in the same order: Mamba-2, whose A, dt and dt_bias are expanded
    within a head. state (batch, nheads, dim, dstate) is updated in place. B, C (batch, ngroups, dstate), or (batch,
    dstate) of one group. Returns out, of x's shape.

    Mamba-1's states of three dimensions are refused by name."""
    check.tensor(f"{UPDATE}: state", state)
    if state.dim() == 3:
        raise NotImplementedError(f"{UPDATE}: state: has 3 dimensions (Mamba-1), supported are 4")
    x, B, C, z = _laid_out(UPDATE, x=x, B=B, C=C, z=z)
    B, C = (t.unsqueeze(1) if t.dim() == 2 else t for t in (B, C))
    return ssd_step(state, x, dt, A, B, C, D, z, dt_bias, dt_softplus, state_batch_indices)


def _laid_out(op, **tensors):
    """x, B, C and z, which may be None."""
    for name, t in tensors.items():
        if t is not None or name != "z":
            check.tensor(f"{op}: {name}", t)
    return [t if t is None else for_tma(t) for t in tensors.values()]
