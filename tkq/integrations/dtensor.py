"""How tkq's ops go on DTensors: which placements each takes as they are, for rows, heads and columns that are spread
over a mesh. What no rule allows is gathered first, as DTensor does it.

The first call on a DTensor brings the rules. `torch.compile` traces past that: import this module before.
"""
from functools import partial
from types import SimpleNamespace

import torch
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard
from torch.distributed.tensor._dtensor_spec import DTensorSpec
from torch.distributed.tensor._op_schema import RuntimeSchemaInfo
from torch.distributed.tensor.experimental import register_sharding

import tkq
from tkq.integrations import along_sequences

S, R, P = Shard, Replicate(), Partial()

# A rule: what an op is called with -> [(placements of its results, {argument: placement})] for one dimension of a mesh,
# beside the one where all is replicated, which goes without saying, as do replicated arguments. rstd, and whatever else
# one op keeps for another, has one number for each row of the local tensor: sharded along its only dimension, whichever
# of x's is; only that other op reads it, by the same rule. Moved to where x does not lie it would be of other
# rows: so such ops take x where it lies, or gather it.


def _lies(x, dimensions):
    """Those of the first dimensions along which x is sharded."""
    return sorted({p.dim for p in x.placements if p.is_shard() and p.dim < dimensions})


def _norm(g, layer):
    rows = g.x.ndim - (1 if g.weight is None else g.weight.ndim)
    for i in _lies(g.x, rows) if g.save else range(rows):
        saved = S(0) if g.save else R
        yield (S(i), S(i) if g.total_dtype else R, saved, saved if layer else R), dict(x=S(i), residual=S(i))


def _norm_backward(g):
    for i in _lies(g.x, g.x.ndim - (1 if g.weight is None else g.weight.ndim)):
        yield ((S(i) if g.need_dx else R, P if g.need_dweight else R, P if g.need_dbias else R,
                S(i) if g.dresidual_dtype else R), dict(dy=S(i), x=S(i), rstd=S(0), mean=S(0), dtotal=S(i)))


def _quantised_norm(g):
    if g.granularity == "row":
        yield (S(0), S(0), S(0) if g.total_dtype else R), dict(x=S(0), residual=S(0))


def _softmax(g):
    x = g.y if hasattr(g, "y") else g.x
    for i in range(x.ndim - 1):
        yield (S(i),), dict(x=S(i), y=S(i), dy=S(i))


def _losses_of_rows(g):
    for i in _lies(g.logits, g.logits.ndim - 1) if g.reduction == "none" else ():
        yield (S(i), S(0)), dict(logits=S(i), target=S(i))


def _losses_of_rows_backward(g):
    for i in _lies(g.logits, g.logits.ndim - 1) if g.reduction == "none" else ():
        yield (S(i),), dict(logits=S(i), target=S(i), dloss=S(i), saved=S(0))


def _gated(g):
    for i in range(g.gate.ndim if g.packing == "apart" else g.gate.ndim - 1):
        yield (S(i),), dict(gate=S(i), up=S(i))


def _gated_backward(g):
    apart = g.packing == "apart"
    for i in range(g.gate.ndim if apart else g.gate.ndim - 1):
        yield ((S(i) if g.need_gate or not apart else R, S(i) if g.need_up and apart else R),
               dict(dy=S(i), gate=S(i), up=S(i)))


def _rope(g):
    x = g.x if hasattr(g, "x") else g.q
    heads = dict.fromkeys("xqk", S(x.ndim - 2))
    yield (S(x.ndim - 2),) * g.results, heads
    if g.cu_seqlens is g.offsets is g.position_ids is None and x.ndim == 4:
        table = S(0) if g.cos.ndim == 3 and g.cos.shape[0] > 1 else R  # of each sequence, or of all
        yield (S(0),) * g.results, dict(dict.fromkeys("xqk", S(0)), cos=table, sin=table)


def _whole_groups(g):
    """A rank with some of the K/V heads has the query heads that go with them."""
    return g.k.shape[-2] % g.k.mesh.size() == 0


