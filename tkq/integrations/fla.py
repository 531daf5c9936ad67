"""flash-linear-attention's functions on tkq: `fla.ops`' names and order of arguments (of 0.6).

    from tkq.integrations.fla import chunk_gated_delta_rule    # where fla.ops.gated_delta_rule was

Tensors are (B, T, H, K), states (N, HV, K, V) float32, as fla has them, and the pair (o, final state or None) comes
back. bf16 and fp16, K and V multiples of 16 to 256, K to 128 of KDA: see `tkq.linear_attn` and
`tkq.gated_delta_rule`, whose errors say what these do not take. Gates of 16 bits and betas of fp16 are made float32,
which is exact; fla computes with them in float32 too. The `fused_recurrent` and `parallel` forms are computed in chunks
as well: the same within rounding.

An argument that tkq's function has not is refused by name, with NotImplementedError, unless it is at its default, None
or False: `PASSED_ON` says what goes on. chunk_size, cu_seqlens_cpu, chunk_indices and the like say how fla computes,
not what, and are passed over.
"""
from __future__ import annotations

from torch import Tensor

from .. import based, gated_delta_rule, linear_attn
from ..runtime.call import check
from .fla_inputs import column_gates, lightning, of_rank, ones_like_beta, retention, state_and_sum, wide_beta, wide_gate

__all__ = ["chunk_delta_rule", "chunk_gated_delta_rule", "chunk_gdn", "chunk_gla", "chunk_kda", "chunk_lightning_attn",
           "chunk_linear_attn", "chunk_retention", "chunk_simple_gla", "fused_chunk_based", "fused_chunk_linear_attn",
           "fused_chunk_retention", "fused_chunk_simple_gla", "fused_recurrent_delta_rule",
           "fused_recurrent_gated_delta_rule", "fused_recurrent_gdn", "fused_recurrent_gla", "fused_recurrent_kda",
           "fused_recurrent_lightning_attn", "fused_recurrent_linear_attn", "fused_recurrent_retention",
           "fused_recurrent_simple_gla", "parallel_based", "parallel_retention", "parallel_simple_gla"]

# Of what the functions below take besides the arguments of every call: the names that go on to tkq's function, as they
# are. An argument that such a function gets is opened here, and nowhere else: all of them hand theirs to `_extra`.
_PACKED = frozenset({"cu_seqlens", "state_v_first"})
PASSED_ON = {"linear_attn": _PACKED, "gated_delta_rule": _PACKED}


def _extra(name, op, **given):
    """Keywords for tkq's function, of what was given and is neither None nor False."""
    passed = {}
    for argument, value in given.items():
        if value is None or value is False:
            continue
        if argument not in PASSED_ON[op]:
            shown = f"a {type(value).__name__}" if isinstance(value, Tensor) else repr(value)
            raise NotImplementedError(f"{name}: {argument}: got {shown}, which tkq.{op} has not")
        passed[argument] = value
    return passed


# ---- linear attention -----------------------------------------------------------------------------------------------


def _linear(name, q, k, v, g, scale, initial_state, output_final_state, **given):
    found = linear_attn(q, k, v, wide_gate(g), scale, initial_state, output_final_state,
                        **_extra(name, "linear_attn", **given))
    return found if output_final_state else (found, None)


def chunk_simple_gla(q: Tensor, k: Tensor, v: Tensor, g: Tensor | None = None, g_gamma: Tensor | None = None,
                     scale: float | None = None, initial_state: Tensor | None = None, output_final_state: bool = False,
                     state_v_first: bool = False, cu_seqlens: Tensor | None = None, cu_seqlens_cpu=None, *,
                     chunk_size: int | None = None):
    """`tkq.linear_attn`: g (B, T, HV), logarithms of decays; or g_gamma (HV,), a constant for each head."""
    return _simple_gla("chunk_simple_gla", q, k, v, g, g_gamma, scale, initial_state, output_final_state,
                       state_v_first=state_v_first, cu_seqlens=cu_seqlens)


def fused_chunk_simple_gla(q: Tensor, k: Tensor, v: Tensor, g: Tensor | None = None, g_gamma: Tensor | None = None,
                           scale: float | None = None, initial_state: Tensor | None = None,
                           output_final_state: bool = False, cu_seqlens: Tensor | None = None):
    """As `chunk_simple_gla`."""
    return _simple_gla("fused_chunk_simple_gla", q, k, v, g, g_gamma, scale, initial_state, output_final_state,
                       cu_seqlens=cu_seqlens)


