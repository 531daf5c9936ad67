"""From torch tensors to the backward's launch."""
from __future__ import annotations

import functools

import torch

from tkq.attention.common.layout import readable
from tkq.attention.common.operands import BackwardOperands, Gradients
from tkq.attention.flex.backward.plan import plan, recipe
from tkq.attention.flex.backward.spec import FlexBackwardSpec
from tkq.attention.flex.derive import slope_of
from tkq.attention.flex.launch import Call, captured, expanded, result_like
from tkq.attention.flex.lists import BLOCK, backward_lists
from tkq.attention.flex.operands import BackwardLists, FlexScalars, Functions
from tkq.attention.flex.spec import width
from tkq.runtime import function
from tkq.runtime.call import dtypes
from tkq.runtime.call.ops import LaunchCache
from tkq.runtime.device import arch

_launchers = LaunchCache()  # (device, spec, config) -> (the kernels' function, SMs)


def gradients(call: Call, rows: tuple, need_q: bool = True, config=None):
    """(dq or None, dk, dv), of CUDA tensors. rows: (do, o, lse, dlse or None); each gradient's heads lie as its
    tensor's do."""
    q, k, v = call[:3]
    index = q.get_device()
    dq, dk, dv = result_like(q, index) if need_q else None, result_like(k, index), result_like(v, index)
    if not q.numel() or not k.numel():
        return tuple(x if x is None else x.zero_() for x in (dq, dk, dv))
    run(call._replace(q=readable(q), k=readable(k), v=readable(v)), rows, (dq, dk, dv), config)
    return dq, dk, dv


def run(call: Call, rows, into, config=None):
    """Launch the kernels into dq or None, dk and dv."""
    q, (do, o, lse, dlse) = call.q, rows
    slope, lists, size, per = None, None, (BLOCK, BLOCK), 1
    if call.score is not None:
        slope = slope_of(call.score)
        slope = None if slope.constant == 1.0 else slope.as_function()
    if call.blocks is not None:
        size = call.blocks.size
        lists, per = backward_lists(call.blocks, call.k.shape[2])
    graph = lambda traced: None if traced is None else traced.graph
    make = functools.partial(
        FlexBackwardSpec, dtypes.name_of(q.dtype), width(q.shape[3], call.v.shape[3]), into[0] is not None,
        dlse is not None, *map(graph, (call.score, slope, call.mask)), lists is not None,
        lists is not None and lists.queries.full_num is not None, lists is not None and lists.states is not None)
    config = config or plan(make(), size[0])
    spec = make(q_per=size[0] // config.tile, kv_per=per)
    kernels, num_sms = _launcher(q.device, spec, config)
    rows_last = lambda x: None if x is None else x.transpose(1, 2)
    if lists is not None:
        states = None if lists.states is None else lists.states.expand(*q.shape[:2], *lists.states.shape[2:])
        lists = BackwardLists(expanded(lists.queries, q), states)
    functions = Functions(*(captured(x) for x in (call.score, slope, call.mask)))
    floats = q.shape[0] * q.shape[1] * config.workspace_floats(spec.attention, q.shape[2])
    kernels(BackwardOperands(*(rows_last(x) for x in (readable(do), *call[:3], o)), lse, dlse),
            Gradients(*map(rows_last, into)), torch.empty(floats, dtype=torch.float32, device=q.device), lists,
            functions if any(x is not None for x in functions) else None,
            FlexScalars(call.scale, num_sms))


def _launcher(device, spec, config):
    key = device.index, spec, config
    found = _launchers.get(key)
    if found is None:
        arch.require_hopper(device)
        found = function(recipe(spec, config)), arch.num_sms(device)
        _launchers.add(key, found)
    return found
