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
