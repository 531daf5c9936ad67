"""A causal convolution of a few taps along the tokens, each channel by itself, which layers have ahead of the delta
rule: `tkq.causal_conv1d` on a GPU; in plain PyTorch on a CPU, in float64, and of 1 tap or more than 8."""
from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tkq.convolution.ops import causal_conv1d as fused
from tkq.convolution.spec import WIDTHS
from tkq.convolution.states import final_state
from tkq.convolution.step_ops import causal_conv1d_step
from tkq.linear_attention.packed_convolution import packed_conv1d
from tkq.runtime import arguments
from tkq.runtime.call import autocast, check, ops

NAME = "causal_conv1d"
ACTIVATIONS = {None: lambda y: y, "silu": F.silu}
FUSED = torch.bfloat16, torch.float16, torch.float32
_tensors = arguments.checker(NAME, "x", "weight", "bias", "initial_state", also=("float64",))
_others = arguments.checker(NAME, "activation", "output_final_state", "cu_seqlens")
_activation = arguments.checker(NAME, "activation", called="ShortConvolution")


def causal_conv1d(x: Tensor, weight: Tensor, bias: Tensor | None = None, activation: str | None = None,
                  initial_state: Tensor | None = None, output_final_state: bool = False,
                  cu_seqlens: Tensor | None = None):
    """y[t] = activation(bias + sum of weight[:, i] x[t - W + 1 + i]), i from 0 to W - 1.

    Args:
        x: (B, S, C). weight: (C, W). bias: (C,). These and states are bf16, fp16, fp32 or float64, each its own:
            computed in the widest.
        activation: None or "silu".
        initial_state: (B, C, W - 1), what comes before x, the oldest first; None: zeros.
        output_final_state: also return the last W - 1 inputs, likewise.
        cu_seqlens: of packed sequences, (N + 1,), as `tkq.linear_attn` has them: B is 1, states are (N, C, W - 1), and
            no sequence sees another.

    Returns:
        (B, S, C), contiguous, of x's type (autocast's, where it is on); 0 for tokens of no sequence. With
        output_final_state the pair (y, state), the state of initial_state's type, or x's.

    Raises:
        TypeError: what is no dense tensor of such a type; activation is no word; output_final_state is no bool;
            cu_seqlens is no dense tensor of int32 or int64.
        ValueError: shapes that do not go together, devices that differ, an activation that there is not."""
    for name, tensor, dims in (("x", x, 3), ("weight", weight, 2)):
        check.tensor(f"{NAME}: {name}", tensor)
        check.rank(f"{NAME}: {name}", tensor, dims)
    narrow = all(t.dtype in FUSED for t in (x, weight, bias, initial_state) if isinstance(t, torch.Tensor))
    if x.is_cuda and narrow and WIDTHS[0] <= weight.shape[1] <= WIDTHS[-1]:
        x = x if x.stride(2) == 1 else x.contiguous()  # as the result is to be
        return fused(x, weight, bias, activation, initial_state, output_final_state, cu_seqlens)
    if ops.traced() or autocast.on():
        x, weight, bias = autocast.lowered(x, weight, bias)
    _tensors(x, weight, bias, initial_state)
    _others(activation, output_final_state, cu_seqlens)
    (_, S, C), W = x.shape, weight.shape[1]
    check.shape(f"{NAME}: weight", weight, (C, W))
    if bias is not None:
        check.shape(f"{NAME}: bias", bias, (C,))
    check.same_device(x=x, weight=weight, bias=bias, initial_state=initial_state, cu_seqlens=cu_seqlens)
    N = x.shape[0] if cu_seqlens is None else _sequences(x.shape[0], cu_seqlens)
    if initial_state is not None:
        check.shape(f"{NAME}: initial_state", initial_state, (N, C, W - 1))
    state = x.new_zeros(N, C, W - 1) if initial_state is None else initial_state
    y, padded = _of_taps(*_widened(x, weight, state, bias), cu_seqlens if S else None)
    y = ACTIVATIONS[activation](y).to(x.dtype).transpose(1, 2).contiguous()
    if not output_final_state:
        return y
    if cu_seqlens is not None:
        return y, final_state(x, initial_state, cu_seqlens, W)
    # of all of x, and not of its last tokens, whose number tracers would have to know
    return y, padded[..., S:].to(state.dtype, copy=True, memory_format=torch.contiguous_format)


def _widened(*tensors):
    """All in the widest of their types; None among them is passed over."""
    wide = tensors[0].dtype
    for t in tensors[1:]:
        wide = wide if t is None else torch.promote_types(wide, t.dtype)
    return (t if t is None else t.to(wide) for t in tensors)


@autocast.apart
def _of_taps(x, weight, state, bias, cu_seqlens):
    """((B, C, S), without activation; x behind its state, (B, C, W - 1 + S), or None where sequences are packed)."""
    if cu_seqlens is not None:
        return packed_conv1d(x, weight, bias, state, cu_seqlens), None
    if not x.shape[1]:  # shorter than the taps: F.conv1d does not take it
        y = x * weight[:, 0]
        return (y if bias is None else y + bias).transpose(1, 2), state
    padded = torch.cat((state, x.transpose(1, 2)), 2)
    return F.conv1d(padded, weight[:, None], bias, groups=x.shape[2]), padded


def _sequences(batch, cu_seqlens):
    check.rank(f"{NAME}: cu_seqlens", cu_seqlens, 1)
    if not cu_seqlens.shape[0] or batch != 1:
        raise ValueError(f"{NAME}: cu_seqlens: has {cu_seqlens.shape[0]} numbers, allowed is one more than sequences; "
                         f"x has {batch} rows, allowed with cu_seqlens is 1")
    return cu_seqlens.shape[0] - 1


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
        TypeError: a size that is no int; bias is no bool; activation is no word.
        ValueError: a size below 1; an activation that there is not.

    Example::

        conv = tkq.nn.ShortConvolution(512, 4, device="cuda", dtype=torch.bfloat16)
        y = conv(torch.randn(2, 64, 512, device="cuda", dtype=torch.bfloat16))  # (2, 64, 512) bfloat16
    """

    def __init__(self, channels: int, width: int, *, bias: bool = False, activation: str | None = "silu", device=None,
                 dtype=None):
        check.size("ShortConvolution: channels", channels)
        check.size("ShortConvolution: width", width)
        check.flag("ShortConvolution: bias", bias)
        self.activation = _activation(activation)
        super().__init__(channels, channels, width, groups=channels, bias=bias, device=device, dtype=dtype)

    def forward(self, x: Tensor, state: Tensor | None = None, output_final_state: bool = False,
                cu_seqlens: Tensor | None = None):
        """x: (B, S, channels). state: what comes before, (N, channels, width - 1), None: zeros. cu_seqlens: of packed
        sequences. Returns y (B, S, channels), with output_final_state (y, state), of state's type, or x's."""
        return causal_conv1d(x, self.weight[:, 0], self.bias, self.activation, state, output_final_state, cu_seqlens)

    def step(self, x: Tensor, conv_states: Tensor, cache_indices: Tensor | None = None) -> Tensor:
        """One token, x (N, channels), or some, (N, T, channels), of each of N sequences, whose last inputs are in a
        pool (M, channels, width - 1 or more), which is updated in place: `tkq.causal_conv1d_step`."""
        return causal_conv1d_step(x, conv_states, self.weight[:, 0], self.bias, self.activation, cache_indices)
