"""Decays for each column of k from what a model's projection gives (Kimi Delta Attention), in PyTorch."""
from __future__ import annotations

import torch
from torch import Tensor
from torch.nn.functional import softplus


def column_decays(g: Tensor, A_log: Tensor | None, dt_bias: Tensor | None = None,
                  lower_bound: float | None = None) -> Tensor:
    """-exp(A_log) * softplus(g + dt_bias), or with a lower_bound lower_bound * sigmoid(exp(A_log) * (g + dt_bias)), in
    float32: natural logarithms of decays, as `tkq.gated_delta_rule` takes them.

    g: (B, S, HV, K), of any type. A_log: of HV numbers, None with a lower_bound: zeros. dt_bias: of HV * K numbers.
    lower_bound: what no logarithm goes below."""
    heads, columns = g.shape[2:]
    x = g.to(torch.float32)
    if dt_bias is not None:
        x = x + dt_bias.to(torch.float32).view(heads, columns)
    factor = None if A_log is None else A_log.to(torch.float32).view(heads, 1).exp()
    if lower_bound is None:
        return -factor * softplus(x)
    return lower_bound * (x if factor is None else factor * x).sigmoid()
