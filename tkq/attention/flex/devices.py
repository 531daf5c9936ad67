"""A call of flex_attention and its gradients, by kernels or on the CPU."""
from __future__ import annotations

import torch

from tkq import reference
from tkq.attention.arguments import FURTHEST
from tkq.attention.flex import launch
from tkq.attention.flex.backward import launch as backward_launch
from tkq.attention.flex.backward.capture_launch import capture_gradients
from tkq.attention.flex.functions.derive import capture_slopes_of, slope_of
from tkq.attention.flex.launch import Call


def forward(call: Call, lse: bool, given: tuple | None = None, rows_first: bool = False):
    """(o, lse or None). o's rows and heads lie as q's do. given, rows_first: as of ``launch.forward``."""
    (B, H, S, _), D = call.q.shape, call.v.shape[3]
    if S >= FURTHEST or call.k.shape[2] >= FURTHEST:  # also of few numbers, expanded: rows are counted in int32
        raise NotImplementedError(f"flex_attention: query is {tuple(call.q.shape)}, key is {tuple(call.k.shape)}, "
                                  "supported are fewer than 2^30 rows")
    if call.q.is_cuda:
        return launch.forward(call, lse, given=given, rows_first=rows_first)
    o = call.q.new_empty((B, S, H, D)) if rows_first else result_like(call.q, D)
    if call.q.is_meta:  # which has no numbers to look at
        return o, call.q.new_empty((B, H, S), dtype=torch.float32) if lse else None
    found = reference.flex.flex_attention(*call)
    # a copy: autograd forbids to write to a view that it has as a result
    return o.copy_(found[0].transpose(1, 2) if rows_first else found[0]), found[1].clone() if lse else None


def result_like(x, columns=None):
    """As ``launch.result_like``, on any device. No view: autograd forbids to write to such a result."""
    B, H, S, D = x.shape
    D = D if columns is None else columns
    if x.stride(1) < x.stride(2):
        return x.new_empty_strided((B, H, S, D), (S * H * D, D, H * D, 1))
    return x.new_empty((B, H, S, D))


def gradients(call: Call, rows: tuple, needed: tuple, slots: tuple):
    """([dq, dk, dv], gradients of the score function's captured tensors in ``slots``). rows: (do, o, lse, dlse or
    None). needed: which of the first three are asked for; others are None, or left out of account."""
    if not call.q.is_cuda:
        return _on_cpu(call, rows, slots)
    found = backward_launch.gradients(call, rows, needed[0]) if any(needed) else (None,) * 3
    return list(found), capture_gradients(call, rows, slots) if slots else []


def _on_cpu(call, rows, slots):
    slope = None if call.score is None else slope_of(call.score).as_function()
    captures = (capture_slopes_of(call.score, slots), [call.score.tensors[i] for i in slots]) if slots else None
    *found, captured = reference.flex.flex_attention_backward(call, rows, slope, captures)
    return [result_like(x).copy_(y) for x, y in zip(call[:3], found)], list(captured)
