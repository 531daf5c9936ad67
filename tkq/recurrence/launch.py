"""From torch tensors to launches."""
from __future__ import annotations

from dataclasses import replace
from typing import NamedTuple

import torch
from torch import Tensor

from tkq.recurrence.config import ScanConfig
from tkq.recurrence.plan import plan, widest
from tkq.recurrence.segments import segments
from tkq.recurrence.spec import ScanSpec
from tkq.runtime import Recipe, function
from tkq.runtime.call import dtypes
from tkq.runtime.call.access import FARTHEST, vector_of
from tkq.runtime.device import arch

_launchers: dict = {}  # (device, spec, config) -> the kernel's function; as many as kinds of call


class Wanted(NamedTuple):
    """Which gradients a backward makes."""

    a: bool
    b: bool
    state: bool

    @property
    def name(self) -> str | None:
        return "both" if self.a and self.b else "a" if self.a else "b" if self.b else None


def recipe(spec: ScanSpec, config: ScanConfig) -> Recipe:
    """The kernel's."""
    kernel = "lines:LineScan" if spec.layout == "time" else "columns:ColumnScan"
    return Recipe(f"tkq.recurrence.{kernel}", (spec, config))


def along_time(a: Tensor) -> bool:
    """Is a taken as it lies, with neighbouring tokens contiguous? All others lie likewise then."""
    return a.shape[1] > 1 and a.stride(1) == 1 and (a.stride(2) != 1 or a.shape[2] == 1)


def result_like(a: Tensor, time: bool) -> Tensor:
    """What a launch writes: contiguous, in the order of a's dimensions in memory."""
    B, T, C = a.shape
    return a.new_empty_strided((B, T, C), (C * T, 1, T)) if time else a.new_empty(B, T, C)


def forward(a: Tensor, b: Tensor, state: Tensor | None, reverse: bool, final: bool) -> tuple:
    """(h, the final state fp32 or None, what was launched: the function and its arguments), of CUDA tensors that have
    been looked at. None where it was not one launch."""
    B, _, C = a.shape
    time = along_time(a)
    h = result_like(a, time)
    last = a.new_empty(B, C, dtype=torch.float32) if final else None
    if not h.numel():
        return h, final_of_none(last, state), None
    spec = ScanSpec(dtypes.name_of(a.dtype), layout="time" if time else "channels", state=_name(state), final=final)
    call = _launch(spec, (readable(a, time), readable(b, time)), (h, None, None), (state, last, None), reverse)
    return h, last, call


def backward(dh: Tensor, dfinal: Tensor | None, a: Tensor, h: Tensor, state: Tensor | None, reverse: bool,
             wanted: Wanted) -> tuple:
    """(da, db, dstate fp32), each where it is wanted, else None. dh: of a's shape and dtype, of any strides."""
    B, _, C = a.shape
    time = along_time(a)
    da, db = (result_like(a, time) if w else None for w in wanted[:2])
    dstate = a.new_empty(B, C, dtype=torch.float32) if wanted.state else None
    if not a.numel():
        return da, db, dstate if dstate is None else dstate.zero_() if dfinal is None else dstate.copy_(dfinal)
    state = state if wanted.a else None
    if wanted.name is None:  # the initial state's alone: db is what it is made of
        db = result_like(a, time)
    spec = ScanSpec(dtypes.name_of(a.dtype), layout="time" if time else "channels", state=_name(state),
                    final=dfinal is not None, gradients=wanted.name or "b", of_state=wanted.state)
    _launch(spec, (readable(a, time), readable(dh, time)), (readable(h, time) if wanted.a else None, da, db),
            (state, dfinal, dstate), not reverse)
    return da, db if wanted.b else None, dstate


def final_of_none(last: Tensor | None, state: Tensor | None) -> Tensor | None:
    """The final state of no token: the initial one."""
    if last is None:
        return None
    return last.zero_() if state is None else last.copy_(state)


