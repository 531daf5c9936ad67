"""Layers of models whose mixer is a state: modules around the ops of this package."""
from __future__ import annotations

import math
from typing import NamedTuple

import torch
from torch import Tensor, nn

from tkq.linear_attention.delta.ops import gated_delta_rule
from tkq.linear_attention.short_convolution import ShortConvolution
from tkq.linear_attention.spec import HEAD_DIMS, VALUE_DIMS
from tkq.norms.ops import rmsnorm
from tkq.pointwise.gated_ops import swiglu
from tkq.runtime import arguments
from tkq.runtime.arguments.tables import number
from tkq.runtime.call import check, ops

LEAST_A, MOST_A = 0.01, 16.0  # of A at first, uniform; exp(A_log) of 0 would have no logarithm
LEAST_DT, MOST_DT = 0.001, 0.1  # of softplus(dt_bias) at first, uniform in the logarithm
_eps = arguments.checker_of("GatedDeltaNet", number("norm_eps", 1e-5, 0))


class DeltaNetCache(NamedTuple):
    """What `GatedDeltaNet` needs of the tokens before: new tensors from each call, none written over.

    conv: the last inputs of the convolutions of q, k and v, (B, channels, conv_size - 1) each, of the layer's type.
    state: (B, num_v_heads, head_dim, head_v_dim), float32."""

    conv: tuple[Tensor, Tensor, Tensor]
    state: Tensor


class GatedRMSNorm(nn.RMSNorm):
    """`tkq.rmsnorm` of each head; with a gate times silu(gate)."""

    def forward(self, x: Tensor, gate: Tensor | None = None) -> Tensor:
        x = rmsnorm(x, self.weight, eps=self.eps)
        return x if gate is None else swiglu(gate, x)


class GatedDeltaNet(nn.Module):
    """The mixer of Gated DeltaNet (Yang et al., 2024) and Qwen3-Next, in the place of attention, on
    `tkq.gated_delta_rule`:

        q, k, v = silu(conv(x Wq)), silu(conv(x Wk)), silu(conv(x Wv))        causal, depthwise, conv_size taps
        o = gated_delta_rule(q / |q|, k / |k|, v, -exp(A_log) softplus(x Wa + dt_bias), sigmoid(x Wb))
        y = (rmsnorm(o) * silu(x Wg)) Wo

    bfloat16 and float16; or float32 parameters under torch.autocast. Parameters have the names and shapes of
    flash-linear-attention's layer: q_proj, k_proj, v_proj, a_proj, b_proj, g_proj, o_proj, q_conv1d, k_conv1d,
    v_conv1d, A_log, dt_bias, o_norm. Convolutions are `tkq.nn.ShortConvolution`.

    Args:
        hidden_size: of x and y.
        num_heads: of q and k. num_v_heads: of v and o, a multiple of num_heads, which is the default.
        head_dim: columns of q and k, a multiple of 16 from 32 to 256. head_v_dim: of v and o, likewise; head_dim where
            not given.
        conv_size: taps of the convolutions. conv_bias: they have one.
        use_gate: False: the norm's result is not gated, and there is no g_proj.
        allow_neg_eigval: beta is 2 sigmoid(x Wb).
        norm_eps: of the norm of o.
        device, dtype: of the parameters.

    Raises:
        TypeError: a size that is no int; a flag that is no bool; a norm_eps that is no number.
        ValueError: a size below 1; num_v_heads that is no multiple of num_heads; a norm_eps that is below 0, or not
            finite in float32.
        NotImplementedError: a head_dim or head_v_dim that is not supported."""

    def __init__(self, hidden_size: int, *, num_heads: int, head_dim: int, num_v_heads: int | None = None,
                 head_v_dim: int | None = None, conv_size: int = 4, conv_bias: bool = False, use_gate: bool = True,
                 allow_neg_eigval: bool = False, norm_eps: float = 1e-5, device=None, dtype=None):
        super().__init__()
        num_v_heads = num_heads if num_v_heads is None else num_v_heads
        head_v_dim = head_dim if head_v_dim is None else head_v_dim
        for name, size in (("hidden_size", hidden_size), ("num_heads", num_heads), ("head_dim", head_dim),
                           ("num_v_heads", num_v_heads), ("head_v_dim", head_v_dim), ("conv_size", conv_size)):
            check.size(f"GatedDeltaNet: {name}", size)
        for name, flag in (("conv_bias", conv_bias), ("use_gate", use_gate), ("allow_neg_eigval", allow_neg_eigval)):
            check.flag(f"GatedDeltaNet: {name}", flag)
        check_heads("GatedDeltaNet", num_heads, num_v_heads, head_dim, head_v_dim)
        self.hidden_size, self.num_heads, self.num_v_heads = hidden_size, num_heads, num_v_heads
        self.head_dim, self.head_v_dim, self.allow_neg_eigval = head_dim, head_v_dim, allow_neg_eigval
        new = dict(device=device, dtype=dtype)
        keys, values = num_heads * head_dim, num_v_heads * head_v_dim
        for name, size in (("q", keys), ("k", keys), ("v", values), ("a", num_v_heads), ("b", num_v_heads),
                           *((("g", values),) if use_gate else ())):
            setattr(self, f"{name}_proj", nn.Linear(hidden_size, size, bias=False, **new))
        for name, size in (("q", keys), ("k", keys), ("v", values)):
            setattr(self, f"{name}_conv1d", ShortConvolution(size, conv_size, bias=conv_bias, **new))
        self.A_log, self.dt_bias = (nn.Parameter(torch.empty(num_v_heads, **new)) for _ in range(2))
        self.o_norm = GatedRMSNorm(head_v_dim, eps=_eps(norm_eps), **new)
        self.o_proj = nn.Linear(values, hidden_size, bias=False, **new)
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """A_log and dt_bias anew, as FSDP asks of modules that come from the meta device; the others are modules."""
        with torch.no_grad():
            self.A_log.uniform_(LEAST_A, MOST_A).log_()
            dt = torch.empty_like(self.dt_bias, dtype=torch.float32)
            dt.uniform_(math.log(LEAST_DT), math.log(MOST_DT)).exp_()
            self.dt_bias.copy_(dt.expm1().log())  # softplus of this is dt

    def forward(self, x: Tensor, cache: DeltaNetCache | None = None, *, output_cache: bool = False,
                cu_seqlens: Tensor | None = None):
        """x: (B, S, hidden_size). cache: of the tokens before x, from the call that had them. output_cache: also return
        the cache of all tokens up to x's last. cu_seqlens: of packed sequences, (N + 1,), as `tkq.gated_delta_rule` has
        them: B is 1, and a cache has N rows.

        Returns y (B, S, hidden_size), or (y, cache). A sequence may be cut anywhere: chained calls are one within
        rounding.

        Raises:
            TypeError: a cache of another class; an output_cache that is no bool."""
        check.tensor("x", x)
        check.shape("x", x, (None, None, self.hidden_size))
        check.as_parameters("x", x, self.q_proj.weight)
        check_cache("GatedDeltaNet", cache, DeltaNetCache, output_cache)
        before = (None, None, None) if cache is None else cache.conv
        mixed = [conv(project(x), state, True, cu_seqlens) for conv, project, state in zip(
            (self.q_conv1d, self.k_conv1d, self.v_conv1d), (self.q_proj, self.k_proj, self.v_proj), before)]
        q, k, v = (y.unflatten(-1, heads) for (y, _), heads in zip(mixed, (
            (self.num_heads, self.head_dim), (self.num_heads, self.head_dim), (self.num_v_heads, self.head_v_dim))))
        found = gated_delta_rule(
            q, k, v, self.a_proj(x), self.b_proj(x).float().sigmoid(), None, None if cache is None else cache.state,
            output_cache, True, A_log=self.A_log, dt_bias=self.dt_bias, use_gate_in_kernel=True,
            allow_neg_eigval=self.allow_neg_eigval, cu_seqlens=cu_seqlens)
        o, state = found if output_cache else (found, None)
        gate = self.g_proj(x).unflatten(-1, v.shape[2:]) if hasattr(self, "g_proj") else None
        y = self.o_proj(self.o_norm(o, gate).flatten(-2))
        return (y, DeltaNetCache(tuple(last for _, last in mixed), state)) if output_cache else y

    def extra_repr(self) -> str:
        return (f"{self.hidden_size}, num_heads={self.num_heads}, head_dim={self.head_dim}, "
                f"num_v_heads={self.num_v_heads}, head_v_dim={self.head_v_dim}"
                f"{', allow_neg_eigval=True' if self.allow_neg_eigval else ''}")


