"""From torch tensors to a launch."""
from __future__ import annotations

import torch

from tkq.linear_attention.plan import plan
from tkq.linear_attention.spec import LinearSpec
from tkq.runtime import Recipe, function
from tkq.runtime.call import dtypes


def recipe(spec: LinearSpec) -> Recipe:
    """The kernel's."""
    return Recipe("tkq.linear_attention.kernel:build", (spec, plan(spec)))


def forward(q, k, v, g, scale, initial=None, final=None, *, beta=None, reverse=False):
    """(o, final state or None). final: its dtype. Tensors as `kernel.Operands`."""
    (B, S, H, K), (HV, V) = q.shape, v.shape[2:]
    heads, name = max(H, HV), dtypes.name_of
    gate = "none" if g is None else "head" if g.dim() == 1 else "token"
    spec = LinearSpec(name(q.dtype), K, V, gate, initial if initial is None else name(initial.dtype),
                      final if final is None else name(final), reverse, None if beta is None else name(beta.dtype))
    o = torch.empty(B, S, heads, V, device=v.device, dtype=v.dtype)
    states = None if final is None else torch.empty(B, heads, K, V, device=v.device, dtype=final)
    if B * heads:
        function(recipe(spec))((q, k, v, o, g, beta, initial, states), scale)
    return o, states


def backward(do, q, k, v, g, scale, initial=None, dfinal=None, needs_initial=False):
    """(dq, dk, dv, dinitial): each is a linear attention of others of the tensors, dq in the order of the tokens, dk
    and dv in the reversed one. dq, dk: of each head of v.

    do: as o. dfinal: as the final state. dinitial: fp32."""
    def turned(state):
        return None if state is None else state.transpose(-1, -2)

    dq, _ = forward(do, v, k, g, scale, turned(initial))
    dk, _ = forward(v, do, q, g, scale, turned(dfinal), reverse=True)
    dv, dinitial = forward(k, q, do, g, scale, dfinal, torch.float32 if needs_initial else None, reverse=True)
    return dq, dk, dv, dinitial
