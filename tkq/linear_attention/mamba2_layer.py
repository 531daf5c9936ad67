"""tkq.nn.Mamba2: the mixer of Mamba-2 around `tkq.mamba2_ssd`."""
from __future__ import annotations

import math
from typing import NamedTuple

import torch
from torch import Tensor, nn

from tkq.linear_attention.check import for_tma
from tkq.linear_attention.layers import LEAST_DT, MOST_DT, check_cache, check_written
from tkq.linear_attention.short_convolution import ShortConvolution
from tkq.linear_attention.spec import HEAD_DIMS, VALUE_DIMS
from tkq.linear_attention.ssd.ops import mamba2_ssd
from tkq.linear_attention.step.ssd_ops import ssd_step
from tkq.norms.ops import rmsnorm
from tkq.runtime import arguments
from tkq.runtime.arguments.tables import number
from tkq.runtime.call import check

LEAST_A, MOST_A = 1.0, 16.0  # of A at first, uniform
NO_LIMIT = 0.0, math.inf  # of step sizes, which softplus has without one too
_limit = arguments.checker("mamba2_ssd", "dt_limit", called="Mamba2")
_eps = arguments.checker_of("Mamba2", number("norm_eps", 1e-5, 0))


class Mamba2Cache(NamedTuple):
    """What `Mamba2` needs of the tokens before: new tensors from each forward.

    conv: the last inputs of the convolution, (B, channels, d_conv - 1), of the layer's type.
    state: (B, heads, headdim, d_state), float32."""

    conv: Tensor
    state: Tensor


def grouped_rmsnorm(x: Tensor, weight: Tensor, eps: float, groups: int = 1) -> Tensor:
    """`tkq.rmsnorm` of (.., N), each of a number of groups of neighbouring columns by itself. weight: (N,)."""
    if groups == 1:
        return rmsnorm(x, weight, eps=eps)
    return (rmsnorm(x.unflatten(-1, (groups, -1)), None, eps=eps).flatten(-2) * weight).to(x.dtype)


class GroupedRMSNorm(nn.RMSNorm):
    """`grouped_rmsnorm` as a module, with one weight for all groups."""

    def __init__(self, columns: int, groups: int, **options):
        super().__init__(columns, **options)
        self.groups = groups

    def forward(self, x: Tensor) -> Tensor:
        return grouped_rmsnorm(x, self.weight, self.eps, self.groups)


