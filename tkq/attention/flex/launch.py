"""From torch tensors to launches."""
from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from tkq.attention.common.layout import readable
from tkq.attention.common.operands import Operands
from tkq.attention.flex.functions import captures
from tkq.attention.flex.functions.trace import Traced
from tkq.attention.flex.lists import Blocks
from tkq.attention.flex.operands import BlockLists, Captured, FlexScalars
from tkq.attention.flex.plan import plan, recipe
from tkq.attention.flex.spec import FlexSpec, kv_tile_of, tile_of, width
from tkq.attention.forward.plan import length_class
from tkq.runtime import function
from tkq.runtime.call import alloc, counters, dtypes
from tkq.runtime.call.ops import LaunchCache
from tkq.runtime.call.replay import CallCache, Launch, Launched, View
from tkq.runtime.device import arch

# by what ``attend.given_of`` says
calls = CallCache(by_stream=True, compared=captures.COMPARED)
_launchers = LaunchCache()  # (device, spec, config or class of lengths) -> (the kernel's function, SMs)


class Call(NamedTuple):
    """q (B, H, Sq, D), k, v (B, Hk, Sk, D)."""

    q: Tensor
    k: Tensor
    v: Tensor
    score: Traced | None
    mask: Traced | None
    blocks: Blocks | None
    scale: float

    def with_tensors(self, tensors) -> Call:
        """The same of another query, key and value."""
        return Call(*tensors, *self[3:])

    def kept(self) -> tuple:
        """What it takes beside these, and may not change until a gradient is made."""
        functions = [x for x in (self.score, self.mask) if x is not None]
        return (*[x for of in functions for x in of.tensors], *(() if self.blocks is None else self.blocks.lists))


def forward(call: Call, lse: bool, config=None, given: tuple | None = None, rows_first: bool = False):
    """(o, lse or None), of CUDA tensors that have been looked at. o's heads lie as q's do: between rows, or each by
    itself. given: what ``calls`` looks such a call up by, to remember it; first q, k and v. rows_first: o, and these in
    ``given``, have rows before heads."""
    q, k, v = (readable(x) for x in call[:3])
    (B, H, Sq, _), Dv = q.shape, v.shape[3]
    index = q.get_device()
    o = alloc.empty(index, (B, Sq, H, Dv), (Sq * H * Dv, H * Dv, Dv, 1), q.dtype) if rows_first else result_like(
        call.q, index, Dv)
    found = alloc.empty(index, (B, H, Sq), (H * Sq, Sq, 1), torch.float32) if lse else None
    if not o.numel() or not k.shape[2]:
        return o.zero_(), found if found is None else found.fill_(-torch.inf)
    kernel, arguments = run(call._replace(q=q, k=k, v=v), o.transpose(1, 2) if rows_first else o, found, config)
    if given is not None:
        calls.add_launched(given, lambda: _launched(call, given[:3], (o, found), kernel, arguments))
    return o, found


def run(call: Call, o, lse, config=None):
    """Launch the kernel into o and lse; (the kernel's function, its arguments)."""
    q = call.q
    lists, size = (None, (128, 128)) if call.blocks is None else call.blocks[:2]
    columns, graphs = width(q.shape[3], call.v.shape[3]), (x and x.graph for x in (call.score, call.mask))
    tiles = tile_of(size[0]), kv_tile_of(size[1], columns)
    spec = FlexSpec(dtypes.name_of(q.dtype), columns, lse is not None, *graphs,
                    lists is not None, lists is not None and lists.full_num is not None, *tiles,
                    size[0] // tiles[0], size[1] // tiles[1])
    kernel, num_sms = _launcher(q.device, spec, config or length_class(call.k.shape[2]))
    wide = None if call.blocks is None else call.blocks.wide
    arguments = (Operands(*(x.transpose(1, 2) for x in (*call[:3], o)), lse), wide, captured(call.score),
                 captured(call.mask), counters.counter(q.get_device()), FlexScalars(call.scale, num_sms))
    kernel(*arguments)
    return kernel, arguments


def _launched(call, tensors, results, kernel, arguments):
    """A launch by what it takes of which tensor of the call. tensors: q, k and v as they were given."""
    operands, wide, *functions, counter, numbers = arguments
    operands = Operands(*map(View, (*tensors, results[0]), operands[:4]), operands.lse)
    wide = None if wide is None else BlockLists(*map(view, call.blocks.lists, wide))
    functions = [viewed(*x) for x in zip((call.score, call.mask), functions)]
    return Launched((Launch(kernel, (operands, wide, *functions, counter, numbers)),), results, (counter,))


def view(of, seen):
    """A ``View``, or None."""
    return None if seen is None else View(of, seen)


def viewed(traced: Traced | None, taken: Captured | None) -> Captured | None:
    """What ``captured`` gives, as views of the captured tensors."""
    if taken is None or taken.tensors is None:
        return taken
    return taken._replace(tensors=tuple(map(View, traced.tensors, taken.tensors)))


def expanded(lists, q):
    """Lists of each batch element and query head."""
    if lists is None:
        return None
    return BlockLists(*(x if x is None else x.expand(*q.shape[:2], *x.shape[2:]) for x in lists))


def captured(traced: Traced | None) -> Captured | None:
    """What a kernel takes for a function's slots: bools as bytes, and a tensor of no dimension as one of 1."""
    if traced is None or not (traced.tensors or traced.numbers):
        return None
    tensors = tuple((x.view(torch.uint8) if x.dtype is torch.bool else x) for x in traced.tensors)
    return Captured(tuple(x if x.dim() else x.view(1) for x in tensors) or None, traced.numbers or None)


def result_like(q: Tensor, index: int, columns: int | None = None) -> Tensor:
    """What a launch writes, dense, in the order of q's rows and heads in memory, of as many columns or others."""
    B, H, S, D = q.shape
    D = D if columns is None else columns
    if q.stride(1) < q.stride(2):
        return alloc.empty(index, (B, H, S, D), (S * H * D, D, H * D, 1), q.dtype)
    return alloc.empty(index, (B, H, S, D), (H * S * D, S * D, D, 1), q.dtype)


def _launcher(device, spec, config):
    key = device.index, spec, config
    found = _launchers.get(key)
    if found is None:
        arch.require_hopper(device)
        config = plan(spec, config) if isinstance(config, str) else config
        found = function(recipe(spec, config)), arch.num_sms(device)
        _launchers.add(key, found)
    return found
