"""From torch tensors of packed sequences to launches."""
from __future__ import annotations

import math

import torch
from torch import Tensor

from tkq.attention.forward.spec import LONG_WINDOW
from tkq.attention.fp8.check import Call, Lengths, Options, spec_of
from tkq.attention.fp8.config import Fp8Config
from tkq.attention.fp8.launch import launcher, limited
from tkq.attention.fp8.spec import KEYS_TOGETHER, TransposePackedSpec
from tkq.runtime.call import counters
from tkq.runtime.call.replay import CallCache, Launch, Launched
from tkq.runtime.device import arch

calls = CallCache(by_stream=True)  # by a ``Call``, its ``Lengths`` and its ``Options``


def attend(call: Call, lengths: Lengths, options: Options, config: Fp8Config | None = None) -> tuple:
    """(o, lse or None), of CUDA tensors that have been looked at. config: instead of the plan's, for tests and
    tuning."""
    q, k = call[:2]
    o, lse = results(call, options)
    nothing = not k.shape[0] or lengths.number <= 0
    if nothing or lengths.seqused_q is not None:  # rows that are not in use belong to no task
        o.zero_()
        lse = lse if lse is None else lse.fill_(-math.inf)
    if nothing or not o.numel():
        return o, lse
    given, options = (*call, *lengths, *options), limited(options, q.shape[0], k.shape[0])
    first = transposition(call, lengths)
    v = first.arguments[1]
    scale = q.shape[2] ** -0.5 if options.softmax_scale is None else options.softmax_scale
    counter = counters.counter(q.get_device())
    then = Launch(launcher(q, spec_of(call, options, LONG_WINDOW, lengths), config), (
        q, (k, v, o, lse, *call[3:], tuple(lengths[:4])), counter,
        (scale, 0.0, options.left, options.right, arch.num_sms(q.device))))
    for run, arguments in (first, then):
        run(*arguments)
    if config is None and lengths.seqused_q is None:
        calls.add_launched(given, lambda: Launched((first, then), (o, lse), (counter,), between=(v,)))
    return o, lse


def transposed(call: Call, lengths: Lengths) -> Tensor:
    """V as the kernel takes it: (Hk, D, keys and zeros)."""
    run, arguments = transposition(call, lengths)
    run(*arguments)
    return arguments[1]


def transposition(call: Call, lengths: Lengths) -> Launch:
    """The launch before the attention's, of V and memory for it: whole tiles of each sequence, however long it is."""
    keys, heads, D = call.v.shape
    tiles = keys // KEYS_TOGETHER + lengths.number + 1  # as ``tkq.attention.fp8.packed`` has them
    workspace = call.v.new_empty(heads, D, tiles * KEYS_TOGETHER)
    run = launcher(call.v, TransposePackedSpec(lengths.seqused_k is not None))
    return Launch(run, (call.v, workspace, lengths.cu_seqlens_k, lengths.seqused_k))


def results(call: Call, options: Options) -> tuple:
    """(o, lse or None), of no contents yet."""
    rows, heads, _ = call.q.shape
    lse = call.q.new_empty(heads, rows, dtype=torch.float32) if options.return_lse else None
    return call.q.new_empty(call.q.shape, dtype=options.out_dtype), lse
