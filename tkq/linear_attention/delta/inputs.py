"""What models do to q, k, g and beta ahead of the delta rule: options of `gated_delta_rule`, made of other ops around
its own. Each is differentiable as these are."""
from __future__ import annotations

import math
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import softplus

from tkq.linear_attention.channels.bounded import launch as bounded
from tkq.linear_attention.channels.decays import column_decays
from tkq.linear_attention.check import DELTA, check_layouts, sequences
from tkq.linear_attention.packed_sequences import token_sequences
from tkq.norms.ops import rmsnorm
from tkq.runtime import arguments
from tkq.runtime.call import check, ops

L2_EPS = 1e-6  # added to the sum of squares, as fla and transformers have it
WIDE = torch.bfloat16, torch.float16, torch.float32
GATE_TYPES = ("bf16", "fp16", "fp32")
NAMES = {"lower_bound": "gate_lower_bound"}  # of options that are no tensors, as the function has them
_check = arguments.checker(DELTA, "use_qk_l2norm_in_kernel", "A_log", "dt_bias", "use_gate_in_kernel",
                           "allow_neg_eigval", "gate_lower_bound")
_tensors = arguments.checker(DELTA, "q", "k", "v", "beta", "cu_seqlens")


class DeltaOptions(NamedTuple):
    """As `gated_delta_rule` has them."""

    l2norm: bool = False
    A_log: Tensor | None = None
    dt_bias: Tensor | None = None
    gate: bool = False
    neg_eigval: bool = False
    lower_bound: float | None = None


def prepared(q, k, v, g, beta, options: DeltaOptions, cu_seqlens: Tensor | None = None):
    """(q, k, g, beta) as the rule itself takes them. Raises what the docstring of `gated_delta_rule` promises of the
    options; all else is left to the rule. Tokens of no sequence count as zeros: what stands there reaches no gradient,
    not even as NaN times 0."""
    options = DeltaOptions(*_check(*options))
    _tensors(q, k, v, beta, cu_seqlens)
    if not ops.traced():  # of what is made here no caller has the name
        check.refuse_tangent(DELTA, q=q, k=k, g=g, beta=beta, A_log=options.A_log, dt_bias=options.dt_bias)
    only_inside = _inside(q, k, v, cu_seqlens)
    if options.l2norm:
        q, k = _unit("q", q, only_inside), _unit("k", k, only_inside)
    if options.gate or not options.A_log is options.dt_bias is options.lower_bound is None:
        g = _gate(v, g, options, only_inside)
    return q, k, g, 2.0 * beta if options.neg_eigval else beta


def in_kernel(q, k, v, g, beta, options: DeltaOptions, others: tuple) -> bool:
    """Does the rule's kernel itself divide q and k by their lengths? With gates of columns, in bf16, where nothing is
    recorded and TMA reads q and k as they lie. What it is not sure of is none."""
    needed, others = (q, k, v, g, beta), (options.A_log, options.dt_bias, *others)
    if options.l2norm is not True or not all(isinstance(x, Tensor) for x in needed):
        return False
    if not all(x is None or isinstance(x, Tensor) for x in others):
        return False
    if not (q.is_cuda and g.dim() == q.dim() == k.dim() == 4 and q.dtype == k.dtype == torch.bfloat16
            and ops.route(*needed, *others) == "direct"):
        return False
    try:
        check_layouts(DELTA, q, k)
    except ValueError:
        return False
    return True


def gates_in_kernel(q, v, g, options: DeltaOptions) -> bool:
    """Does the rule's kernel itself make the gates? Where `in_kernel` holds, and a lower bound lets chunks go block by
    block. What it is not sure of is none, so that errors have one place."""
    if options.gate is not True or v.dim() != 4 or options.neg_eigval not in (True, False):
        return False
    heads, K = v.shape[2], g.shape[3]
    for x, shape in ((options.A_log, (heads,)), (options.dt_bias, (heads, K))):
        if x is not None and (tuple(x.shape) != shape or x.device != q.device or x.dtype not in WIDE):
            return False
    return bounded.supported(q, v, g, options.lower_bound)


def _inside(q, k, v, cu_seqlens):
    """x of tokens -> the same, zeros for tokens of no sequence."""
    if cu_seqlens is None:
        return lambda x: x
    check.rank(f"{DELTA}: v", v, 4)
    sequences(DELTA, v, cu_seqlens)
    check.same_device(v=v, q=q, k=k, cu_seqlens=cu_seqlens)
    of = token_sequences(cu_seqlens, v.shape[1])

    def only_inside(x):
        return of.only_inside(x) if x.shape[:2] == v.shape[:2] else x  # which the rule refuses

    return only_inside


def _unit(name, x, only_inside):
    """x / sqrt(sum(x^2) + eps) of each head, rounded once: an RMS norm, whose eps stands beside the mean of squares."""
    check.rank(f"{DELTA}: {name}", x, 4)
    check.settled(f"{DELTA}: {name}", x)
    check.last_dim_contiguous(f"{DELTA}: {name}", x)
    x, K = only_inside(x), check.plain_size(x.shape[3])
    x = x if x.stride(3) == 1 else x.contiguous()  # rows that overlap come from `only_inside` in an order of torch's
    return rmsnorm(x, x.new_full((K,), K**-0.5, dtype=torch.float32), eps=L2_EPS / K) if K else x


def _gate(v, g, options, only_inside):
    """`log_decays` or `column_decays` of what goes together."""
    if not options.gate:
        name = next(x for x in ("A_log", "dt_bias", "lower_bound") if getattr(options, x) is not None)
        what = "a number" if name in NAMES else "a tensor"
        raise ValueError(f"{DELTA}: {NAMES.get(name, name)}: got {what}, allowed with use_gate_in_kernel=True alone")
    if g is None:
        raise ValueError(f"{DELTA}: g: got None, expected a tensor with use_gate_in_kernel=True")
    check.dtype(f"{DELTA}: g", g, GATE_TYPES)
    check.rank(f"{DELTA}: v", v, 4)
    tokens, of_columns, bound = tuple(v.shape[:3]), g.dim() == 4, options.lower_bound
    check.shape(f"{DELTA}: g", g, (*tokens, None) if of_columns else tokens)
    if bound is not None and not (of_columns and -math.inf < bound < 0):
        raise ValueError(f"{DELTA}: gate_lower_bound: got {bound} with a g of {g.dim()} dimensions, allowed are "
                         "numbers below 0 with one of 4")
    if options.A_log is None and bound is None:
        raise ValueError(f"{DELTA}: A_log: got None, expected a tensor with use_gate_in_kernel=True and no "
                         "gate_lower_bound")
    check.same_device(v=v, g=g, A_log=options.A_log, dt_bias=options.dt_bias)
    for name, x, shape in (("A_log", options.A_log, tokens[2:]), ("dt_bias", options.dt_bias, tuple(g.shape[2:]))):
        if x is not None:
            check.shape(f"{DELTA}: {name}", x, shape)
    if of_columns:
        return column_decays(only_inside(g), options.A_log, options.dt_bias, bound)
    return log_decays(only_inside(g), options.A_log, options.dt_bias)


def log_decays(g, A_log, dt_bias=None):
    """-exp(A_log) * softplus(g + dt_bias), float32. g: (B, S, HV). A_log, dt_bias: (HV,)."""
    x = _wide(g) if dt_bias is None else _wide(g) + _wide(dt_bias)
    return -_wide(A_log).exp() * softplus(x)


def _wide(x):
    return x.to(torch.float32)
