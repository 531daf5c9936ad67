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


def forward(q, k, v, g, scale, initial=None, final=None):
    """(o, final state or None). final: its dtype. Tensors as `kernel.Operands`."""
    (B, S, _, K), (HV, V) = q.shape, v.shape[2:]
    gate = "none" if g is None else "head" if g.dim() == 1 else "token"
    name = dtypes.name_of
    spec = LinearSpec(name(q.dtype), K, V, gate, initial if initial is None else name(initial.dtype),
                      final if final is None else name(final))
    o = torch.empty_like(v, memory_format=torch.contiguous_format)
    states = None if final is None else torch.empty(B, HV, K, V, device=v.device, dtype=final)
    if B * HV:
        function(recipe(spec))((q, k, v, o, g, initial, states), scale)
    return o, states
