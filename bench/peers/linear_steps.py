"""The baselines of steps of linear attention: each takes a case's inputs, the last of which is the state, and returns
o.

"gdn": (q, k, v, g, beta, a, b, A_log, dt_bias, state), where g = -exp(A_log) softplus(a + dt_bias), beta = sigmoid(b).
"kda": (q, k, v, g, beta, state). "gate": (q, k, v, g, state). "ssd": (x, dt, A, B, C, D, dt_bias, state).

fla: fused_recurrent functions of flash-linear-attention, which write states to new memory. FlashInfer: its decode with
states (V, K) of float32, in place, gates computed inside. mamba_ssm: selective_state_update, in place. copy: what moves
the bytes of the state and nothing else.
"""

from __future__ import annotations

from collections.abc import Callable

import torch

from bench.peers import common


def fla_gdn() -> Callable:
    from fla.ops.gated_delta_rule import fused_recurrent_gated_delta_rule

    return lambda q, k, v, g, beta, a, b, A_log, dt_bias, state: fused_recurrent_gated_delta_rule(
        q, k, v, g=g, beta=beta, initial_state=state, output_final_state=True, use_qk_l2norm_in_kernel=True)[0]


def flashinfer_gdn() -> Callable:
    from flashinfer.gdn_kernels.gdn_decode_pretranspose import run_pretranspose_decode

    def step(q, k, v, g, beta, *rest):
        a, b, A_log, dt_bias, state = rest
        (B, T, H, K), (HV, V) = q.shape, v.shape[2:]
        o = torch.empty_like(v)
        run_pretranspose_decode(state.flatten(0, 1), A_log, a, dt_bias, q, k, v, b, o, B, T, H, HV, K, V, K**-0.5, True)
        return o

    return step


def fla_kda() -> Callable:
    from fla.ops.kda import fused_recurrent_kda

    return lambda q, k, v, g, beta, state: fused_recurrent_kda(
        q, k, v, g, beta, initial_state=state, output_final_state=True, use_qk_l2norm_in_kernel=True)[0]


def fla_gate() -> Callable:
    from fla.ops.simple_gla import fused_recurrent_simple_gla

    return lambda q, k, v, g, state: fused_recurrent_simple_gla(
        q, k, v, g, initial_state=state, output_final_state=True)[0]


def mamba_ssm() -> Callable:
    from mamba_ssm.ops.triton.selective_state_update import selective_state_update

    return lambda x, dt, A, B, C, D, dt_bias, state: selective_state_update(
        state, x, dt, A, B, C, D, dt_bias=dt_bias, dt_softplus=True)


def copy() -> Callable:
    return lambda *given: common.copied(given[-1])


PEERS: dict[str, dict[str, Callable[..., Callable]]] = {
    "gdn_step": {"fla": fla_gdn, "FlashInfer": flashinfer_gdn, "copy": copy},
    "kda_step": {"fla": fla_kda, "copy": copy},
    "gate_step": {"fla": fla_gate, "copy": copy},
    "ssd_step": {"mamba_ssm": mamba_ssm, "copy": copy},
}

common.PEERS.update(PEERS)