def fused_recurrent_simple_gla(q: Tensor, k: Tensor, v: Tensor, g: Tensor | None = None, g_gamma: Tensor | None = None,
                               scale: float | None = None, initial_state: Tensor | None = None,
                               output_final_state: bool = False, reverse: bool = False, state_v_first: bool = False,
                               cu_seqlens: Tensor | None = None):
    """As `chunk_simple_gla`."""
    return _simple_gla("fused_recurrent_simple_gla", q, k, v, g, g_gamma, scale, initial_state, output_final_state,
                       reverse=reverse, state_v_first=state_v_first, cu_seqlens=cu_seqlens)


def parallel_simple_gla(q: Tensor, k: Tensor, v: Tensor, g: Tensor | None = None, scale: float | None = None,
                        output_attentions: bool = False, cu_seqlens: Tensor | None = None, cu_seqlens_cpu=None):
    """As `chunk_simple_gla`, without states: the pair (o, None)."""
    return _simple_gla("parallel_simple_gla", q, k, v, g, None, scale, None, False,
                       output_attentions=output_attentions, cu_seqlens=cu_seqlens)


def _simple_gla(name, q, k, v, g, g_gamma, scale, initial_state, output_final_state, **given):
    if g is not None and g_gamma is not None:
        raise NotImplementedError(f"{name}: g_gamma: got a tensor with g, allowed is one of them")
    of_rank(name, "g", g, 3)
    of_rank(name, "g_gamma", g_gamma, 1)
    gates = g if g_gamma is None else g_gamma
    return _linear(name, q, k, v, gates, scale, initial_state, output_final_state, **given)


def chunk_gla(q: Tensor, k: Tensor, v: Tensor, g: Tensor, scale: float | None = None,
              initial_state: Tensor | None = None, output_final_state: bool = False, state_v_first: bool = False,
              cu_seqlens: Tensor | None = None, cu_seqlens_cpu=None):
    """`tkq.linear_attn` with g (B, T, HV, K), logarithms of decays for each column of k."""
    check.tensor("chunk_gla: g", g)
    of_rank("chunk_gla", "g", g, 4)
    return _linear("chunk_gla", q, k, v, g, scale, initial_state, output_final_state, state_v_first=state_v_first,
                   cu_seqlens=cu_seqlens)


def fused_recurrent_gla(q: Tensor, k: Tensor, v: Tensor, gk: Tensor | None = None, gv: Tensor | None = None,
                        scale: float | None = None, initial_state: Tensor | None = None,
                        output_final_state: bool = False, reverse: bool = False, state_v_first: bool = False,
                        cu_seqlens: Tensor | None = None):
    """As `chunk_gla`, whose g is gk, or None: nothing decays."""
    of_rank("fused_recurrent_gla", "gk", gk, 4)
    return _linear("fused_recurrent_gla", q, k, v, gk, scale, initial_state, output_final_state, gv=gv,
                   reverse=reverse, state_v_first=state_v_first, cu_seqlens=cu_seqlens)


def chunk_retention(q: Tensor, k: Tensor, v: Tensor, scale: float | None = None, initial_state: Tensor | None = None,
                    output_final_state: bool = False, cu_seqlens: Tensor | None = None, *,
                    chunk_size: int | None = None):
    """`tkq.linear_attn` with RetNet's decays: 1 - 2^(-5 - h) of head h."""
    name = "chunk_retention"
    return _linear(name, q, k, v, retention(name, q, v), scale, initial_state, output_final_state,
                   cu_seqlens=cu_seqlens)


def fused_chunk_retention(q: Tensor, k: Tensor, v: Tensor, scale: float | None = None,
                          initial_state: Tensor | None = None, output_final_state: bool = False,
                          cu_seqlens: Tensor | None = None):
    """As `chunk_retention`."""
    name = "fused_chunk_retention"
    return _linear(name, q, k, v, retention(name, q, v), scale, initial_state, output_final_state,
                   cu_seqlens=cu_seqlens)


def fused_recurrent_retention(q: Tensor, k: Tensor, v: Tensor, scale: float | None = None,
                              initial_state: Tensor | None = None, output_final_state: bool = False,
                              reverse: bool = False, state_v_first: bool = False, cu_seqlens: Tensor | None = None):
    """As `chunk_retention`."""
    name = "fused_recurrent_retention"
    return _linear(name, q, k, v, retention(name, q, v), scale, initial_state, output_final_state,
                   reverse=reverse, state_v_first=state_v_first, cu_seqlens=cu_seqlens)


