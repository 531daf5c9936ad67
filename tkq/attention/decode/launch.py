"""From torch tensors to launches."""
from __future__ import annotations

import math
from typing import NamedTuple

import torch
from torch import Tensor

from tkq.attention.decode import words
from tkq.attention.decode.check import Call, Options
from tkq.attention.decode.config import DecodeConfig
from tkq.attention.decode.plan import FIXED_KEYS, LEAST, OVERHEAD, ROWS, blocks_of_sm, key_block, plan, row_tiles
from tkq.attention.decode.spec import AppendSpec, DecodeSpec, MergeSpec
from tkq.runtime import Recipe, function
from tkq.runtime.call import dtypes
from tkq.runtime.device import arch

_launchers: dict = {}  # (device, spec, config) -> the kernel's function; as many as kinds of call


class Planned(NamedTuple):
    """What a plan is made for. left: -1 without a limit. keys: of a block of keys. blocks: of
    threads on an SM. together: of them that read the same keys, each for another tile."""

    heads_q: int
    heads_kv: int
    keys: int
    queries: int = 1
    left: int = -1
    fixed: bool = False
    blocks: int = 1
    together: int = 1

    @property
    def group(self) -> int:
        return self.heads_q // self.heads_kv

    @property
    def tiles(self) -> int:
        """Of those that a block has one after the other."""
        return -(-row_tiles(self.queries, self.group) // self.together)

    def parts(self, sms: int) -> int:
        """Parts of the work, for so many SMs."""
        return max(1, self.blocks * sms // self.together)

    @property
    def split(self) -> int:
        """Blocks of a fixed split; 0: positions are blocks."""
        return FIXED_KEYS // self.keys if self.fixed else 0

    def sizes(self, batch: int, parts: int) -> tuple:
        """`planner.Sizes`. A sequence has so few blocks at most that all positions are counted in 31 bits."""
        most = ((1 << 31) - (1 << 16)) // max(1, batch * self.heads_kv * self.tiles) - OVERHEAD - 1
        overhead, least = (-(-keys // self.keys) for keys in (OVERHEAD, LEAST))
        return (self.heads_kv, self.group, self.queries, self.tiles, self.keys, self.left, self.split, parts, overhead,
                1 if self.fixed else least, most)


def recipe(spec: DecodeSpec | AppendSpec | MergeSpec, config: DecodeConfig | None = None) -> Recipe:
    """The kernel's, with its planned config or another one."""
    if isinstance(spec, AppendSpec):
        return Recipe("tkq.attention.decode.append:KvAppend", (spec,))
    if isinstance(spec, MergeSpec):
        return Recipe("tkq.attention.decode.merge:MergeState", (spec,))
    return Recipe("tkq.attention.decode.kernel:Decode", (spec, config or plan(spec)))


PLANNER = Recipe("tkq.attention.decode.planner:Planner", ())


def make_plan(seqlens: Tensor, of: Planned, out: Tensor | None = None) -> Tensor:
    """By one launch, into out where there is one."""
    batch = seqlens.shape[0]
    made = seqlens.new_empty(words.size(batch, of.heads_kv, of.tiles)) if out is None else out
    launcher(seqlens, None)(_dense(seqlens), made, of.sizes(batch, of.parts(arch.num_sms(seqlens.device))))
    return made


def planned(call: Call, options: Options) -> Planned:
    q, k, v = call[:3]
    return Planned(q.shape[2], k.shape[2], key_block(q.shape[3], v.shape[3]), q.shape[1], options.left,
                   options.batch_invariant, blocks_of_sm(q.shape[3], v.shape[3]))


def decode(call: Call, options: Options, out: Tensor | None = None) -> tuple:
    """(o, lse or None, the parts' memory, what was launched or None: the function and its arguments), of CUDA tensors
    that have been looked at."""
    q, k, v, seqlens, table, sinks, plan = call
    B, Sq, H, D = q.shape
    o = q.new_empty(B, Sq, H, v.shape[3]) if out is None else out
    lse = q.new_empty(B, H, Sq, dtype=torch.float32) if options.return_lse else None
    if not o.numel():
        return o, lse, (), None
    of = planned(call, options)
    plan = make_plan(seqlens, of) if plan is None else plan
    spec = spec_of(call, options)
    parts = of.blocks * arch.num_sms(q.device)
    slots = 2 * parts
    if of.fixed:
        capacity = k.shape[1] * (1 if table is None else table.shape[1])
        slots = B * of.heads_kv * of.tiles * max(1, -(-capacity // FIXED_KEYS) + (of.left >= 0))
    rows = min(ROWS, Sq * of.group)
    partial = q.new_empty(slots, rows, v.shape[3], dtype=torch.float32)
    partial_lse = q.new_empty(slots, rows, dtype=torch.float32)
    scale = 1 / math.sqrt(D) if options.softmax_scale is None else options.softmax_scale
    right = 0 if options.causal else options.right
    operands = k, v, table, _dense(seqlens), plan, o, lse, _dense(sinks), partial, partial_lse
    run, given = launcher(q, spec), (q, operands, (scale, options.softcap or 1.0, options.left, right, of.split, parts))
    run(*given)
    return o, lse, (partial, partial_lse), (run, given)


def spec_of(call: Call, options: Options) -> DecodeSpec:
    q, _, v = call[:3]
    edges = options.left >= 0 or (q.shape[1] > 1 and (options.causal or options.right >= 0))
    return DecodeSpec(dtypes.name_of(q.dtype), q.shape[3], v.shape[3], call.block_table is not None, edges,
                      options.softcap > 0, None if call.sinks is None else dtypes.name_of(call.sinks.dtype),
                      options.return_lse, options.batch_invariant)


def merge(o_a: Tensor, lse_a: Tensor, o_b: Tensor, lse_b: Tensor) -> tuple:
    """(o, lse) of tensors ([B,] S, H, D) and ([B,] H, S), that have been looked at."""
    o, lse = o_a.new_empty(o_a.shape), lse_a.new_empty(lse_a.shape)
    if o.numel():
        a, b, of_a, of_b, made, total = (x if o.dim() == 4 else x[None] for x in (o_a, o_b, lse_a, lse_b, o, lse))
        launcher(o, MergeSpec(dtypes.name_of(o.dtype)))(whole_vectors(a), (whole_vectors(b), of_a, of_b, made, total))
    return o, lse


def append(call) -> Tensor | None:
    """q, rotated; of an `append_ops.Call` that has been looked at."""
    k, v, k_cache, v_cache, slots, cos, sin, interleaved, positions, q = call
    turned = None if q is None else q.new_empty(q.shape)
    name = lambda x: None if x is None else dtypes.name_of(x.dtype)
    if k.shape[0]:
        spec = AppendSpec(name(k), name(slots), name(cos), interleaved, name(positions), q is not None)
        k, v, q = (x if x is None else whole_vectors(x) for x in (k, v, q))
        launcher(k, spec)(k, (v, k_cache, v_cache, _dense(slots), q, turned, _dense(cos), _dense(sin),
                              _dense(positions)))
    return turned


def whole_vectors(x: Tensor) -> Tensor:
    """x, or a copy, where its rows do not begin at multiples of 16 bytes."""
    fine = x.stride(-1) == 1 and x.data_ptr() % 16 == 0 and all(
        x.stride(i) % 8 == 0 or x.shape[i] == 1 for i in range(x.dim() - 1))
    return x if fine else x.clone(memory_format=torch.contiguous_format)


def _dense(x):
    return x if x is None or x.is_contiguous() else x.contiguous()


def launcher(x: Tensor, spec: DecodeSpec | AppendSpec | MergeSpec | None, config: DecodeConfig | None = None):
    """The kernel's function; the planner's without a spec."""
    key = x.get_device(), spec, config
    if key not in _launchers:
        arch.require_hopper(x.device)
        _launchers[key] = function(PLANNER if spec is None else recipe(spec, config))
    return _launchers[key]
