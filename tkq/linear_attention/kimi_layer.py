"""tkq.nn.KimiDeltaAttention: the mixer of Kimi Linear around `tkq.gated_delta_rule`."""
from __future__ import annotations

import math

import torch
from torch import Tensor, nn

from tkq.linear_attention.channels.decays import column_decays
from tkq.linear_attention.delta.ops import gated_delta_rule
from tkq.linear_attention.layers import LEAST_DT, MOST_DT, DeltaNetCache, check_cache, check_heads, check_written
from tkq.linear_attention.short_convolution import ShortConvolution
from tkq.linear_attention.spec import COLUMN_DIMS
from tkq.linear_attention.step.ops import gated_delta_rule_step
from tkq.norms.ops import rmsnorm
from tkq.runtime import arguments
from tkq.runtime.arguments.tables import number
from tkq.runtime.call import check

LEAST_A, MOST_A = 1.0, 16.0  # of A at first, uniform
_number = arguments.checker_of("KimiDeltaAttention", number("lower_bound", None))
_eps = arguments.checker_of("KimiDeltaAttention", number("norm_eps", 1e-5, 0))


class SigmoidGatedRMSNorm(nn.RMSNorm):
    """`tkq.rmsnorm` of each head times sigmoid(gate)."""

    def forward(self, x: Tensor, gate: Tensor) -> Tensor:
        return rmsnorm(x, self.weight, eps=self.eps) * gate.sigmoid()


