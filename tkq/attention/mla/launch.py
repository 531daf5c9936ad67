"""From torch tensors to launches."""
from __future__ import annotations

import torch
from torch import Tensor

from tkq.attention.decode.launch import make_plan
from tkq.attention.decode.plan import FIXED_KEYS, ROWS, row_tiles
from tkq.attention.decode.planned import Planned
from tkq.attention.mla.check import Call, Options
from tkq.attention.mla.config import MlaConfig
from tkq.attention.mla.plan import plan
from tkq.attention.mla.spec import HEAD_DIM, HEAD_DIM_V, MlaSpec
from tkq.runtime import Recipe, function
from tkq.runtime.call import dtypes
from tkq.runtime.device import arch

_launchers: dict = {}  # (device, spec, config) -> the kernel's function; as many as kinds of call


def recipe(spec: MlaSpec, config: MlaConfig | None = None) -> Recipe:
    """The kernel's, with another config than that of pages of any size."""
    return Recipe("tkq.attention.mla.kernel:Mla", (spec, config or plan(spec)))


def planned(call: Call, options: Options) -> Planned:
    return Planned.made((HEAD_DIM, HEAD_DIM_V), (call.q.shape[2], 1), call.places(), False,
                        (-1, options.batch_invariant))


def spec_of(call: Call, options: Options) -> MlaSpec:
    lengths = call.topk_length
    return MlaSpec(dtypes.name_of(call.q.dtype), options.causal and call.places()[1] > 1, options.return_lse,
                   options.batch_invariant, call.indices is not None, 0 if lengths is None else lengths.dim(),
                   call.kv_cache.dtype == torch.uint8)


def decode(call: Call, options: Options, out: Tensor | None = None, config: MlaConfig | None = None) -> tuple:
    """(o, lse or None, the parts' memory, what was launched or None: the function and its arguments), of CUDA tensors
    that have been looked at."""
    q, cache, table, seqlens, made, indices, lengths = call
    B, Sq, H, _ = q.shape
    sequences, queries = call.places()
    o = q.new_empty(B, Sq, H, HEAD_DIM_V) if out is None else out
    lse = q.new_empty(B, H, Sq, dtype=torch.float32) if options.return_lse else None
    if not o.numel():
        return o, lse, (), None
    of = planned(call, options)
    made = make_plan(lengths_of(call), of) if made is None else made
    cache = cache.unsqueeze(2) if cache.dim() == 3 else cache
    parts = of.parts(arch.num_sms(q.device))
    slots = 2 * parts
    if of.fixed:
        slots = sequences * of.tiles * max(1, -(-call.capacity() // FIXED_KEYS))
    rows = of.together * min(ROWS, queries * H)
    partial = q.new_empty(slots, rows, HEAD_DIM_V, dtype=torch.float32)
    partial_lse = q.new_empty(slots, rows, dtype=torch.float32)
    keys = (table, seqlens.contiguous()) if indices is None else (indices, lengths)
    operands = cache, *keys, made, o, lse, partial, partial_lse
    scalars = options.softmax_scale, 0 if options.causal else -1, of.split, parts, of.together
    spec = spec_of(call, options)
    config = config or plan(spec, cache.shape[1] if cache.shape[0] else 1, row_tiles(queries, H), of.together)
    run, given = launcher(q, spec, config), (q, operands, scalars)
    run(*given)
    return o, lse, (partial, partial_lse), (run, given)


def lengths_of(call: Call) -> Tensor:
    """Keys of each sequence of the plan."""
    if call.indices is None:
        return call.cache_seqlens
    B, Sq, topk = call.indices.shape
    lengths = call.topk_length
    if lengths is None:
        return call.indices.new_full((B * Sq,), topk)
    return (lengths if lengths.dim() == 2 else lengths[:, None]).expand(B, Sq).reshape(-1)


def launcher(x: Tensor, spec: MlaSpec, config: MlaConfig):
    """The kernel's function."""
    key = x.get_device(), spec, config
    if key not in _launchers:
        arch.require_hopper(x.device)
        _launchers[key] = function(recipe(spec, config))
    return _launchers[key]
