"""The baselines of the gated delta rule, with tkq's layout: (q, k, v, g, beta, alpha) -> o; alpha is exp(g). Of its
training: (q, k, v, g, beta, alpha, do) -> (o, gradients of q, k, v, g and beta).

fla: fla.ops.gated_delta_rule of flash-linear-attention. FlashQLA: kernels in TileLang, K = V = 128 alone. FlashInfer:
its kernel for prefill on Hopper in one launch, K = V = 128 alone, which takes alpha and sequences by cu_seqlens;
"FlashInfer, segments": its other path, for few long sequences. With gates of columns, "kda": fla.ops.kda alone.
"kda_gates" have the layer's gates and norms inside, (q, k, v, g, beta, A_log, dt_bias) -> o: fla, and FlashKDA, whose
kernels are for nothing else.
"""

from __future__ import annotations

from collections.abc import Callable

import torch

from bench.peers import common, gated_gradients

LOWEST = -5.0  # of a gate's logarithms, as Kimi Linear has it


def fla() -> Callable:
    from fla.ops.gated_delta_rule import chunk_gated_delta_rule

    gated_gradients.allow()
    return lambda q, k, v, g, beta, alpha: chunk_gated_delta_rule(q, k, v, g, beta)[0]


def fla_columns() -> Callable:
    from fla.ops.kda import chunk_kda

    return lambda q, k, v, g, beta, alpha: chunk_kda(q, k, v, g, beta)[0]


def flash_qla() -> Callable:
    from flash_qla import chunk_gated_delta_rule

    return lambda q, k, v, g, beta, alpha: chunk_gated_delta_rule(q, k, v, g, beta)[0]


def flashinfer() -> Callable:
    from flashinfer.gdn_kernels.delta_rule_dsl.delta_rule_sm90 import delta_rule_prefill_dsl_sm90

    return _in_a_row(lambda o, state, q, k, v, alpha, beta, ends, longest: delta_rule_prefill_dsl_sm90(
        o, state, q, k, v, None, alpha, beta, ends, q.shape[-1]**-0.5))


def flashinfer_segments() -> Callable:
    from flashinfer.gdn_kernels.delta_rule_dsl.delta_rule_cp_sm90 import cp_delta_rule_dsl_sm90

    return _in_a_row(lambda o, state, q, k, v, alpha, beta, ends, longest: cp_delta_rule_dsl_sm90(
        o, state, q, k, v, alpha, beta, ends, q.shape[-1]**-0.5, max_seqlen=longest))


def _in_a_row(rule: Callable) -> Callable:
    """Of sequences of one length: they lie one behind the other, as FlashInfer takes them."""
    ends: dict = {}  # sequences, their length -> cu_seqlens

    def prefill(q, k, v, g, beta, alpha):
        B, S, heads, V = v.shape
        if (B, S) not in ends:
            ends[B, S] = torch.arange(B + 1, device=v.device, dtype=torch.int64) * S
        o, state = torch.empty_like(v), torch.empty(B, heads, V, q.shape[3], device=v.device)
        out, q, k, v, alpha, beta = (x.flatten(0, 1) for x in (o, q, k, v, alpha, beta))
        rule(out, state, q, k, v, alpha, beta, ends[B, S], S)
        return o

    return prefill


def fla_gates() -> Callable:
    from fla.ops.kda import chunk_kda

    return lambda q, k, v, g, beta, A_log, dt_bias: chunk_kda(
        q, k, v, g, beta, A_log=A_log, dt_bias=dt_bias.flatten(), use_gate_in_kernel=True, safe_gate=True,
        use_qk_l2norm_in_kernel=True, use_beta_sigmoid_in_kernel=True, lower_bound=LOWEST)[0]


def flash_kda() -> Callable:
    import flash_kda

    def forward(q, k, v, g, beta, A_log, dt_bias):
        o = torch.empty_like(v)
        flash_kda.fwd(q, k, v, g, beta, q.shape[3]**-0.5, o, A_log, dt_bias, LOWEST)
        return o

    return forward


def training(forward: Callable) -> Callable:
    """Forward and backward of one call."""
    @torch.enable_grad()  # the harness calls without
    def step(q, k, v, g, beta, alpha, do):
        leaves = [x.detach().requires_grad_() for x in (q, k, v, g, beta)]
        o = forward(*leaves, alpha)
        return o.detach(), *torch.autograd.grad(o, leaves, do)

    return step


# ---- packed sequences: cu_seqlens come behind alpha -----------------------------------------------------------------


def fla_packed() -> Callable:
    from fla.ops.gated_delta_rule import chunk_gated_delta_rule

    gated_gradients.allow()
    return lambda q, k, v, g, beta, alpha, cu: chunk_gated_delta_rule(q, k, v, g, beta, cu_seqlens=cu)[0]


def flash_qla_packed() -> Callable:
    from flash_qla import chunk_gated_delta_rule

    return lambda q, k, v, g, beta, alpha, cu: chunk_gated_delta_rule(q, k, v, g, beta, cu_seqlens=cu)[0]


def flashinfer_packed() -> Callable:
    from flashinfer.gdn_kernels.delta_rule_dsl.delta_rule_sm90 import delta_rule_prefill_dsl_sm90

    def prefill(q, k, v, g, beta, alpha, cu):
        state = torch.empty(len(cu) - 1, v.shape[2], v.shape[3], q.shape[3], device=v.device)
        o, scale = torch.empty_like(v), q.shape[-1]**-0.5
        delta_rule_prefill_dsl_sm90(o[0], state, q[0], k[0], v[0], None, alpha[0], beta[0], cu.long(), scale)
        return o

    return prefill


def packed_training(forward: Callable) -> Callable:
    """Forward and backward of one call; do comes last."""
    @torch.enable_grad()  # the harness calls without
    def step(*given):
        *tensors, alpha, cu, do = given
        leaves = [x.detach().requires_grad_() for x in tensors]
        o = forward(*leaves, alpha, cu)
        return o.detach(), *torch.autograd.grad(o, leaves, do)

    return step


PEERS: dict[str, dict[str, Callable[..., Callable]]] = {
    "gated_delta_rule": {"fla": fla, "FlashQLA": flash_qla, "FlashInfer": flashinfer,
                         "FlashInfer, segments": flashinfer_segments},
    "gated_delta_rule_training": {"fla": lambda: training(fla()), "FlashQLA": lambda: training(flash_qla())},
    "kda_gates": {"fla": fla_gates, "FlashKDA": flash_kda},
    "kda": {"fla": fla_columns}, "kda_training": {"fla": lambda: training(fla_columns())},
    "gated_delta_rule_packed": {"fla": fla_packed, "FlashQLA": flash_qla_packed, "FlashInfer": flashinfer_packed},
    "gated_delta_rule_packed_training": {"fla": lambda: packed_training(fla_packed()),
                                         "FlashQLA": lambda: packed_training(flash_qla_packed())},
}

common.PEERS.update(PEERS)