def _attention(g):
    if g.q.ndim == 4:
        yield (S(0), S(0) if g.return_lse else R), dict(q=S(0), k=S(0), v=S(0))
    if not _whole_groups(g):
        return
    heads, of_lse = S(g.q.ndim - 2), S(g.q.ndim - 3)
    yield (heads, of_lse if g.return_lse else R), dict(q=heads, k=heads, v=heads, sinks=S(0))


def _quantised_heads(g):
    yield (S(0),) * 6, dict.fromkeys("qkv", S(0))
    if _whole_groups(g):
        yield (S(2),) * 3 + (S(1),) * 3, dict.fromkeys("qkv", S(2))


def _float8_attention(g):
    descales = "q_descale", "k_descale", "v_descale"
    if g.q.ndim == 4:
        yield (S(0), S(0) if g.return_lse else R), dict.fromkeys((*"qkv", *descales), S(0))
    if _whole_groups(g):
        q, of_lse, k = S(g.q.ndim - 2), S(g.q.ndim - 3), S(g.k.ndim - 2)  # heads; pages have another dimension
        yield (q, of_lse if g.return_lse else R), dict(q=q, k=k, v=k) | dict.fromkeys(descales, S(1))


def _attention_backward(g):
    needs = g.need_dq, g.need_dk, g.need_dv, g.need_dsinks
    names = ("do", "q", "k", "v", "o")

    def where(placement, of_sinks):
        return tuple(p if need else R for need, p in zip(needs, (placement,) * 3 + (of_sinks,)))

    if g.q.ndim == 4:
        yield where(S(0), P), dict.fromkeys((*names, "lse", "dlse"), S(0))
    if not _whole_groups(g):
        return
    heads, of_lse = S(g.q.ndim - 2), S(g.q.ndim - 3)
    yield where(heads, S(0)), dict(dict.fromkeys(names, heads), lse=of_lse, dlse=of_lse, sinks=S(0))


def _linear_attention(g):
    """States have heads where tokens have rows. Packed sequences are of one row."""
    final = g.output_final_state
    if g.cu_seqlens is None:
        yield (S(0), S(0) if final else R), dict(_sequences(g.g, 0), q=S(0), k=S(0), v=S(0), initial_state=S(0))
    if g.q.shape[2] % g.q.mesh.size() == 0:
        yield (S(2), S(1) if final else R), dict(_sequences(g.g, 2), q=S(2), k=S(2), v=S(2), initial_state=S(1))


def _delta_rule(g):
    """As linear attention; beta lies as gates of tokens do."""
    for results, given in _linear_attention(g):
        yield results, dict(given, beta=given["q"])


def _with_checkpoints(rule):
    """As `rule`, with checkpoints: split by batch and heads as tokens are; of packed sequences by heads alone."""
    def places(g):
        packed = getattr(g, "cu_seqlens", None) is not None
        for results, given in rule(g):
            yield (*results, S(1) if packed else results[0]), given

    return places


def _hedgehog(g):
    """Sequences are apart, and so are heads, each of which has maps and factors of its own."""
    yield (S(0),) * 5, dict.fromkeys(("q", "k", "v"), S(0))
    if g.q.shape[2] % g.q.mesh.size() == 0:
        yield (S(2),) * 5, dict(dict.fromkeys(("q", "k", "v"), S(2)), **_OF_HEADS)


def _hedgehog_backward(g):
    def where(of_tokens, of_heads):
        return tuple(p if need else R for need, p in zip(g.needs, (of_tokens,) * 3 + (of_heads,) * 4))

    tokens = "do", "o", "inverse", "most", "q_features", "k_features", "q", "k", "v"
    yield where(S(0), P), dict.fromkeys(tokens, S(0))
    if g.q.shape[2] % g.q.mesh.size() == 0:
        yield where(S(2), S(0)), dict(dict.fromkeys(tokens, S(2)), **_OF_HEADS)


_OF_HEADS = dict.fromkeys(("q_map", "k_map", "linear_factor", "window_factor"), S(0))


def _pool(g, name="initial_state"):
    """What is written in place lies whole on each rank."""
    pool = getattr(g, name)
    if any(p != R for p in pool.placements):
        raise NotImplementedError(f"{name}: is placed {pool.placements}; a pool that is written in place may be "
                                  "replicated, or a local tensor")
    return ()


