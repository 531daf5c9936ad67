"""What fla's functions are given, as tkq's ops take it: decays that follow from a head's number, gates and betas of
other types, states with sums; what is refused by the name of fla's function."""
from __future__ import annotations

import torch
from torch import Tensor

from ..linear_attention.channels.decays import column_decays
from ..runtime import arguments
from ..runtime.arguments.tables import HALF, WIDE, integer, number, tensor
from ..runtime.call import check, dtypes

_SIZES = {name: arguments.checker_of(name, number("layer_idx", 0.0), integer("num_layers", 1, 1, (1 << 31) - 1))
          for name in ("chunk_lightning_attn", "fused_recurrent_lightning_attn")}
_GATES = {name: arguments.checker_of(name, tensor("g", *WIDE), tensor("A_log", *WIDE, none=True),
                                     tensor("dt_bias", *WIDE, none=True), number("lower_bound", None))
          for name in ("chunk_kda", "fused_recurrent_kda")}


def of_rank(name, argument, x, dims):
    """Other functions have gates of other ranks. What is no tensor is refused by the op."""
    if isinstance(x, Tensor):
        check.rank(f"{name}: {argument}", x, dims)


def wide_gate(g):
    """float32, where it has 16 bits."""
    return _wide(g, *HALF)


def wide_beta(name, beta, sigmoid):
    """As the rule takes it; of a projection where sigmoid says so. The rule has the words for a wrong type."""
    if not sigmoid:
        return _wide(beta, "fp16")
    check.dtype(f"{name}: beta", beta, WIDE)
    return beta.float().sigmoid()


def ones_like_beta(name, v):
    """Where beta is not given."""
    check.tensor(f"{name}: v", v)
    return torch.ones(v.shape[:3], device=v.device)


def _wide(x, *types):
    return x.float() if isinstance(x, Tensor) and dtypes.name_of(x.dtype) in types else x


def retention(name, q, v):
    """RetNet's decays of each head."""
    return (-torch.exp2(-5.0 - _heads(name, q, v))).log1p()


def lightning(name, q, v, layer_idx, num_layers):
    """Lightning Attention's."""
    layer_idx, num_layers = _SIZES[name](layer_idx, num_layers)
    heads = _heads(name, q, v)
    return heads * (-8.0 / max(len(heads), 1) * (1.0 - layer_idx / num_layers))


def _heads(name, q, v):
    """0, 1, .. of q's heads, float32; empty where q is no such tensor, which the op refuses by its name. v has as many:
    decays are of these."""
    heads = q.shape[2] if isinstance(q, Tensor) and q.dim() > 2 else 0
    if heads and isinstance(v, Tensor) and v.dim() == 4 and v.shape[2] != heads:
        raise ValueError(f"{name}: v: has {v.shape[2]} heads, expected {heads}, as q")
    return torch.arange(heads, dtype=torch.float32, device=q.device if heads else None)


def column_gates(name, g, use_gate, A_log, dt_bias, lower_bound):
    """g as the rule takes it, made of these where use_gate says so."""
    check.flag(f"{name}: use_gate_in_kernel", use_gate)
    check.tensor(f"{name}: g", g)
    check.rank(f"{name}: g", g, 4)
    given = (("A_log", A_log, g.shape[2]), ("dt_bias", dt_bias, g.shape[2] * g.shape[3]))
    if not use_gate:
        for argument, x, _ in given:
            if x is not None:
                raise ValueError(f"{name}: {argument}: got a tensor, allowed with use_gate_in_kernel=True alone")
        return g
    g, A_log, dt_bias, lower_bound = _GATES[name](g, A_log, dt_bias, lower_bound)
    if lower_bound is None and A_log is None:
        raise ValueError(f"{name}: A_log: got None, expected a tensor with use_gate_in_kernel=True and no lower_bound")
    if lower_bound is not None and not lower_bound < 0:
        raise ValueError(f"{name}: lower_bound: got {lower_bound}, allowed are numbers below 0")
    for argument, x, count in given:
        if x is not None and x.numel() != count:
            raise ValueError(f"{name}: {argument}: has {x.numel()} numbers, expected {count}")
    check.same_device(g=g, A_log=A_log, dt_bias=dt_bias)
    return column_decays(g, A_log, dt_bias, lower_bound)


def state_and_sum(name, q, initial_state):
    """(the state, the sum of k so far (B, 1, H, K)), either None, of a state or a pair of them. The op looks at the
    state."""
    if not isinstance(initial_state, tuple):
        return initial_state, None
    if len(initial_state) != 2:
        raise ValueError(f"{name}: initial_state: got a tuple of {len(initial_state)}, allowed are a tensor and the "
                         "pair of it and the sum of k")
    state, z = initial_state
    if z is not None:
        check.dtype(f"{name}: initial_state[1]", z, ("fp32", "bf16"))
        check.tensor(f"{name}: q", q)
        check.rank(f"{name}: q", q, 4)
        check.shape(f"{name}: initial_state[1]", z, (q.shape[0], 1, *q.shape[2:]))
        check.same_device(q=q, initial_state=z)
    return state, z