def parallel_retention(q: Tensor, k: Tensor, v: Tensor, scale: float | None = None, output_attentions: bool = False,
                       cu_seqlens: Tensor | None = None):
    """As `chunk_retention`, without states: the pair (o, None)."""
    name = "parallel_retention"
    return _linear(name, q, k, v, retention(name, q, v), scale, None, False,
                   output_attentions=output_attentions, cu_seqlens=cu_seqlens)


def chunk_lightning_attn(q: Tensor, k: Tensor, v: Tensor, layer_idx: int, num_layers: int, scale: float | None = None,
                         initial_state: Tensor | None = None, output_final_state: bool = False,
                         cu_seqlens: Tensor | None = None, *, chunk_size: int | None = None):
    """`tkq.linear_attn` with the decays of Lightning Attention in a layer of a model: exp(-8 h / H (1 - layer_idx /
    num_layers)) of head h of H."""
    name = "chunk_lightning_attn"
    return _linear(name, q, k, v, lightning(name, q, v, layer_idx, num_layers), scale, initial_state,
                   output_final_state, cu_seqlens=cu_seqlens)


def fused_recurrent_lightning_attn(q: Tensor, k: Tensor, v: Tensor, layer_idx: int, num_layers: int,
                                   scale: float | None = None, initial_state: Tensor | None = None,
                                   output_final_state: bool = False, reverse: bool = False,
                                   cu_seqlens: Tensor | None = None):
    """As `chunk_lightning_attn`."""
    name = "fused_recurrent_lightning_attn"
    return _linear(name, q, k, v, lightning(name, q, v, layer_idx, num_layers), scale, initial_state,
                   output_final_state, reverse=reverse, cu_seqlens=cu_seqlens)


def chunk_linear_attn(q: Tensor, k: Tensor, v: Tensor, scale: float | None = None, initial_state=None,
                      output_final_state: bool = False, normalize: bool = True, cu_seqlens: Tensor | None = None):
    """`tkq.linear_attn` without decays. normalize: o is divided by scale * q . (sum of k so far) + 1e-10, by PyTorch in
    float32; states are then pairs (state, sum of k (B, 1, H, K) float32); an initial one may be a state alone."""
    return _normalized("chunk_linear_attn", q, k, v, scale, initial_state, output_final_state, normalize,
                       cu_seqlens=cu_seqlens)


def fused_chunk_linear_attn(q: Tensor, k: Tensor, v: Tensor, scale: float | None = None, initial_state=None,
                            output_final_state: bool = False, normalize: bool = True,
                            cu_seqlens: Tensor | None = None):
    """As `chunk_linear_attn`."""
    return _normalized("fused_chunk_linear_attn", q, k, v, scale, initial_state, output_final_state, normalize,
                       cu_seqlens=cu_seqlens)


def fused_recurrent_linear_attn(q: Tensor, k: Tensor, v: Tensor, scale: float | None = None, initial_state=None,
                                output_final_state: bool = False, reverse: bool = False, normalize: bool = False,
                                cu_seqlens: Tensor | None = None):
    """As `chunk_linear_attn`, but that normalize is False where not given."""
    return _normalized("fused_recurrent_linear_attn", q, k, v, scale, initial_state, output_final_state, normalize,
                       reverse=reverse, cu_seqlens=cu_seqlens)


def _normalized(name, q, k, v, scale, initial_state, output_final_state, normalize, **given):
    check.flag(f"{name}: normalize", normalize)
    if not normalize:
        return _linear(name, q, k, v, None, scale, initial_state, output_final_state, **given)
    if given.get("cu_seqlens") is not None:
        raise NotImplementedError(f"{name}: cu_seqlens: got a Tensor with normalize=True, allowed is one of them")
    state, z = state_and_sum(name, q, initial_state)
    o, last = _linear(name, q, k, v, None, scale, state, output_final_state, **given)
    sums = k.float().cumsum(1)
    sums = sums if z is None else sums + z
    heads = o.shape[2] // q.shape[2]
    norm = (q.shape[3]**-0.5 if scale is None else scale) * (q.float() * sums).sum(-1, keepdim=True) + 1e-10
    o = (o / norm.repeat_interleave(heads, 2)).to(o.dtype)
    if not output_final_state:
        return o, None
    if sums.shape[1]:
        z = sums[:, -1:]
    return o, (last, sums.new_zeros(len(k), 1, *k.shape[2:]) if z is None else z)


