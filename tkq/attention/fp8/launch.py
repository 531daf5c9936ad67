"""From torch tensors to launches."""
from __future__ import annotations

import math

import torch
from torch import Tensor

from tkq.attention.forward.spec import LONG_WINDOW
from tkq.attention.fp8.check import Call, Options, spec_of
from tkq.attention.fp8.config import Fp8Config
from tkq.attention.fp8.plan import recipe
from tkq.attention.fp8.spec import KEYS_TOGETHER, Fp8Spec, QuantizeSpec, TransposePackedSpec, TransposeSpec
from tkq.runtime import function
from tkq.runtime.call import counters
from tkq.runtime.call.replay import CallCache, Launch, Launched
from tkq.runtime.device import arch

calls = CallCache(by_stream=True)  # by a ``Call`` and its ``Options``
_launchers: dict = {}  # (device, spec, config) -> the kernel's function; as many as kinds of call


def attend(call: Call, options: Options, config: Fp8Config | None = None) -> tuple:
    """(o, lse or None), of CUDA tensors that have been looked at. config: instead of the plan's, for tests and
    tuning."""
    q, k = call[:2]
    o, lse = results(call, options)
    if not o.numel():
        return o, lse
    if not k.shape[1]:
        return o.zero_(), lse if lse is None else lse.fill_(-math.inf)
    given, options = (*call, *options), limited(options, q.shape[1], k.shape[1])
    first = transposition(call)
    _, v = first.arguments
    scale = q.shape[3] ** -0.5 if options.softmax_scale is None else options.softmax_scale
    counter = counters.counter(q.get_device())
    then = Launch(launcher(q, spec_of(call, options, LONG_WINDOW), config), (
        q, (k, v, o, lse, *call[3:], None), counter, (scale, 0.0, options.left, options.right, arch.num_sms(q.device))))
    for run, arguments in (first, then):
        run(*arguments)
    if config is None:
        calls.add_launched(given, lambda: Launched((first, then), (o, lse), (counter,), between=(v,)))
    return o, lse


def limited(options: Options, rows: int, keys: int) -> Options:
    """Without limits that no query reaches; a right of 0 is causal."""
    left, right, causal = options.left, options.right, options.causal or options.right == 0
    return options._replace(causal=causal, left=-1 if left >= keys - 1 else left,
                            right=-1 if causal or right >= rows - 1 else right)


def transposed(call: Call) -> Tensor:
    """V as the kernel takes it: (B, Hk, D, keys and zeros)."""
    run, (v, workspace) = transposition(call)
    run(v, workspace)
    return workspace


def transposition(call: Call) -> Launch:
    """The launch before the attention's, of V and memory for it."""
    v = call.v
    B, keys, heads, D = v.shape
    workspace = v.new_empty(B, heads, D, -(-keys // KEYS_TOGETHER) * KEYS_TOGETHER)
    return Launch(launcher(v, TransposeSpec(call.keys_contiguous)), (v, workspace))


def results(call: Call, options: Options) -> tuple:
    """(o, lse or None), of no contents yet."""
    B, rows, heads, _ = call.q.shape
    lse = call.q.new_empty(B, heads, rows, dtype=torch.float32) if options.return_lse else None
    return call.q.new_empty(call.q.shape, dtype=options.out_dtype), lse


def launcher(x: Tensor, spec: Fp8Spec | TransposeSpec | TransposePackedSpec | QuantizeSpec,
             config: Fp8Config | None = None):
    """The kernel's function."""
    key = x.get_device(), spec, config
    if key not in _launchers:
        arch.require_hopper(x.device)
        _launchers[key] = function(recipe(spec, config))
    return _launchers[key]