def _step(g):
    """A state is where it is: it is written to. Rows that state_indices names are the same for each rank."""
    if g.state_indices is None and g.state.shape[0] == g.q.shape[0]:
        tokens = dict.fromkeys(("q", "k", "v", "beta", "state"), S(0))
        yield (S(0),), dict(_of_tokens(g.g, 0), **tokens)
    if g.q.shape[2] % g.q.mesh.size() == 0:
        yield (S(2),), dict(_of_tokens(g.g, 2), **dict.fromkeys(("q", "k", "v", "beta"), S(2)), state=S(1))


def _of_tokens(gates, dimension):
    return dict(g=S(dimension)) if gates is not None and gates.ndim == 4 else _sequences(gates, dimension)


def _ssd_step(g):
    of_sequences, heads = dict.fromkeys(("state", "x", "dt", "B", "C", "z"), S(0)), S(g.x.ndim - 2)
    if g.state_batch_indices is None and g.state.shape[0] == g.x.shape[0]:
        yield (S(0),), of_sequences
    if g.B.shape[-2] % g.B.mesh.size() == 0:
        yield (heads,), dict(dict.fromkeys(("x", "dt", "B", "C", "z"), heads), state=S(1),
                             **dict.fromkeys(("A", "D", "dt_bias"), S(0)))


def _linear_attention_backward(g):
    needs = g.need_q, g.need_k, g.need_v, g.need_g, g.need_initial
    for dimension, of_states in _dimensions(g):
        gates = _sequences(g.g, dimension).get("g", P)
        results = *(S(dimension),) * 3, gates, S(of_states)
        yield (tuple(p if need else R for need, p in zip(needs, results)),
               dict(_sequences(g.g, dimension), **dict.fromkeys(("do", "q", "k", "v"), S(dimension)),
                    **dict.fromkeys(("dstate", "initial_state"), S(of_states))))


def _delta_rule_backward(g):
    needs = g.need_q, g.need_k, g.need_v, g.need_g, g.need_beta, g.need_initial
    for dimension, of_states in _dimensions(g):
        tokens, states = S(dimension), S(of_states)
        yield (tuple(p if need else R for need, p in zip(needs, (*(tokens,) * 5, states))),
               dict(dict.fromkeys(("do", "q", "k", "v", "g", "beta"), tokens), dstate=states, initial_state=states))


def _ssd_ways(g):
    """How tensors may lie: of tokens, of states, of heads alone (A, D, dt_bias), B and C, and the gradients of the
    latter two kinds. By sequences, unless they are packed, in one row; by heads: with their groups, or with the one
    group that all share."""
    if getattr(g, "cu_seqlens", None) is None:
        yield S(0), S(0), R, S(0), P, S(0)
    groups, ranks = g.B.shape[2], g.B.mesh.size()
    if groups % ranks == 0:
        yield S(2), S(1), S(0), S(2), S(0), S(2)
    elif groups == 1 and g.x.shape[2] % ranks == 0:
        yield S(2), S(1), S(0), R, S(0), P


def _ssd_given(tokens, states, heads, groups):
    return dict(x=tokens, dt=tokens, A=heads, B=groups, C=groups, D=heads, z=tokens, dt_bias=heads,
                initial_states=states)


def _ssd(g):
    for tokens, states, heads, groups, *_ in _ssd_ways(g):
        yield (tokens, states if g.return_final_states else R), _ssd_given(tokens, states, heads, groups)


def _ssd_pool(g):
    return _pool(g, "initial_states")


def _ssd_backward(g):
    names = "x", "dt", "A", "B", "C", "D", "z", "dt_bias", "initial"
    for tokens, states, heads, groups, of_heads, of_groups in _ssd_ways(g):
        found = _ssd_given(tokens, states, of_heads, of_groups).values()
        yield (tuple(p if getattr(g, f"need_{name}") else R for name, p in zip(names, found)),
               dict(_ssd_given(tokens, states, heads, groups), dy=tokens, dstates=states))


