"""From torch tensors to the backward's launch."""
from __future__ import annotations

import functools
from collections.abc import Callable
from typing import NamedTuple

import torch

from tkq.attention.common.layout import readable
from tkq.attention.common.operands import BackwardOperands, Gradients
from tkq.attention.flex.backward.plan import plan, recipe
from tkq.attention.flex.backward.spec import FlexBackwardSpec
from tkq.attention.flex.functions.derive import score_and_slope_of
from tkq.attention.flex.functions.graph import Graph
from tkq.attention.flex.launch import Call, captured, expanded, result_like, view, viewed
from tkq.attention.flex.lists import BLOCK, backward_lists
from tkq.attention.flex.operands import BackwardLists, BlockLists, FlexScalars, Functions
from tkq.attention.flex.spec import backward_width, task_of
from tkq.runtime import function
from tkq.runtime.call import dtypes
from tkq.runtime.call.ops import LaunchCache
from tkq.runtime.call.replay import CallCache, Launch, Launched, View
from tkq.runtime.device import arch

calls = CallCache(compared=(Graph,))  # by ``given_of``
_launchers = LaunchCache()  # (device, spec, config) -> (the kernels' function, SMs)


def gradients(call: Call, rows: tuple, need_q: bool = True, config=None):
    """(dq or None, dk, dv), of CUDA tensors. rows: (do, o, lse, dlse or None); each gradient's heads lie as its
    tensor's do."""
    q, k, v = call[:3]
    given = given_of(call, rows, need_q) if config is None else None
    found = given and calls.take(*given)
    if found:
        return found
    index = q.get_device()
    dq, dk, dv = result_like(q, index) if need_q else None, result_like(k, index), result_like(v, index)
    if not q.numel() or not k.numel():
        return tuple(x if x is None else x.zero_() for x in (dq, dk, dv))
    launch, traced = run(call._replace(q=readable(q), k=readable(k), v=readable(v)), rows, (dq, dk, dv), config)
    if given is not None:
        calls.add_launched(given, lambda: _launched(call, rows, (dq, dk, dv), launch, traced))
    return dq, dk, dv


def given_of(call: Call, rows: tuple, asked) -> tuple | None:
    """What such a call is looked up by: all that its launch follows from. None where lists are made for it. asked: is
    dq asked for, or gradients of which captured tensors?"""
    q, k, v, score, mask, blocks, scale = call
    lists, size = (), None
    if blocks is not None:
        lists, size = blocks.queries, blocks.size
        if lists is None or size[1] % task_of(backward_width(q.shape[3], v.shape[3])):
            return None
    of = lambda traced: (None,) if traced is None else (traced.graph, *traced.tensors, *traced.numbers)
    return (*rows, q, k, v, asked, scale, size, *lists, *of(score), *of(mask))


def _launched(call, rows, into, launch, traced):
    """A launch by what it takes of which tensor of the call."""
    operands, gradients, space, lists, functions, numbers = launch.arguments
    operands, lists = views_of(call, rows, operands, lists)
    if functions is not None:
        functions = Functions(*map(viewed, traced, functions))
    arguments = operands, Gradients(*map(view, into, gradients)), space, lists, functions, numbers
    return Launched((Launch(launch.run, arguments),), into, between=(space,))


def views_of(call: Call, rows: tuple, operands: BackwardOperands, lists: BackwardLists | None) -> tuple:
    """Both, as views of the call's tensors."""
    do, o, lse, dlse = rows
    if lists is not None:
        lists = BackwardLists(BlockLists(*map(view, call.blocks.queries, lists.queries)), lists.states)
    return BackwardOperands(*map(View, (do, *call[:3], o), operands[:5]), lse, dlse), lists


def run(call: Call, rows, into, config=None):
    """Launch the kernels into dq or None, dk and dv; (the `Launch`, the functions whose captures it takes)."""
    q, joint = call.q, None if call.score is None else score_and_slope_of(call.score)
    asked = Asked.of(call, rows, into[0] is not None, joint)
    config = config or plan(asked.spec(), asked.size[0])
    spec = asked.spec(config)
    kernels, num_sms = launcher(q.device, spec, config, recipe)
    traced = call.score if joint is None else joint.traced, call.mask
    functions = Functions(*map(captured, traced))
    arguments = (operands_of(call, rows), Gradients(*map(_rows_last, into)), workspace(call, spec, config), asked.lists,
                 functions if any(x is not None for x in functions) else None, FlexScalars(call.scale, num_sms))
    kernels(*arguments)
    return Launch(kernels, arguments), traced


class Asked(NamedTuple):
    """What a call's spec and lists are made of. lists: a ``BackwardLists`` or None, of blocks of size queries and keys,
    ``per`` tasks in a block of keys."""

    make: Callable
    lists: BackwardLists | None
    size: tuple
    per: int

    @staticmethod
    def of(call: Call, rows, dq: bool, joint) -> Asked:
        """joint: a ``ScoreAndSlope``, or None."""
        q, lists, size, per = call.q, None, (BLOCK, BLOCK), 1
        width = backward_width(q.shape[3], call.v.shape[3])
        if call.blocks is not None:
            size = call.blocks.size
            lists, per = backward_lists(call.blocks, call.k.shape[2], task_of(width))
        graph = lambda traced: None if traced is None else traced.graph
        make = functools.partial(
            FlexBackwardSpec, dtypes.name_of(q.dtype), width, dq, rows[3] is not None,
            *((graph(call.score), None) if joint is None else (None, joint.joint)), graph(call.mask), lists is not None,
            lists is not None and lists.queries.full_num is not None, lists is not None and lists.states is not None)
        if lists is not None:
            states = None if lists.states is None else lists.states.expand(*q.shape[:2], *lists.states.shape[2:])
            lists = BackwardLists(expanded(lists.queries, q), states)
        return Asked(make, lists, size, per)

    def spec(self, config=None) -> FlexBackwardSpec:
        """config: whose tiles the blocks are counted in."""
        return self.make() if config is None else self.make(q_per=self.size[0] // config.tile, kv_per=self.per)


def _rows_last(x):
    return None if x is None else x.transpose(1, 2)


def operands_of(call: Call, rows) -> BackwardOperands:
    do, o, lse, dlse = rows
    return BackwardOperands(*(_rows_last(x) for x in (readable(do), *call[:3], o)), lse, dlse)


def workspace(call: Call, spec: FlexBackwardSpec, config):
    q = call.q
    block = config.tile * spec.q_per
    floats = q.shape[0] * q.shape[1] * config.workspace_floats(spec.attention, -(-q.shape[2] // block) * block)
    return torch.empty(floats, dtype=torch.float32, device=q.device)


def launcher(device, spec, config, recipe_of):
    """(the kernels' function, SMs) of a recipe."""
    key = device.index, spec, config
    found = _launchers.get(key)
    if found is None:
        arch.require_hopper(device)
        found = function(recipe_of(spec, config)), arch.num_sms(device)
        _launchers.add(key, found)
    return found
