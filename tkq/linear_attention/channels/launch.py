"""From torch tensors to a launch of what has gates for each column."""
from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from tkq.linear_attention.channels.plan import plan, sums_segments
from tkq.linear_attention.channels.spec import ChannelSpec, SumsSpec
from tkq.linear_attention.config import CHUNK
from tkq.linear_attention.launch import Made, no_states
from tkq.linear_attention.suffix.launch import suffix_sums
from tkq.runtime import Recipe, function
from tkq.runtime.call import dtypes
from tkq.runtime.device import arch

_launchers: dict = {}  # what decides the kernel -> its function; as many as kinds of call


def recipe(spec: ChannelSpec) -> Recipe:
    """The kernel's; that of bounded gates is `bounded.launch.recipe`'s."""
    kernel = "values:ChannelValues" if spec.of_values else "kernel:ChannelAttention"
    return Recipe(f"tkq.linear_attention.channels.{kernel}", (spec, plan(spec)))


class ChannelGiven(NamedTuple):
    """What a launch takes, as `kernel.Operands` has it; g: (B, S, HO, K) fp32, with of_values (B, S, HO, V). final:
    dtype of the final state, or None. x: as v, with of_values, for o times x; with less, of dots' shape, its
    dots are sums, to which end is added, None or (B or N, HO, V). reverse, updates, of_values, narrow, l2norm: as
    `ChannelSpec` has them. second, v2, rest: as `value_pairs` has them, of dots' shape the last; what comes out twice
    is `Made.dv`. v_first: the final state lies in memory as (.., V, K). cu: where packed sequences begin and
    end. state_indices: initial is a pool, which is written, too; final is its dtype."""

    q: Tensor
    k: Tensor
    v: Tensor
    g: Tensor
    beta: Tensor | None = None
    initial: Tensor | None = None
    final: torch.dtype | None = None
    reverse: bool = False
    updates: bool = False
    of_values: bool = False
    v_first: bool = False
    narrow: bool = False
    l2norm: bool = False
    x: Tensor | None = None
    less: Tensor | None = None
    end: Tensor | None = None
    second: Tensor | None = None
    v2: Tensor | None = None
    rest: Tensor | None = None
    cu: Tensor | None = None
    state_indices: Tensor | None = None


def spec_of(given: ChannelGiven) -> ChannelSpec:
    """Of a launch."""
    def name(x):
        return None if x is None else dtypes.name_of(x if isinstance(x, torch.dtype) else x.dtype)

    return ChannelSpec(name(given.q), given.q.shape[-1], given.v.shape[-1], name(given.initial), name(given.final),
                       given.reverse, name(given.beta), given.updates, given.of_values,
                       given.x is not None or given.v2 is not None, given.narrow, given.less is not None,
                       given.end is not None, given.second is not None, given.rest is not None, name(given.cu),
                       name(given.state_indices), given.l2norm)


def launch(given: ChannelGiven, scale: float) -> Made:
    """One launch; none where there are no tokens."""
    return start(given, scale)[0]


def start(given: ChannelGiven, scale: float) -> tuple:
    """(what is made, (the function that was launched, its arguments) or None)."""
    q, k, v, g, beta, initial, final = given[:7]
    x, less, end, second, v2, rest, cu, rows = given[-8:]
    (B, S, H, _), (HV, V) = q.shape, v.shape[2:]
    heads, device = max(H, HV), v.device
    wide = given.of_values and not given.narrow
    o = torch.empty(B, S, heads, V, device=device, dtype=torch.float32 if wide else v.dtype)
    state = initial if rows is not None else None if final is None else no_states(
        q, v, cu, given.v_first, final, heads)
    dots = None if x is None and v2 is None else torch.empty_like(o, dtype=torch.float32)
    dv = torch.empty_like(o) if beta is not None and (given.reverse or given.updates) else None
    if second is not None and not given.reverse:
        dv = torch.empty_like(dots)
    call = None
    if cu is not None and cu.shape[0] == 1:  # no sequence has these tokens
        for made in (o, dots, dv):
            made is None or made.zero_()
    elif B * S * heads:
        of_delta, o2 = (None, dv) if given.of_values else (dv, None)
        call = _launcher(given), (q, (k, v, o, g, beta, initial, state, x, dots, of_delta, cu, rows, less, end, second,
                                   v2, o2, rest), scale)
        call[0](*call[1])
    elif state is not None and state is not initial:
        state.zero_() if initial is None else state.copy_(initial)
    return Made(o, state, dots, dv), call


def _launcher(given):
    q, _, v, _, beta, initial, *ways, x, less, end, second, _, rest, cu, rows = given
    types = (t if t is None else t.dtype for t in (beta, initial, cu, rows))
    key = (q.get_device(), q.dtype, q.shape[3], v.shape[3], *types, *ways, x is None, less is None,
           *(y is None for y in (end, second, rest)))
    if key not in _launchers:
        arch.require_hopper(q.device)
        _launchers[key] = function(recipe(spec_of(given)))
    return _launchers[key]


def column_sums(x: Tensor, less: Tensor, end: Tensor | None = None, cu: Tensor | None = None) -> Tensor:
    """(B, S, C): of each token the sum over it and those behind it of x - less, and end (B, C). x, less: (B, S, C),
    contiguous. cu: (N + 1,), where packed sequences begin and end, as `edges` has it: sums end with a sequence, end is
    (N, C); tokens of no sequence have 0, whatever is there.

    float32 on a GPU: by one launch, or two where columns are too few to fill it, in an order that a sequence's length
    alone decides. Others by torch, in their own type."""
    if not (x.is_cuda and x.dtype == torch.float32):
        return suffix_sums(x, less, end=end, cu=cu)
    (B, S, C), y = x.shape, torch.empty_like(x)
    if y.numel():
        arch.require_hopper(x.device)
        sequences = B if cu is None else max(len(cu) - 1, 1)
        chunks, packed = -(-S // CHUNK), None if cu is None else dtypes.name_of(cu.dtype)
        segments = sums_segments(sequences * C, chunks)
        totals = y[:, :0]
        if segments > 1:
            totals = x.new_empty(B, chunks, C)
            _sums(x, SumsSpec("totals", packed=packed))(x, (less, None, None, totals, cu), segments)
        end = None if end is None or not len(end) else end.contiguous()  # of no sequences
        _sums(x, SumsSpec("sums", end is not None, packed))(x, (less, totals, end, y, cu), segments)
    return y


def _sums(x, spec):
    key = x.get_device(), spec
    if key not in _launchers:
        _launchers[key] = function(sums_recipe(spec))
    return _launchers[key]


def sums_recipe(spec: SumsSpec) -> Recipe:
    """The kernel's."""
    return Recipe("tkq.linear_attention.channels.sums:ColumnSums", (spec,))
