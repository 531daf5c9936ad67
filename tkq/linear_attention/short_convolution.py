"""A causal convolution of a few taps along the tokens, each channel by itself, which layers have ahead of the delta
rule. In plain PyTorch, with the arguments that `tkq.causal_conv1d` is to have, which then takes its place."""
from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tkq.runtime.call import check

NAME = "causal_conv1d"
ACTIVATIONS = {None: lambda y: y, "silu": F.silu}


def causal_conv1d(x: Tensor, weight: Tensor, bias: Tensor | None = None, activation: str | None = None,
                  initial_state: Tensor | None = None, output_final_state: bool = False):
    """y[t] = activation(bias + sum of weight[:, i] x[t - W + 1 + i]), i from 0 to W - 1.

    Args:
        x: (B, S, C). weight: (C, W). bias: (C,).
        activation: None or "silu".
        initial_state: (B, C, W - 1), what comes before x, the oldest first; None: zeros.
        output_final_state: also return the last W - 1 inputs, likewise.

    Returns:
        (B, S, C), contiguous, of x's type (autocast's, where it is on); with output_final_state the pair (y, state).

    Raises:
        ValueError: shapes that do not go together, an activation that there is not."""
    if activation not in ACTIVATIONS:
        raise ValueError(f"{NAME}: activation: got {activation!r}, allowed are None and 'silu'")
    check.rank(f"{NAME}: x", x, 3)
    check.rank(f"{NAME}: weight", weight, 2)
    (B, S, C), W = x.shape, weight.shape[1]
    check.shape(f"{NAME}: weight", weight, (C, W))
    state = x.new_zeros(B, C, W - 1) if initial_state is None else initial_state
    check.shape(f"{NAME}: initial_state", state, (B, C, W - 1))
    padded = torch.cat((state.to(x.dtype), x.transpose(1, 2)), 2)  # (B, C, W - 1 + S)
    y = F.conv1d(padded, weight[:, None], bias, groups=C) if S else padded[..., :0]
    y = ACTIVATIONS[activation](y).transpose(1, 2).contiguous()
    return (y, padded[..., S:].clone(memory_format=torch.contiguous_format)) if output_final_state else y


class ShortConvolution(nn.Conv1d):
    """`causal_conv1d` with silu, as a module: weight (channels, 1, width), bias (channels,) or None."""

    def __init__(self, channels: int, width: int, *, bias: bool = False, device=None, dtype=None):
        super().__init__(channels, channels, width, groups=channels, bias=bias, device=device, dtype=dtype)

    def forward(self, x: Tensor, state: Tensor | None = None, output_final_state: bool = False):
        return causal_conv1d(x, self.weight[:, 0], self.bias, "silu", state, output_final_state)
