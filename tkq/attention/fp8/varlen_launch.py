"""From torch tensors of packed sequences to launches."""
from __future__ import annotations

import math
from typing import NamedTuple

import torch
from torch import Tensor

from tkq.attention.forward.spec import LONG_WINDOW
from tkq.attention.fp8.check import Call, Lengths, Options, spec_of
from tkq.attention.fp8.config import Fp8Config
from tkq.attention.fp8.launch import launcher, limited
from tkq.attention.fp8.spec import KEYS_TOGETHER, GatherPagesSpec, TransposePackedSpec
from tkq.runtime.call import counters
from tkq.runtime.call.replay import CallCache, Launch, Launched
from tkq.runtime.device import arch

calls = CallCache(by_stream=True)  # by a ``Call``, its ``Lengths`` and its ``Options``


def attend(call: Call, lengths: Lengths, options: Options, config: Fp8Config | None = None) -> tuple:
    """(o, lse or None), of CUDA tensors that have been looked at. config: instead of the plan's, for tests and
    tuning."""
    q = call.q
    o, lse = results(call, options)
    keys = room(call, lengths)
    nothing = not keys or lengths.number() <= 0
    if nothing or lengths.seqused_q is not None:  # rows that are not in use belong to no task
        o.zero_()
        lse = lse if lse is None else lse.fill_(-math.inf)
    if nothing or not o.numel():
        return o, lse
    given, options = (*call, *lengths, *options), limited(options, q.shape[0], keys)
    first, k, v, sequences, made = (transposition if lengths.block_table is None else gathering)(call, lengths)
    scale = q.shape[2] ** -0.5 if options.softmax_scale is None else options.softmax_scale
    counter = counters.counter(q.get_device())
    then = Launch(launcher(q, spec_of(call, options, LONG_WINDOW, lengths), config), (
        q, (k, v, o, lse, *call[3:], sequences), counter,
        (scale, 0.0, options.left, options.right, arch.num_sms(q.device))))
    for run, arguments in (first, then):
        run(*arguments)
    if config is None and lengths.seqused_q is None:
        calls.add_launched(given, lambda: Launched((first, then), (o, lse), (counter,), between=made))
    return o, lse


def room(call: Call, lengths: Lengths) -> int:
    """The most keys that a sequence may have."""
    if lengths.block_table is None:
        return call.k.shape[0]
    return lengths.block_table.shape[1] * call.k.shape[1] if call.k.shape[0] else 0


class Before(NamedTuple):
    """A launch before the attention's: what this takes of it as k, as v (Hk, D, keys and zeros) and as ``Sequences``;
    made: what was allocated for it."""

    launch: Launch
    k: Tensor
    v: Tensor
    sequences: tuple
    made: tuple


def transposition(call: Call, lengths: Lengths) -> Before:
    """Of V."""
    v = _values(call, lengths, call.v.shape[0])
    run = launcher(call.v, TransposePackedSpec(lengths.seqused_k is not None))
    launch = Launch(run, (call.v, v, lengths.cu_seqlens_k, lengths.seqused_k))
    return Before(launch, call.k, v, tuple(lengths[:4]), (v,))


def gathering(call: Call, lengths: Lengths) -> Before:
    """Of K and V from their pages: a sequence has as much room as its row of the block_table names."""
    heads, D = call.k.shape[2:]
    rows = lengths.number() * -(-room(call, lengths) // KEYS_TOGETHER) * KEYS_TOGETHER
    k, v = call.k.new_empty(rows, heads, D), _values(call, lengths, rows)
    cu_k, used_k = (call.k.new_empty(lengths.number() + n, dtype=torch.int32) for n in (1, 0))
    launch = Launch(launcher(call.k, GatherPagesSpec()), (
        *call[1:3], lengths.block_table, lengths.seqused_k, (k, v, cu_k, used_k)))
    return Before(launch, k, v, (lengths.cu_seqlens_q, cu_k, lengths.seqused_q, used_k), (k, v, cu_k, used_k))


def _values(call, lengths, keys):
    """Memory for V: whole tiles of each sequence, however long it is, as ``tkq.attention.fp8.packed`` has them."""
    tiles = keys // KEYS_TOGETHER + lengths.number() + 1
    return call.v.new_empty(*call.v.shape[-2:], tiles * KEYS_TOGETHER)


def results(call: Call, options: Options) -> tuple:
    """(o, lse or None), of no contents yet."""
    rows, heads, _ = call.q.shape
    lse = call.q.new_empty(heads, rows, dtype=torch.float32) if options.return_lse else None
    return call.q.new_empty(call.q.shape, dtype=options.out_dtype), lse