def _based(g):
    """Sequences, or heads."""
    for at in (0, *((2,) if g.q.shape[2] % g.q.mesh.size() == 0 else ())):
        yield (S(at), S(at) if g.use_norm else R), dict.fromkeys(("q", "k", "v"), S(at))


def _based_backward(g):
    needs = g.need_q, g.need_k, g.need_v
    for at in (0, *((2,) if g.q.shape[2] % g.q.mesh.size() == 0 else ())):
        yield (tuple(S(at) if need else R for need in needs),
               dict.fromkeys(("do", "q", "k", "v", "o", *(("sums",) if g.use_norm else ())), S(at)))


def _channels_step(g):
    """As `_step`."""
    last = S(g.x.ndim - 1)
    if g.cache_indices is None and g.conv_states.shape[0] == g.x.shape[0]:
        yield (S(0),), dict(x=S(0), conv_states=S(0))
    yield (last,), dict(x=last, conv_states=S(1), weight=S(0), bias=S(0))


def _dimensions(g):
    """(of tokens, of states): along which a backward may be spread, sequences and heads."""
    heads = g.q.shape[2] % g.q.mesh.size() == 0
    return ((0, 0),) * (g.cu_seqlens is None) + ((2, 1),) * heads


def _sequences(gates, dimension):
    """How logarithms of decays lie, of tokens or of heads alone: the latter are the same for each sequence."""
    of_heads = gates is not None and gates.ndim <= 1
    return dict(g=S(dimension)) if not of_heads else dict(g=S(0)) if dimension == 2 else {}


def _gemm(g):
    last = g.a.ndim - 1
    gated = "glu" in g.activation
    if last == 2:
        yield (S(0),), dict(a=S(0), b=S(0), c=S(0))
    yield (S(last - 1),), dict(a=S(last - 1), c=S(last - 1))
    if not gated:
        yield (S(last),), dict(b=S(last), bias=S(0), c=S(last))
    if not g.activation:
        yield (P,), dict(a=S(last), b=S(last - 1), bias=P, c=P)


def _grouped_gemm(g):
    whole, unit = g.b.ndim == 2, 8 * g.a.mesh.size()  # whole: the gradient of b, (M, K) by (K, N) to (G, M, N)
    if g.scale_a is None and g.b.shape[-1] % unit == 0:  # sizes of each process are multiples of 8, too
        yield (S(2 if whole else 1),), dict(b=S(g.b.ndim - 1))
    if g.scale_a is None and g.a.shape[0 if whole else 1] % unit == 0:
        yield ((S(1),), dict(a=S(0))) if whole else ((P,), dict(a=S(1), b=S(1)))


def _fp8_gemm(g):
    if g.scale_a.ndim == 2 and tuple(g.scale_a.shape) == (g.a.shape[0], 1):
        yield (S(0),), dict(a=S(0), scale_a=S(0))
        if tuple(g.scale_b.shape) == (1, g.b.shape[1]):
            yield (S(1),), dict(b=S(1), scale_b=S(1), bias=S(0))


def _quantised(g):
    if g.granularity == "row" and not g.transpose and g.unit == 1:  # whose scales are of whole columns
        yield (S(0), S(0), R, R), dict(x=S(0))