def readable(x: Tensor, time: bool) -> Tensor:
    """x, or a copy laid out as a is, where it is not, or where tokens lie too far apart."""
    if time:
        return x if x.stride(1) == 1 else x.mT.clone(memory_format=torch.contiguous_format).mT
    near = x.shape[1] == 1 or abs(x.stride(1)) * x.itemsize <= FARTHEST
    return x if near and (x.stride(2) == 1 or x.shape[2] == 1) else x.clone(memory_format=torch.contiguous_format)


def _launch(spec, read, others, states, reverse):
    """What was launched, if one was: the function and its arguments. read: a, and b or dh; others: h, da, db, (B, T, C)
    each; states: state, final, dstate, (B, C) each. reverse: of this launch; a backward goes against its forward."""
    if spec.layout == "time":
        read, others, states = _merged(read, others, states)
    part = segments(spec, arch.num_sms(read[0].device), *read, *others)
    if part is None:
        return _run(spec, read, others, states, reverse)
    return _in_segments(part, spec, (read, others), states, reverse)


def _in_segments(part, spec, tensors, states, reverse):
    """As `Segments` says."""
    (read, others), (state, final, dstate) = ([part.view(x) for x in of] for of in tensors), states
    a, B = read[0], part.size[0]
    made, product = (a.new_empty(B, a.shape[2], dtype=torch.float32) for _ in range(2))
    ends = replace(spec, ends=True, state=None, final=not spec.backward, of_state=spec.backward)
    _run(ends, read, (None,) * 3, (None, *((None, made) if spec.backward else (made, None))), reverse, product)
    given, behind = (final if spec.backward else state), torch.empty_like(part.ends(made))
    last = dstate if spec.backward else final
    whole = ScanSpec("fp32", state=_name(given), final=last is not None)
    _run(whole, (part.ends(product), part.ends(made)), (behind, None, None), (given, last, None), reverse)
    incoming = part.incoming(given, behind, reverse)
    if not spec.backward:
        _run(replace(spec, state="fp32", final=False), read, others, (incoming, None, None), reverse)
        return
    before = None
    if spec.of_a:  # h before a segment's first token: the one that a reverse scan takes last
        h = others[0]
        edge = h[:, 0 if not reverse else -1].unflatten(0, (-1, part.count)).float()
        before = part.incoming(state, edge, not reverse)
    spec = replace(spec, state=_name(before), final=True, of_state=False)
    _run(spec, read, others, (before, incoming, None), reverse)


def _merged(read, others, states):
    """Lines of all sequences as those of one, where they lie at the same distances."""
    given = [x for x in (*read, *others) if x is not None]
    B, T, C = given[0].shape
    if B == 1 or not all(x.stride(0) == C * x.stride(2) for x in given):
        return read, others, states
    one = lambda x: None if x is None else x.as_strided((1, T, B * C), (x.stride(0), 1, x.stride(2)))
    return *([one(x) for x in of] for of in (read, others)), [None if x is None else x.reshape(1, -1) for x in states]


def _run(spec, read, others, states, reverse, product=None):
    """One launch, which is returned."""
    a, b = read
    time = spec.layout == "time"
    vector = vector_of(time, *read, *others)
    states = tuple(None if t is None else t.contiguous() for t in (*states, product))
    (B, T, C), device = a.shape, a.get_device()
    spec = replace(spec, vector=vector, reverse=reverse) if time else replace(
        spec, vector=widest(vector, spec, B * C))
    config = plan(spec, B * C, T, arch.num_sms(a.device))
    call = _launcher(device, spec, config, a), (a, (b, *others, *states), -1 if reverse else 1)
    call[0](*call[1])
    return call


def _name(x):
    return None if x is None else dtypes.name_of(x.dtype)


def _launcher(device, spec, config, a):
    key = device, spec, config
    if key not in _launchers:
        arch.require_hopper(a.device)
        _launchers[key] = function(recipe(spec, config))
    return _launchers[key]
