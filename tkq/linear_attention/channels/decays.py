"""Decays for each column of k from what a model's projection gives (Kimi Delta Attention)."""
from __future__ import annotations

import torch
from torch import Tensor
from torch.nn.functional import softplus

from tkq.linear_attention.decays import launch
from tkq.runtime.call import ops


def column_decays(g: Tensor, A_log: Tensor | None, dt_bias: Tensor | None = None,
                  lower_bound: float | None = None) -> Tensor:
    """-exp(A_log) * softplus(g + dt_bias), or with a lower_bound lower_bound * sigmoid(exp(A_log) * (g + dt_bias)), in
    float32: natural logarithms of decays, as `tkq.gated_delta_rule` takes them. On a GPU by one launch, and its
    gradients by another one; by PyTorch on a CPU, and where torch.compile traces, which makes one of it, too.

    g: (B, S, HV, K), of any type. A_log: of HV numbers, None with a lower_bound: zeros. dt_bias: of HV * K numbers.
    lower_bound: what no logarithm goes below."""
    if launch.supported(g):
        way = ops.route(g, A_log, dt_bias)
        if way != "op":
            given = g, A_log, dt_bias, None if lower_bound is None else float(lower_bound)
            return _Recorded.apply(*given) if way == "record" else launch.decays(g, *numbers(*given[:3]), given[3])
    return by_torch(g, A_log, dt_bias, lower_bound)


def by_torch(g, A_log, dt_bias, lower_bound):
    """The same in PyTorch."""
    heads, columns = g.shape[2:]
    x = g.to(torch.float32)
    if dt_bias is not None:
        x = x + dt_bias.to(torch.float32).view(heads, columns)
    factor = None if A_log is None else A_log.to(torch.float32).view(heads, 1).exp()
    if lower_bound is None:
        return -factor * softplus(x)
    return lower_bound * (x if factor is None else factor * x).sigmoid()


def numbers(g, A_log, dt_bias):
    """Of each head, of each column: float32, contiguous, zeros for None."""
    heads, columns = g.shape[2:]

    def wide(x, count):
        return g.new_zeros(count, dtype=torch.float32) if x is None else x.detach().to(torch.float32).reshape(count)

    A_log, bias = wide(A_log, heads).contiguous(), wide(dt_bias, heads * columns).contiguous()
    return A_log, bias if bias.data_ptr() % 16 == 0 else bias.clone()


def _record(ctx, g, A_log, dt_bias, lower_bound):
    of_heads = numbers(g, A_log, dt_bias)
    ctx.save_for_backward(g, A_log, dt_bias)
    ctx.bound = lower_bound
    return launch.decays(g, *of_heads, lower_bound)


def _back(ctx, dy):
    g, A_log, dt_bias = ctx.saved_tensors
    dg, of_A, of_bias = launch.gradients(dy, g, *numbers(g, A_log, dt_bias), ctx.bound)
    return (dg, None if A_log is None else of_A.to(A_log.dtype).view(A_log.shape),
            None if dt_bias is None else of_bias.to(dt_bias.dtype).view(dt_bias.shape), None)


_Recorded = ops.eager_function("ColumnDecays", forward=_record, backward=_back, of="column_decays")