# ---- the delta rule -------------------------------------------------------------------------------------------------


def _delta(name, q, k, v, g, beta, scale, initial_state, output_final_state, l2norm, given, options):
    sigmoid = options.pop("use_beta_sigmoid_in_kernel", False)
    check.flag(f"{name}: use_beta_sigmoid_in_kernel", sigmoid)
    beta = wide_beta(name, beta, sigmoid)
    if not sigmoid and options.get("allow_neg_eigval"):
        raise ValueError(f"{name}: allow_neg_eigval: got True, allowed with use_beta_sigmoid_in_kernel=True alone")
    if not options.get("use_gate_in_kernel"):
        g = wide_gate(g)
    found = gated_delta_rule(q, k, v, g, beta, scale, initial_state, output_final_state, l2norm,
                             **options, **_extra(name, "gated_delta_rule", **given))
    return found if output_final_state else (found, None)


def chunk_gated_delta_rule(q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor, scale: float | None = None,
                           initial_state: Tensor | None = None, output_final_state: bool = False,
                           use_qk_l2norm_in_kernel: bool = False, use_beta_sigmoid_in_kernel: bool = False,
                           allow_neg_eigval: bool = False, state_v_first: bool = False,
                           cu_seqlens: Tensor | None = None, cu_seqlens_cpu=None, chunk_indices=None, cp_context=None,
                           *, use_gate_in_kernel: bool = False, A_log: Tensor | None = None,
                           dt_bias: Tensor | None = None, chunk_size: int | None = None):
    """`tkq.gated_delta_rule`. use_beta_sigmoid_in_kernel: beta is sigmoid(beta), with allow_neg_eigval twice that."""
    of_rank("chunk_gated_delta_rule", "g", g, 3)
    given = dict(state_v_first=state_v_first, cu_seqlens=cu_seqlens, cp_context=cp_context)
    options = dict(use_beta_sigmoid_in_kernel=use_beta_sigmoid_in_kernel, allow_neg_eigval=allow_neg_eigval,
                   use_gate_in_kernel=use_gate_in_kernel, A_log=A_log, dt_bias=dt_bias)
    return _delta("chunk_gated_delta_rule", q, k, v, g, beta, scale, initial_state, output_final_state,
                  use_qk_l2norm_in_kernel, given, options)


def fused_recurrent_gated_delta_rule(q: Tensor, k: Tensor, v: Tensor, g: Tensor | None = None, gk: Tensor | None = None,
                                     gv: Tensor | None = None, beta: Tensor | None = None, scale: float | None = None,
                                     initial_state: Tensor | None = None, output_final_state: bool = False,
                                     use_qk_l2norm_in_kernel: bool = False, use_gate_in_kernel: bool = False,
                                     A_log: Tensor | None = None, dt_bias: Tensor | None = None,
                                     use_beta_sigmoid_in_kernel: bool = False, allow_neg_eigval: bool = False,
                                     state_v_first: bool = False, cu_seqlens: Tensor | None = None):
    """As `chunk_gated_delta_rule`; beta is 1 where not given."""
    of_rank("fused_recurrent_gated_delta_rule", "g", g, 3)
    beta = ones_like_beta("fused_recurrent_gated_delta_rule", v) if beta is None else beta
    given = dict(gk=gk, gv=gv, state_v_first=state_v_first, cu_seqlens=cu_seqlens)
    options = dict(use_beta_sigmoid_in_kernel=use_beta_sigmoid_in_kernel, allow_neg_eigval=allow_neg_eigval,
                   use_gate_in_kernel=use_gate_in_kernel, A_log=A_log, dt_bias=dt_bias)
    return _delta("fused_recurrent_gated_delta_rule", q, k, v, g, beta, scale, initial_state, output_final_state,
                  use_qk_l2norm_in_kernel, given, options)