def check_cache(layer, cache, kind, output_cache=False, needed=False):
    """What a call with a cache is given; kind: the cache's class, needed: None is not allowed. Shapes and types are
    looked at where its tensors go."""
    check.flag(f"{layer}: output_cache", output_cache)
    if cache is None and not needed:
        return
    if not isinstance(cache, kind):
        raise TypeError(f"{layer}: cache: got {type(cache).__name__}, expected a {kind.__name__}, as calls with "
                        f"output_cache=True give it{'' if needed else ', or None'}")
    conv = (cache.conv,)
    if kind is DeltaNetCache:
        conv = cache.conv
        if not isinstance(conv, (tuple, list)) or len(conv) != 3:
            raise TypeError(f"{layer}: cache.conv: got {arguments.came(conv)}, expected the tensors of q, k and v")
    for x in conv:
        check.tensor(f"{layer}: cache.conv", x)
    check.tensor(f"{layer}: cache.state", cache.state)


def check_written(layer, cache, sequences):
    """That a step can write a cache, before it writes any of it. sequences: of the step."""
    conv = cache.conv if isinstance(cache, DeltaNetCache) else (cache.conv,)
    for x in () if ops.traced() else conv:
        check.refuse_inference(layer, **{"cache.conv": x})
        check.refuse_overlap(layer, **{"cache.conv": x})
    check.shape(f"{layer}: cache.state", cache.state, (sequences, None, None, None))


def check_heads(layer, num_heads, num_v_heads, head_dim, head_v_dim, head_dims=HEAD_DIMS):
    """What a layer around the delta rule is given. head_dims: the allowed head_dim."""
    if num_v_heads % num_heads:
        raise ValueError(f"{layer}: num_v_heads is {num_v_heads}, allowed are multiples of num_heads, which is "
                         f"{num_heads}")
    for name, size, allowed in (("head_dim", head_dim, head_dims), ("head_v_dim", head_v_dim, VALUE_DIMS)):
        if size not in allowed:
            raise NotImplementedError(f"{layer}: {name} is {size}, supported are multiples of 16 from "
                                      f"{allowed[0]} to {allowed[-1]}")
