"""From torch tensors to launches."""
from __future__ import annotations

import math

import torch
from torch import Tensor

from tkq.attention.common.layout import readable
from tkq.attention.decode import words
from tkq.attention.decode.check import Call, Options
from tkq.attention.decode.chunked import launch as chunked
from tkq.attention.decode.config import DecodeConfig, DirectConfig
from tkq.attention.decode.plan import FEW, FIXED_KEYS, ROWS, plan
from tkq.attention.decode.planned import Planned
from tkq.attention.decode.spec import SCALES, AppendSpec, DecodeSpec, MergeSpec
from tkq.runtime import Recipe, function
from tkq.runtime.call import dtypes
from tkq.runtime.device import arch

_launchers: dict = {}  # (device, spec, config) -> the kernel's function; as many as kinds of call


def recipe(spec: DecodeSpec | AppendSpec | MergeSpec, config: DecodeConfig | DirectConfig | None = None) -> Recipe:
    """The kernel's, with its planned config or another one."""
    if isinstance(spec, AppendSpec):
        return Recipe("tkq.attention.decode.append:KvAppend", (spec,))
    if isinstance(spec, MergeSpec):
        return Recipe("tkq.attention.decode.merge:MergeState", (spec,))
    return Recipe("tkq.attention.decode.kernel:Decode", (spec, config or plan(spec)))


PLANNER = Recipe("tkq.attention.decode.planner:Planner", ())


BALANCER = Recipe("tkq.attention.decode.balancer:Balancer", ())


LISTER = Recipe("tkq.attention.decode.lister:Lister", ())


def make_plan(seqlens: Tensor, of: Planned, out: Tensor | None = None, cu: Tensor | None = None) -> Tensor:
    """By one launch, of ragged queries by two, into out where there is one."""
    batch = of.batch(seqlens.shape[0])
    made = seqlens.new_empty(of.words(seqlens.shape[0])) if out is None else out
    seqlens = _dense(seqlens)
    if cu is not None:
        lengths = seqlens.new_empty(batch)
        if batch:
            launcher(seqlens, LISTER)(_dense(cu), (seqlens, lengths, made), (
                of.queries, of.total, batch, words.listed(batch, of.heads_kv, of.tiles)))
        seqlens = lengths
    parts = of.parts(arch.num_sms(seqlens.device))
    planner = BALANCER if of.balanced(batch, parts) else PLANNER
    launcher(seqlens, planner)(seqlens, made, of.sizes(batch, parts))
    return made