def chunk_kda(q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor, scale: float | None = None,
              initial_state: Tensor | None = None, output_final_state: bool = False,
              use_qk_l2norm_in_kernel: bool = False, use_gate_in_kernel: bool = False,
              use_beta_sigmoid_in_kernel: bool = False, allow_neg_eigval: bool = False, safe_gate: bool = False,
              lower_bound: float | None = None, disable_recompute: bool = False,
              return_intermediate_states: bool = False, state_v_first: bool = False, cu_seqlens: Tensor | None = None,
              cu_seqlens_cpu=None, cp_context=None, use_graph: bool = False, max_num_seqs: int | None = None, *,
              A_log: Tensor | None = None, dt_bias: Tensor | None = None, chunk_size: int | None = None):
    """`tkq.gated_delta_rule` with g (B, T, HV, K), logarithms of decays for each column of k: Kimi Delta Attention.
    With use_gate_in_kernel they are made of g, A_log (HV numbers) and dt_bias (HV K), by PyTorch in float32:
    -exp(A_log) softplus(g + dt_bias), or with lower_bound lower_bound sigmoid(exp(A_log) (g + dt_bias)); lower_bound is
    passed over without. So are safe_gate, disable_recompute, use_graph and max_num_seqs: how fla computes."""
    g = column_gates("chunk_kda", g, use_gate_in_kernel, A_log, dt_bias, lower_bound)
    given = dict(cp_context=cp_context, return_intermediate_states=return_intermediate_states,
                 state_v_first=state_v_first, cu_seqlens=cu_seqlens)
    options = dict(use_beta_sigmoid_in_kernel=use_beta_sigmoid_in_kernel, allow_neg_eigval=allow_neg_eigval)
    return _delta("chunk_kda", q, k, v, g, beta, scale, initial_state, output_final_state, use_qk_l2norm_in_kernel,
                  given, options)


def fused_recurrent_kda(q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor, A_log: Tensor | None = None,
                        dt_bias: Tensor | None = None, scale: float | None = None,
                        initial_state: Tensor | None = None, output_final_state: bool = False,
                        use_qk_l2norm_in_kernel: bool = False, use_gate_in_kernel: bool = False,
                        use_beta_sigmoid_in_kernel: bool = False, allow_neg_eigval: bool = False,
                        lower_bound: float | None = None, state_v_first: bool = False,
                        cu_seqlens: Tensor | None = None):
    """As `chunk_kda`."""
    name = "fused_recurrent_kda"
    g = column_gates(name, g, use_gate_in_kernel, A_log, dt_bias, lower_bound)
    options = dict(use_beta_sigmoid_in_kernel=use_beta_sigmoid_in_kernel, allow_neg_eigval=allow_neg_eigval)
    return _delta(name, q, k, v, g, beta, scale, initial_state, output_final_state, use_qk_l2norm_in_kernel,
                  dict(state_v_first=state_v_first, cu_seqlens=cu_seqlens), options)


def chunk_delta_rule(q: Tensor, k: Tensor, v: Tensor, beta: Tensor, scale: float | None = None,
                     initial_state: Tensor | None = None, output_final_state: bool = False,
                     use_qk_l2norm_in_kernel: bool = False, cu_seqlens: Tensor | None = None, cu_seqlens_cpu=None, *,
                     chunk_size: int | None = None):
    """`tkq.gated_delta_rule` without decays."""
    return _delta("chunk_delta_rule", q, k, v, None, beta, scale, initial_state, output_final_state,
                  use_qk_l2norm_in_kernel, dict(cu_seqlens=cu_seqlens), {})


def fused_recurrent_delta_rule(q: Tensor, k: Tensor, v: Tensor, beta: Tensor | None = None, scale: float | None = None,
                               initial_state: Tensor | None = None, output_final_state: bool = False,
                               use_qk_l2norm_in_kernel: bool = False, cu_seqlens: Tensor | None = None):
    """As `chunk_delta_rule`; beta is 1 where not given."""
    beta = ones_like_beta("fused_recurrent_delta_rule", v) if beta is None else beta
    return _delta("fused_recurrent_delta_rule", q, k, v, None, beta, scale, initial_state, output_final_state,
                  use_qk_l2norm_in_kernel, dict(cu_seqlens=cu_seqlens), {})


chunk_gdn, fused_recurrent_gdn = chunk_gated_delta_rule, fused_recurrent_gated_delta_rule


# ---- Based ----------------------------------------------------------------------------------------------------------


def parallel_based(q: Tensor, k: Tensor, v: Tensor, scale: float | None = None, use_norm: bool = True,
                   head_first: bool = False) -> Tensor:
    """`tkq.based`, in chunks; o alone. head_first: tensors are (B, H, T, ..), as o is then, a view."""
    check.flag("parallel_based: head_first", head_first)
    if not head_first:
        return based(q, k, v, scale, use_norm)
    for name, x in (("q", q), ("k", k), ("v", v)):
        check.tensor(f"parallel_based: {name}", x)
        check.rank(f"parallel_based: {name}", x, 4)
    return based(*(x.transpose(1, 2) for x in (q, k, v)), scale, use_norm).transpose(1, 2)


fused_chunk_based = parallel_based