RULES = {
    "rmsnorm": lambda g: _norm(g, False), "layernorm": lambda g: _norm(g, True), "norm_backward": _norm_backward,
    "rmsnorm_quant": _quantised_norm, "layernorm_quant": _quantised_norm, "softmax": _softmax,
    "softmax_backward": _softmax, "cross_entropy": _losses_of_rows, "cross_entropy_backward": _losses_of_rows_backward,
    "gated": _gated, "gated_backward": _gated_backward, "rope": _rope, "rope_qk": _rope, "flash_attn": _attention,
    "flash_attn_fp8": _float8_attention, "flash_attn_fp8_varlen": _float8_attention, "quantize_qkv": _quantised_heads,
    "flash_attn_backward": _attention_backward, "flash_attn_varlen": _attention,
    "flash_attn_varlen_backward": _attention_backward, "linear_attn": _linear_attention,
    "linear_attn_backward": _linear_attention_backward, "gated_delta_rule": _delta_rule,
    "gated_delta_rule_backward": _delta_rule_backward, "linear_attn_pool": _pool, "gated_delta_rule_pool": _pool,
    "linear_attn_checkpoints": _with_checkpoints(_linear_attention),
    "gated_delta_rule_checkpoints": _with_checkpoints(_delta_rule), "mamba2_ssd_checkpoints": _with_checkpoints(_ssd),
    "mamba2_ssd_pool": _ssd_pool,
    "mamba2_ssd": _ssd, "mamba2_ssd_backward": _ssd_backward, "hedgehog": _hedgehog,
    "hedgehog_backward": _hedgehog_backward, "based": _based, "based_backward": _based_backward,
    "causal_conv1d": along_sequences.channels, "causal_conv1d_backward": along_sequences.channels_backward,
    "causal_conv1d_step": _channels_step,
    "scan": along_sequences.scan, "scan_backward": along_sequences.scan_backward,
    "fft_conv": along_sequences.heads_of_tokens, "fft_conv_backward": along_sequences.heads_of_tokens_backward,
    "linear_attn_step": _step, "gated_delta_rule_step": _step, "ssd_step": _ssd_step, "gemm": _gemm,
    "grouped_gemm": _grouped_gemm, "fp8_gemm": _fp8_gemm, "quantize_fp8": _quantised,
    # of whole losses, and of logits that are nowhere whole: everything is gathered
    "cross_entropy_and_gradient": lambda g: (), "linear_cross_entropy": lambda g: (),
    "linear_cross_entropy_backward": lambda g: (),
    # of caches that all sequences share
    **dict.fromkeys(("flash_attn_with_kvcache", "mla_decode", "plan_decode", "kv_append", "merge_state",
                    "cascade_attention"), lambda g: ()),
    # whose functions are asked by the numbers of batch elements and heads
    **dict.fromkeys(("flex_attention", "flex_attention_backward"), lambda g: ()),
}


def _register():
    for name, module in tkq._PUBLIC.items():
        if module.endswith("ops"):
            getattr(tkq, name)  # its module makes the op
    for name, rule in RULES.items():
        op = getattr(torch.ops.tkq, name).default
        register_sharding(op)(partial(_placements, op, rule))
        # By itself DTensor remembers what it found by the tensors alone, where no int comes before: flags decide, too.
        DTensor._op_dispatcher.sharding_propagator.op_to_schema_info[op] = RuntimeSchemaInfo(0, needs_pytree=True)


def _placements(op, rule, *args):
    """[(results' placements, arguments' placements)], as `register_sharding` has them: None for what is no tensor."""
    given = {a.name: a.default_value for a in op._schema.arguments} | {
        a.name: value for a, value in zip(op._schema.arguments, args)}
    tensors = {name for name, value in given.items() if isinstance(value, DTensorSpec)}
    results = len(op._schema.returns)
    found = [((R,) * results, {}), *rule(SimpleNamespace(results=results, **given))]
    for name in (a.name for a in op._schema.arguments if a.alias_info is not None and a.alias_info.is_write):
        if name in tensors:
            found = _where_it_is(op, name, given[name], found)
    of = lambda name, inputs: [R for _ in given[name]] if _is_list(given[name]) else [
        inputs.get(name, R) if name in tensors else None]
    return [(list(outputs), [place for name in list(given)[:len(args)] for place in of(name, inputs)])
            for outputs, inputs in found]


def _is_list(value):
    return isinstance(value, (list, tuple)) and any(isinstance(x, DTensorSpec) for x in value)


def _where_it_is(op, name, spec, found):
    """Those of the placements that leave a tensor where it is: of one that is written to a moved copy would be lost."""
    there = set(spec.placements)
    left = [each for each in found if {each[1].get(name, R)} == there]
    if not left:
        allowed = sorted({str(inputs.get(name, R)) for _, inputs in found})
        raise NotImplementedError(f"{op._schema.name.partition('::')[2]}: {name}: is placed as {spec.placements}; it "
                                  f"is written to where it is, and supported are {', '.join(allowed)}, along all "
                                  "dimensions of a mesh")
    return left


_register()
