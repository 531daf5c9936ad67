"""Concurrent launches: where the blocks of each would leave much of the GPU idle, those of others have room there."""
from __future__ import annotations

from collections.abc import Callable

import torch

from tkq.linear_attention import launch as engine
from tkq.linear_attention.split.launch import laid_out, split_of
from tkq.linear_attention.split.plan import leaves_sms_idle
from tkq.runtime.device import arch

SHORTEST = 1024  # tokens of a sequence: kernels of shorter ones take no longer than what streams cost
_streams: dict = {}  # (device, a stream's handle) -> those beside it, as many as were ever needed


def concurrently(launch: Callable, *calls: tuple | None) -> tuple:
    """What `launch(given, scale)` gives of each call (given, scale), none of which needs what another gives; None of
    None.

    Where `plan.leaves_sms_idle` says so, all but the first are launched on streams of their own, which begin
    behind what came before, and which the current one waits for. Their memory is the current stream's: nothing is made
    or freed beside it."""
    there = [call for call in calls if call is not None]
    hows = _worth([given for given, _ in there])
    found = iter(_on_streams(there, hows) if hows else [launch(*call) for call in there])
    return tuple(None if call is None else next(found) for call in calls)


def _worth(given):
    """How launches are laid out that are made concurrently: of whole sequences, whose lengths are known; or None."""
    if len(given) < 2 or not all(x.v.is_cuda and x.v.shape[1] >= SHORTEST and x.v.numel() and x.cu is None
                                 and x.starts is None for x in given):
        return None
    hows = [split_of(x) for x in given]
    sizes = [(x.q.shape[0], max(x.q.shape[2], x.v.shape[2]), x.v.shape[3]) for x in given]
    return hows if leaves_sms_idle(tuple(zip(sizes, hows)), arch.num_sms(given[0].v.device)) else None


def _on_streams(calls, hows):
    """In their order: blocks of a later launch begin where those of an earlier one leave room."""
    prepared = [engine.prepared(laid_out(given, how), scale) for (given, scale), how in zip(calls, hows)]
    device = calls[0][0].v.device
    current = torch.cuda.current_stream(device)
    beside = _beside(device, current, len(calls) - 1)
    for stream in beside:
        stream.wait_stream(current)
    try:
        for (_, call), stream in zip(prepared, (current, *beside)):
            with torch.cuda.stream(stream):
                call[0](*call[1])
    finally:
        for stream in beside:
            current.wait_stream(stream)
    return [engine.added_up(given, made) for (given, _), (made, _) in zip(calls, prepared)]


def _beside(device, current, count):
    """Streams of torch's pool, the same beside each stream: those beside one that is captured are not beside others, as
    far as the pool goes."""
    found = _streams.setdefault((device, current.cuda_stream), [])
    while len(found) < count:
        found.append(torch.cuda.Stream(device))
    return found[:count]