def decode(call: Call, options: Options, out: Tensor | None = None) -> tuple:
    """(o, lse or None, the parts' memory, what was launched or None: the function and its arguments), of CUDA tensors
    that have been looked at. The parts have the plan beside them where options ask for a result in parts."""
    q, k, v, seqlens, table, sinks, plan, k_descale, v_descale, cu, tree = call
    *places, H, D = q.shape
    o = q.new_empty(*places, H, v.shape[3]) if out is None else out
    lse = q.new_empty(*places[:-1], H, places[-1], dtype=torch.float32) if options.return_lse else None
    if not o.numel():
        return o, lse, (), None
    if cu is not None and plan is not None:  # rows that no tile of the plan has, as where it was made for other starts
        o.fill_(math.nan)
        if lse is not None:
            lse.fill_(math.nan)
    if cu is not None and not seqlens.shape[0]:
        return o, lse, (), None
    of = Planned.of(call, options)
    B = of.batch(seqlens.shape[0])
    plan = make_plan(seqlens, of, cu=cu) if plan is None else plan
    parts = of.blocks * arch.num_sms(q.device)
    scale = 1 / math.sqrt(D) if options.softmax_scale is None else options.softmax_scale
    right = 0 if options.causal else options.right
    results = o, lse
    if cu is not None:  # one batch of all rows
        q, *results = (x if x is None else x[None] for x in (q, o, lse))
    if chunked.serves(call, options, o):
        run = launcher(q, chunked.kernel_of(call, options))
        given = q, (k, v, table, _dense(seqlens), plan, *results, _dense(sinks), _dense(cu)), (
            scale, options.softcap or 1.0, options.left, right, parts, B, arch.num_sms(q.device))
        run(*given)
        return o, lse, (), (run, given) if cu is None else None
    slots = 2 * parts
    if of.fixed:
        capacity = k.shape[1] * (1 if table is None else table.shape[1])
        slots = B * of.heads_kv * of.tiles * max(1, -(-capacity // FIXED_KEYS) + (of.left >= 0))
    rows = min(ROWS, of.queries * of.group)
    partial = q.new_empty(slots, rows, v.shape[3], dtype=torch.float32)
    partial_lse = q.new_empty(slots, rows, dtype=torch.float32)
    operands = (k, v, table, _dense(seqlens), plan, *results, _dense(sinks), partial, partial_lse,
                k_descale, v_descale, _dense(cu), tree)
    run = launcher(q, spec_of(call, options))
    given = q, operands, (scale, options.softcap or 1.0, options.left, right, of.split, parts, B, of.queries)
    run(*given)
    parts = (partial, partial_lse, plan) if options.in_parts else (partial, partial_lse)
    # ragged calls are more than one launch, which alone would be replayed: rows without a tile are filled before it
    return o, lse, parts, (run, given) if cu is None else None


def spec_of(call: Call, options: Options) -> DecodeSpec:
    q, k, v = call[:3]
    ragged = call.cu_seqlens_q is not None
    tree = call.tree_mask is not None
    edges = not tree and (ragged or options.left >= 0 or (
        q.shape[1] > 1 and (options.causal or options.right >= 0)))
    return DecodeSpec(dtypes.name_of(q.dtype), q.shape[-1], v.shape[3], call.block_table is not None, edges,
                      options.softcap > 0, None if call.sinks is None else dtypes.name_of(call.sinks.dtype),
                      options.return_lse, options.batch_invariant, *_float8(k, call.k_descale), ragged,
                      _few(call) and not options.in_parts, tree, options.in_parts)


def _few(call) -> bool:
    """Are the packed queries of a K/V head of a float8 cache few? Of a prefix they are those of the whole batch, on
    which the kernel that it takes must not depend."""
    q, k = call[:2]
    return k.dtype == torch.float8_e4m3fn and call.cu_seqlens_q is None and call.tree_mask is None and (
        q.shape[1] * (q.shape[2] // k.shape[2]) <= FEW)


def _float8(k, descale) -> tuple:
    """A spec's cache and scales."""
    if k.dtype != torch.float8_e4m3fn:
        return None, None
    return "e4m3", None if descale is None else SCALES[descale.dim() - 1]


def merge(o_a: Tensor, lse_a: Tensor, o_b: Tensor, lse_b: Tensor, out: Tensor | None = None,
          parts: tuple = ()) -> tuple:
    """(o or out, lse) of tensors ([B,] S, H, D) and ([B,] H, S), that have been looked at. parts: `decode`'s of o_a and
    lse_a, whose queries, of the whole batch, were one sequence."""
    o, lse = o_a.new_empty(o_a.shape) if out is None else out, lse_a.new_empty(lse_a.shape)
    if o.numel():
        a, b, of_a, of_b, made, total = (x if o.dim() == 4 else x[None] for x in (o_a, o_b, lse_a, lse_b, o, lse))
        launcher(o, MergeSpec(dtypes.name_of(o.dtype), bool(parts)))(
            readable(a), (readable(b), of_a, of_b, made, total, *(parts or (None,) * 3)))
    return o, lse


def append(call) -> Tensor | None:
    """q, rotated; of an `append_ops.Call` that has been looked at."""
    k, v, k_cache, v_cache, slots, cos, sin, interleaved, positions, q, k_scale, v_scale = call
    turned = None if q is None else q.new_empty(q.shape)
    name = lambda x: None if x is None else dtypes.name_of(x.dtype)
    if k.shape[0]:
        spec = AppendSpec(name(k), name(slots), name(cos), interleaved, name(positions), q is not None,
                          *_float8(k_cache, k_scale))
        k, v, q = (x if x is None else readable(x) for x in (k, v, q))
        launcher(k, spec)(k, (v, k_cache, v_cache, _dense(slots), q, turned, _dense(cos), _dense(sin),
                              _dense(positions), k_scale, v_scale))
    return turned


def _dense(x):
    return x if x is None or x.is_contiguous() else x.contiguous()


def launcher(x: Tensor, spec: DecodeSpec | AppendSpec | MergeSpec | Recipe, config=None):
    """The kernel's function."""
    key = x.get_device(), spec, config
    if key not in _launchers:
        arch.require_hopper(x.device)
        _launchers[key] = function(spec if isinstance(spec, Recipe) else recipe(spec, config))
    return _launchers[key]
