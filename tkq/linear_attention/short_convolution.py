"""A causal convolution of a few taps along the tokens, each channel by itself, which layers have ahead of the delta
rule: `tkq.causal_conv1d` on a GPU; in plain PyTorch on a CPU, in float64, and of 1 tap or more than 8."""
from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tkq.convolution.ops import causal_conv1d as fused
from tkq.convolution.spec import WIDTHS
from tkq.convolution.step_ops import causal_conv1d_step
from tkq.linear_attention.packed_convolution import packed_conv1d, packed_last
from tkq.runtime.call import check

NAME = "causal_conv1d"
ACTIVATIONS = {None: lambda y: y, "silu": F.silu}
FUSED = torch.bfloat16, torch.float16, torch.float32


def causal_conv1d(x: Tensor, weight: Tensor, bias: Tensor | None = None, activation: str | None = None,
                  initial_state: Tensor | None = None, output_final_state: bool = False,
                  cu_seqlens: Tensor | None = None):
    """y[t] = activation(bias + sum of weight[:, i] x[t - W + 1 + i]), i from 0 to W - 1.

    Args:
        x: (B, S, C). weight: (C, W). bias: (C,).
        activation: None or "silu".
        initial_state: (B, C, W - 1), what comes before x, the oldest first; None: zeros.
        output_final_state: also return the last W - 1 inputs, likewise.
        cu_seqlens: of packed sequences, (N + 1,), as `tkq.linear_attn` has them: B is 1, states are (N, C, W - 1), and
            no sequence sees another.

    Returns:
        (B, S, C), contiguous, of x's type (autocast's, where it is on); with output_final_state the pair (y, state).

    Raises:
        ValueError: shapes that do not go together, an activation that there is not."""
    if not (activation is None or activation == "silu"):
        raise ValueError(f"{NAME}: activation: got {activation!r}, allowed are None and 'silu'")
    for name, tensor in (("x", x), ("weight", weight), ("bias", bias), ("initial_state", initial_state)):
        if tensor is not None or name in ("x", "weight"):
            check.tensor(f"{NAME}: {name}", tensor)
    check.rank(f"{NAME}: x", x, 3)
    check.rank(f"{NAME}: weight", weight, 2)
    (B, S, C), W = x.shape, weight.shape[1]
    check.shape(f"{NAME}: weight", weight, (C, W))
    N = B if cu_seqlens is None else _sequences(B, cu_seqlens)
    if initial_state is not None:
        check.shape(f"{NAME}: initial_state", initial_state, (N, C, W - 1))
    if x.is_cuda and x.dtype in FUSED and WIDTHS[0] <= W <= WIDTHS[-1]:
        x = x if x.stride(2) == 1 else x.contiguous()  # as the result is to be
        return fused(x, weight, bias, activation, initial_state, output_final_state, cu_seqlens)
    wide = torch.promote_types(x.dtype, weight.dtype)
    if not (x.dtype == weight.dtype == wide) and not check.under_autocast(x.device.type):
        found = causal_conv1d(x.to(wide), weight.to(wide), None if bias is None else bias.to(wide), activation,
                              initial_state, True, cu_seqlens)
        y, state = (t.to(x.dtype) for t in found)
        return (y, state) if output_final_state else y
    state = x.new_zeros(N, C, W - 1) if initial_state is None else initial_state
    if cu_seqlens is not None and S:
        y = ACTIVATIONS[activation](packed_conv1d(x, weight, bias, state, cu_seqlens)).transpose(1, 2).contiguous()
        return (y, packed_last(x, state, cu_seqlens)) if output_final_state else y
    padded = torch.cat((state.to(x.dtype), x.transpose(1, 2)), 2)  # (B, C, W - 1 + S)
    y = F.conv1d(padded, weight[:, None], bias, groups=C) if S else padded[..., :0]
    y = ACTIVATIONS[activation](y).transpose(1, 2).contiguous()
    return (y, padded[..., S:].clone(memory_format=torch.contiguous_format)) if output_final_state else y


def _sequences(batch, cu_seqlens):
    check.tensor(f"{NAME}: cu_seqlens", cu_seqlens)
    check.rank(f"{NAME}: cu_seqlens", cu_seqlens, 1)
    if not len(cu_seqlens) or batch != 1:
        raise ValueError(f"{NAME}: cu_seqlens: has {len(cu_seqlens)} numbers, allowed is one more than sequences; x "
                         f"has {batch} rows, allowed with cu_seqlens is 1")
    return len(cu_seqlens) - 1


class ShortConvolution(nn.Conv1d):
    """`tkq.causal_conv1d` as a module: the short convolution of Mamba, Gated DeltaNet and others. Parameters are a
    depthwise torch.nn.Conv1d's: weight (channels, 1, width), bias (channels,) or None. `forward` goes through plain
    PyTorch on a CPU, in float64, and with 1 tap or more than 8; `step`, which is without gradients, takes what
    `tkq.causal_conv1d_step` does.

    Args:
        channels: of x and y. width: taps.
        bias: is there one? activation: "silu" or None.
        device, dtype: of the parameters.

    Raises:
        ValueError: an activation that there is not.

    Example::

        conv = tkq.nn.ShortConvolution(512, 4, device="cuda", dtype=torch.bfloat16)
        y = conv(torch.randn(2, 64, 512, device="cuda", dtype=torch.bfloat16))  # (2, 64, 512) bfloat16
    """

    def __init__(self, channels: int, width: int, *, bias: bool = False, activation: str | None = "silu", device=None,
                 dtype=None):
        if not (activation is None or activation == "silu"):
            raise ValueError(f"ShortConvolution: activation: got {activation!r}, allowed are None and 'silu'")
        super().__init__(channels, channels, width, groups=channels, bias=bias, device=device, dtype=dtype)
        self.activation = activation

    def forward(self, x: Tensor, state: Tensor | None = None, output_final_state: bool = False,
                cu_seqlens: Tensor | None = None):
        """x: (B, S, channels). state: what comes before, (N, channels, width - 1), None: zeros. cu_seqlens: of packed
        sequences. Returns y (B, S, channels), with output_final_state (y, state)."""
        return causal_conv1d(x, self.weight[:, 0], self.bias, self.activation, state, output_final_state, cu_seqlens)

    def step(self, x: Tensor, conv_states: Tensor, cache_indices: Tensor | None = None) -> Tensor:
        """One token, x (N, channels), or some, (N, T, channels), of each of N sequences, whose last inputs are in a
        pool (M, channels, width - 1 or more), which is updated in place: `tkq.causal_conv1d_step`."""
        return causal_conv1d_step(x, conv_states, self.weight[:, 0], self.bias, self.activation, cache_indices)