class Mamba2(nn.Module):
    """The mixer of Mamba-2 (Dao and Gu, 2024), in the place of attention, on `tkq.mamba2_ssd`:

        z, xBC, dt = split(u Win)
        x, B, C = split(silu(conv(xBC)))                                      causal, depthwise, d_conv taps
        y = mamba2_ssd(x, dt, -exp(A_log), B, C, D, z, dt_bias)               gated by silu(z)
        out = rmsnorm(y) Wout                                                 each group by itself

    bfloat16 and float16; or float32 parameters under torch.autocast. Arguments and parameters have the names and shapes
    of mamba_ssm's Mamba2, which are those of transformers' Mamba2Mixer too: in_proj, conv1d, dt_bias, A_log, D, norm,
    out_proj. Its layers with d_ssm or norm_before_gate are others. The convolution is `tkq.nn.ShortConvolution`.

    Args:
        d_model: columns of u and out.
        d_state: N, columns of B and C, a multiple of 16 from 32 to 256.
        d_conv: taps of the convolution. conv_bias: it has one.
        expand: expand * d_model columns of x, in heads of headdim: a multiple of 16 from 32 to 256.
        ngroups: neighbouring heads share one of ngroups B and C, and each group has its norm.
        D_has_hdim: D is of each column, and not of each head.
        rmsnorm: False: there is no norm.
        dt_limit: the smallest and the largest step size, behind softplus.
        bias: of in_proj and out_proj.
        norm_eps: of the norm.
        device, dtype: of the parameters.

    Raises:
        TypeError: a size that is no int; a flag that is no bool; dt_limit is no pair of numbers; norm_eps is no number.
        ValueError: a size below 1; columns that headdim does not divide, heads that ngroups does not; dt_limit has NaN
            or descends; norm_eps is below 0, or not finite in float32.
        NotImplementedError: a headdim or d_state that is not supported."""

    def __init__(self, d_model: int, *, d_state: int = 128, d_conv: int = 4, expand: int = 2, headdim: int = 64,
                 ngroups: int = 1, D_has_hdim: bool = False, rmsnorm: bool = True, dt_limit: tuple = NO_LIMIT,
                 bias: bool = False, conv_bias: bool = True, norm_eps: float = 1e-5, device=None, dtype=None):
        super().__init__()
        for name, size in (("d_model", d_model), ("d_state", d_state), ("d_conv", d_conv), ("expand", expand),
                           ("headdim", headdim), ("ngroups", ngroups)):
            check.size(f"Mamba2: {name}", size)
        for name, flag in (("D_has_hdim", D_has_hdim), ("rmsnorm", rmsnorm), ("bias", bias), ("conv_bias", conv_bias)):
            check.flag(f"Mamba2: {name}", flag)
        _check_heads(expand * d_model, headdim, ngroups, d_state)
        self.d_model, self.d_state, self.headdim, self.ngroups = d_model, d_state, headdim, ngroups
        self.d_inner, self.nheads = expand * d_model, expand * d_model // headdim
        self.dt_limit, self.D_has_hdim = _limit(dt_limit), D_has_hdim
        new = dict(device=device, dtype=dtype)
        channels = self.d_inner + 2 * ngroups * d_state
        self.in_proj = nn.Linear(d_model, self.d_inner + channels + self.nheads, bias=bias, **new)
        self.conv1d = ShortConvolution(channels, d_conv, bias=conv_bias, **new)
        self.dt_bias, self.A_log, self.D = (nn.Parameter(torch.empty(size, **new)) for size in (
            self.nheads, self.nheads, self.d_inner if D_has_hdim else self.nheads))
        self.norm = GroupedRMSNorm(self.d_inner, ngroups, eps=_eps(norm_eps), **new) if rmsnorm else None
        self.out_proj = nn.Linear(self.d_inner, d_model, bias=bias, **new)
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """A_log, D and dt_bias anew, as FSDP asks of modules that come from the meta device; the others are modules."""
        with torch.no_grad():
            self.A_log.uniform_(LEAST_A, MOST_A).log_()
            self.D.fill_(1.0)
            dt = torch.empty_like(self.dt_bias, dtype=torch.float32)
            dt.uniform_(math.log(LEAST_DT), math.log(MOST_DT)).exp_()
            self.dt_bias.copy_(dt.expm1().log())  # softplus of this is dt

    def forward(self, u: Tensor, cache: Mamba2Cache | None = None, *, output_cache: bool = False,
                cu_seqlens: Tensor | None = None):
        """u: (B, S, d_model). cache: of the tokens before u, from the call that had them. output_cache: also return the
        cache of all tokens up to u's last. cu_seqlens: of packed sequences, (M + 1,), as `tkq.mamba2_ssd` has them: B
        is 1, and a cache has M rows.

        Returns out (B, S, d_model), or (out, cache), tensors of its own. A sequence may be cut anywhere: chained calls
        are one within rounding.

        Raises:
            TypeError: a cache of another class; an output_cache that is no bool."""
        check_cache("Mamba2", cache, Mamba2Cache, output_cache)
        (z, x, B, C, dt), conv = self._mixed(u, cache, cu_seqlens)
        found = mamba2_ssd(x, dt, self._A(), B, C, self._D(), for_tma(z, first=True), self.dt_bias,
                           None if cache is None else cache.state, True, self.dt_limit, output_cache,
                           cu_seqlens=cu_seqlens)
        y, state = found if output_cache else (found, None)
        return (self._out(y), Mamba2Cache(conv, state)) if output_cache else self._out(y)

    def step(self, u: Tensor, cache: Mamba2Cache) -> Tensor:
        """One token behind a cache, which is written over: decoding, in one launch of `tkq.ssd_step` beside PyTorch's.
        Tensors stay where they are, so that a CUDA graph may have it.

        u: (B, 1, d_model). cache: from `forward` or a step. Returns out, likewise.

        Raises, besides what forward does:
            NotImplementedError: gradients are enabled: there are none; a dt_limit, which `tkq.ssd_step` has not: there
                `forward` takes one token too."""
        if self.dt_limit != NO_LIMIT:
            raise NotImplementedError(f"Mamba2.step: dt_limit is {self.dt_limit}, supported is {NO_LIMIT}")
        check.tensor("u", u)
        check.shape("u", u, (None, 1, self.d_model))
        check.as_parameters("u", u, self.in_proj.weight)
        check_cache("Mamba2.step", cache, Mamba2Cache, needed=True)
        check_written("Mamba2.step", cache, u.shape[0])
        (z, x, B, C, dt), conv = self._mixed(u, cache)
        y = ssd_step(cache.state, x, dt, self._A(), B, C, self._D(), for_tma(z, first=True), self.dt_bias, True)
        cache.conv.copy_(conv)
        return self._out(y)

    def _mixed(self, u, cache, cu_seqlens=None):
        """(z, x, B, C by heads, dt), the last inputs of the convolution."""
        check.tensor("u", u)
        check.shape("u", u, (None, None, self.d_model))
        check.as_parameters("u", u, self.in_proj.weight)
        shared = self.ngroups * self.d_state
        z, mixed, dt = self.in_proj(u).split([self.d_inner, self.d_inner + 2 * shared, self.nheads], -1)
        mixed, conv = self.conv1d(mixed, None if cache is None else cache.conv, True, cu_seqlens)
        x, B, C = mixed.split([self.d_inner, shared, shared], -1)
        z, x = (t.unflatten(-1, (self.nheads, self.headdim)) for t in (z, x))
        B, C = (t.unflatten(-1, (self.ngroups, self.d_state)) for t in (B, C))
        return (z, x, B, C, dt), conv

    def _A(self):
        return -self.A_log.float().exp()

    def _D(self):
        return self.D.view(self.nheads, self.headdim) if self.D_has_hdim else self.D

    def _out(self, y):
        y = y.flatten(-2)
        return self.out_proj(y if self.norm is None else self.norm(y))

    def extra_repr(self) -> str:
        return (f"{self.d_model}, d_state={self.d_state}, heads={self.nheads}, headdim={self.headdim}, "
                f"ngroups={self.ngroups}{'' if self.dt_limit == NO_LIMIT else f', dt_limit={self.dt_limit}'}")


def _check_heads(columns, headdim, ngroups, d_state):
    if columns % headdim:
        raise ValueError(f"Mamba2: headdim is {headdim}, allowed are divisors of expand * d_model, which is {columns}")
    if columns // headdim % ngroups:
        raise ValueError(f"Mamba2: ngroups is {ngroups}, allowed are divisors of the number of heads, which is "
                         f"{columns // headdim}")
    for name, size, allowed in (("headdim", headdim, VALUE_DIMS), ("d_state", d_state, HEAD_DIMS)):
        if size not in allowed:
            raise NotImplementedError(f"Mamba2: {name} is {size}, supported are multiples of 16 from {allowed[0]} to "
                                      f"{allowed[-1]}")
