"""tkq.gated_delta_rule as layers call it, with all its options: inputs, what they mean in float64, and a `Case`."""
import torch.nn.functional as F

import tkq
from tests.helpers.ops.every_op import F32, Case
from tkq.reference.linear_attention import linear_attn as recurrence

NAMES = "q", "k", "v", "g", "beta", "A_log", "dt_bias"
OPTIONS = dict(use_qk_l2norm_in_kernel=True, use_gate_in_kernel=True, allow_neg_eigval=True)


def tensors(t, K=64, V=64) -> dict:
    """By a `Maker`: q and k of any length, a gate's input, beta from 0 to 1; two heads of v share one of q and k."""
    return dict(q=t(2, t.rows, 2, K), k=t(2, t.rows, 2, K), v=t(2, t.rows, 4, V), g=t(2, t.rows, 4),
                beta=t(2, t.rows, 4, dtype=F32).sigmoid(), A_log=t(4, dtype=F32), dt_bias=t(4, dtype=F32))


def call(q, k, v, g, beta, A_log, dt_bias, **more):
    """more: scale and states."""
    return tkq.gated_delta_rule(q, k, v, g, beta, A_log=A_log, dt_bias=dt_bias, **OPTIONS, **more)


def exact(q, k, v, g, beta, A_log, dt_bias, **more):
    """(o, state) in float64 from the first step on."""
    q, k, v, g, beta, A_log, dt_bias = (x.double() for x in (q, k, v, g, beta, A_log, dt_bias))
    q, k = (x * (x.square().sum(-1, keepdim=True) + 1e-6).rsqrt() for x in (q, k))
    return recurrence(q, k, v, -A_log.exp() * F.softplus(g + dt_bias), beta=2 * beta, **more)


CASE = Case("gated_delta_rule", tensors, call, NAMES, ("q", "k", "v"), exact=False)


def layer_exact(layer, x, weights=None):
    """tkq.nn.GatedDeltaNet of the first tokens, in float64. weights: its parameters by name, in float64."""
    w = {name: p.detach().double() for name, p in layer.named_parameters()} if weights is None else weights
    x = x.double()

    def mixed(name, heads):
        y = F.linear(x, w[f"{name}_proj.weight"]).mT
        taps = w[f"{name}_conv1d.weight"]
        y = F.conv1d(F.pad(y, (taps.shape[2] - 1, 0)), taps, w.get(f"{name}_conv1d.bias"), groups=len(taps))
        return F.silu(y).mT.unflatten(-1, (heads, -1))

    q, k, v = mixed("q", layer.num_heads), mixed("k", layer.num_heads), mixed("v", layer.num_v_heads)
    a, b = (F.linear(x, w[f"{name}_proj.weight"]) for name in "ab")
    # `exact` doubles beta
    o, _ = exact(q, k, v, a, b.sigmoid() * (1.0 if layer.allow_neg_eigval else 0.5), w["A_log"], w["dt_bias"])
    o = o * (o.square().mean(-1, keepdim=True) + layer.o_norm.eps).rsqrt() * w["o_norm.weight"]
    if "g_proj.weight" in w:
        o = o * F.silu(F.linear(x, w["g_proj.weight"]).unflatten(-1, o.shape[2:]))
    return F.linear(o.flatten(-2), w["o_proj.weight"])