class KimiDeltaAttention(nn.Module):
    """The mixer of Kimi Linear (Kimi Delta Attention, KDA), in the place of attention, on `tkq.gated_delta_rule` with a
    gate for each column of k:

        q, k, v = silu(conv(x Wq)), silu(conv(x Wk)), silu(conv(x Wv))        causal, depthwise, conv_size taps
        g = -exp(A_log) softplus(x Wf0 Wf1 + dt_bias)                         of each head and column
        o = gated_delta_rule(q / |q|, k / |k|, v, g, sigmoid(x Wb))
        y = (rmsnorm(o) * sigmoid(x Wg0 Wg1 + bias)) Wo

    bfloat16 and float16; or float32 parameters under torch.autocast. Parameters have the names and shapes of
    flash-linear-attention's layer: q_proj, k_proj, v_proj, f_proj.0, f_proj.1, b_proj, g_proj.0, g_proj.1, o_proj,
    q_conv1d, k_conv1d, v_conv1d, A_log, dt_bias, o_norm. Convolutions are `ShortConvolution`s, gates a
    launch ahead of the rule.

    Args:
        hidden_size: of x and y.
        num_heads: of q and k. num_v_heads: of v and o, a multiple of num_heads, which is the default.
        head_dim: columns of q and k, a multiple of 16 from 32 to 128. head_v_dim: of v and o, to 256; head_dim where
            not given.
        conv_size: taps of the convolutions. conv_bias: they have one.
        allow_neg_eigval: beta is 2 sigmoid(x Wb).
        lower_bound: what no logarithm of a decay goes below: g is then lower_bound sigmoid(exp(A_log) (x Wf0 Wf1 +
            dt_bias)), as of fla's layers with safe_gate.
        norm_eps: of the norm of o.
        device, dtype: of the parameters.

    Raises:
        TypeError: a size that is no int; a flag that is no bool; a lower_bound or norm_eps that is no number.
        ValueError: a size below 1; num_v_heads that is no multiple of num_heads; a lower_bound that is not below 0, or
            a norm_eps below 0; a number that is not finite in float32.
        NotImplementedError: a head_dim or head_v_dim that is not supported."""

    def __init__(self, hidden_size: int, *, num_heads: int, head_dim: int, num_v_heads: int | None = None,
                 head_v_dim: int | None = None, conv_size: int = 4, conv_bias: bool = False,
                 allow_neg_eigval: bool = False, lower_bound: float | None = None, norm_eps: float = 1e-5, device=None,
                 dtype=None):
        super().__init__()
        num_v_heads = num_heads if num_v_heads is None else num_v_heads
        head_v_dim = head_dim if head_v_dim is None else head_v_dim
        for name, size in (("hidden_size", hidden_size), ("num_heads", num_heads), ("head_dim", head_dim),
                           ("num_v_heads", num_v_heads), ("head_v_dim", head_v_dim), ("conv_size", conv_size)):
            check.size(f"KimiDeltaAttention: {name}", size)
        for name, flag in (("conv_bias", conv_bias), ("allow_neg_eigval", allow_neg_eigval)):
            check.flag(f"KimiDeltaAttention: {name}", flag)
        check_heads("KimiDeltaAttention", num_heads, num_v_heads, head_dim, head_v_dim, COLUMN_DIMS)
        self.hidden_size, self.num_heads, self.num_v_heads = hidden_size, num_heads, num_v_heads
        self.head_dim, self.head_v_dim = head_dim, head_v_dim
        self.allow_neg_eigval, self.lower_bound = allow_neg_eigval, _bound(lower_bound)
        new = dict(device=device, dtype=dtype)
        keys, values, gates = num_heads * head_dim, num_v_heads * head_v_dim, num_v_heads * head_dim
        for name, size in (("q", keys), ("k", keys), ("v", values)):
            setattr(self, f"{name}_proj", nn.Linear(hidden_size, size, bias=False, **new))
            setattr(self, f"{name}_conv1d", ShortConvolution(size, conv_size, bias=conv_bias, **new))
        self.f_proj, self.g_proj = (nn.Sequential(
            nn.Linear(hidden_size, head_v_dim, bias=False, **new), nn.Linear(head_v_dim, size, bias=bias, **new))
            for size, bias in ((gates, False), (values, True)))
        self.b_proj = nn.Linear(hidden_size, num_v_heads, bias=False, **new)
        self.A_log, self.dt_bias = (nn.Parameter(torch.empty(size, **new)) for size in (num_v_heads, gates))
        self.o_norm = SigmoidGatedRMSNorm(head_v_dim, eps=_eps(norm_eps), **new)
        self.o_proj = nn.Linear(values, hidden_size, bias=False, **new)
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """A_log and dt_bias anew, as FSDP asks of modules that come from the meta device; the others are modules."""
        with torch.no_grad():
            if self.lower_bound is None:
                self.A_log.uniform_(LEAST_A, MOST_A).log_()
            else:
                self.A_log.zero_()
            dt = torch.empty_like(self.dt_bias, dtype=torch.float32)
            dt.uniform_(math.log(LEAST_DT), math.log(MOST_DT)).exp_()
            self.dt_bias.copy_(dt.expm1().log())  # softplus of this is dt

    def forward(self, x: Tensor, cache: DeltaNetCache | None = None, *, output_cache: bool = False,
                cu_seqlens: Tensor | None = None):
        """x: (B, S, hidden_size). cache: of the tokens before x, from the call that had them. output_cache: also return
        the cache of all tokens up to x's last. cu_seqlens: of packed sequences, (N + 1,), as `tkq.gated_delta_rule` has
        them: B is 1, and a cache has N rows.

        Returns y (B, S, hidden_size), or (y, cache), tensors of its own. A sequence may be cut anywhere: chained calls
        are one within rounding.

        Raises:
            TypeError: a cache of another class; an output_cache that is no bool."""
        check_cache("KimiDeltaAttention", cache, DeltaNetCache, output_cache)
        (q, k, v), conv = self._mixed(x, cache, cu_seqlens)
        found = gated_delta_rule(q, k, v, *self._gates(x), None, None if cache is None else cache.state, output_cache,
                                 True, cu_seqlens=cu_seqlens)
        o, state = found if output_cache else (found, None)
        return (self._out(x, o), DeltaNetCache(conv, state)) if output_cache else self._out(x, o)

    def step(self, x: Tensor, cache: DeltaNetCache) -> Tensor:
        """One token behind a cache, which is written over: decoding, in one launch of `tkq.gated_delta_rule_step`
        beside PyTorch's. Tensors stay where they are, so that a CUDA graph may have it.

        x: (B, 1, hidden_size). cache: from `forward` or a step. Returns y, likewise.

        Raises, besides what forward does:
            NotImplementedError: gradients are enabled: there are none."""
        check.tensor("x", x)
        check.shape("x", x, (None, 1, self.hidden_size))
        check.as_parameters("x", x, self.q_proj.weight)
        check_cache("KimiDeltaAttention.step", cache, DeltaNetCache, needed=True)
        check_written("KimiDeltaAttention.step", cache, x.shape[0])
        (q, k, v), conv = self._mixed(x, cache)
        o = gated_delta_rule_step(q, k, v, *self._gates(x), cache.state, None, True)
        for old, new in zip(cache.conv, conv):
            old.copy_(new)
        return self._out(x, o)

    def _mixed(self, x, cache, cu_seqlens=None):
        """(q, k and v, by heads), (the last inputs of their convolutions)."""
        check.tensor("x", x)
        check.shape("x", x, (None, None, self.hidden_size))
        check.as_parameters("x", x, self.q_proj.weight)
        before = (None, None, None) if cache is None else cache.conv
        mixed = [conv(project(x), state, True, cu_seqlens) for conv, project, state in zip(
            (self.q_conv1d, self.k_conv1d, self.v_conv1d), (self.q_proj, self.k_proj, self.v_proj), before)]
        heads = (self.num_heads, self.head_dim), (self.num_heads, self.head_dim), (self.num_v_heads, self.head_v_dim)
        return [y.unflatten(-1, size) for (y, _), size in zip(mixed, heads)], tuple(last for _, last in mixed)

    def _gates(self, x):
        """(g, beta), float32."""
        g = self.f_proj(x).unflatten(-1, (self.num_v_heads, self.head_dim))
        beta = self.b_proj(x).float().sigmoid()
        return (column_decays(g, self.A_log, self.dt_bias, self.lower_bound),
                2.0 * beta if self.allow_neg_eigval else beta)

    def _out(self, x, o):
        return self.o_proj(self.o_norm(o, self.g_proj(x).view(o.shape)).flatten(-2))

    def extra_repr(self) -> str:
        return (f"{self.hidden_size}, num_heads={self.num_heads}, head_dim={self.head_dim}, "
                f"num_v_heads={self.num_v_heads}, head_v_dim={self.head_v_dim}"
                f"{', allow_neg_eigval=True' if self.allow_neg_eigval else ''}"
                f"{'' if self.lower_bound is None else f', lower_bound={self.lower_bound}'}")


def _bound(lower_bound):
    lower_bound = _number(lower_bound)
    if lower_bound is not None and not lower_bound < 0:
        raise ValueError(f"KimiDeltaAttention: lower_bound: got {lower_bound}, allowed are numbers below 0")
    return lower_bound
