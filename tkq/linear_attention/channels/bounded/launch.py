"""From torch tensors to a launch of Kimi's delta rule with bounded gates."""
from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from tkq.linear_attention.channels.bounded.config import COLUMNS, LOWEST, BoundedConfig
from tkq.linear_attention.channels.bounded.plan import REACHED, plan
from tkq.linear_attention.channels.spec import BoundedReachSpec, ChannelSpec
from tkq.linear_attention.check import DELTA, check_layouts
from tkq.linear_attention.config import CHUNK
from tkq.linear_attention.launch import no_states
from tkq.linear_attention.overlap.plan import Sizes, segment_count
from tkq.runtime import Recipe, function
from tkq.runtime.call import dtypes
from tkq.runtime.device import arch

_launchers: dict = {}  # what decides the kernel -> its function; as many as kinds of call


def recipe(spec: ChannelSpec | BoundedReachSpec) -> Recipe:
    """The kernel's, or of the one that finds which chunks reach segments."""
    package = "tkq.linear_attention.channels.bounded"
    if isinstance(spec, BoundedReachSpec):
        return Recipe(f"{package}.reach:BoundedReach", (spec,))
    return Recipe(f"{package}.kernel:BoundedAttention", (spec, plan(spec)))


class BoundedGiven(NamedTuple):
    """What a launch takes, as `kernel.Operands` has it. final: is the final state made? v_first: it lies in memory as
    (.., V, K)."""

    q: Tensor
    k: Tensor
    v: Tensor
    x: Tensor
    beta: Tensor
    A_log: Tensor
    bias: Tensor
    bound: float
    initial: Tensor | None = None
    final: bool = False
    cu: Tensor | None = None
    v_first: bool = False


def supported(q: Tensor, v: Tensor, x: Tensor, bound) -> bool:
    """Is there a kernel for such gates, of q and v of four dimensions in bfloat16? Bounds below `LOWEST`, or other
    sizes, types and places in memory, take `column_decays`."""
    if not isinstance(bound, (int, float)) or isinstance(bound, bool) or not LOWEST <= bound < 0:
        return False
    if x.dtype != torch.bfloat16 or x.shape != (*v.shape[:3], q.shape[3]) or x.device != q.device:
        return False
    if q.shape[3] != COLUMNS or v.shape[3] <= CHUNK:
        return False
    try:
        check_layouts(DELTA, x, names="g")
    except ValueError:
        return False
    return True


def launch(given: BoundedGiven, scale: float) -> tuple[Tensor, Tensor | None]:
    """(o, the final state or None) by one launch, or, where sequences are cut in segments, two; none where there are no
    tokens."""
    return in_segments(given, scale, segments_of(given))


def segments_of(given: BoundedGiven) -> int:
    """Of each sequence. Packed ones, whose lengths the GPU alone knows, are left whole."""
    (B, S, heads, V), device = given.v.shape, given.v.device
    if given.cu is not None or not given.v.numel():
        return 1
    return segment_count(Sizes(B, heads, S, -(-V // (CHUNK * BoundedConfig.groups)), arch.num_sms(device), REACHED))


def in_segments(given: BoundedGiven, scale: float, count: int) -> tuple[Tensor, Tensor | None]:
    """`launch` with `count` segments per sequence."""
    q, k, v, x, beta, A_log, bias, bound, initial, final, cu, v_first = given
    o = torch.empty(v.shape, device=v.device, dtype=v.dtype)
    state = no_states(q, v, cu, v_first, torch.float32, v.shape[2]) if final else None
    if cu is not None and cu.shape[0] == 1:  # no sequence has these tokens
        o.zero_()
    elif o.numel():
        reach = reach_of(given, count) if count > 1 else None
        others = k, v, o, x, beta, A_log, bias, initial, state, cu, reach
        _launcher(q, spec_of(given, count))(q, others, scale, bound)
    elif state is not None:
        state.zero_() if initial is None else state.copy_(initial)
    return o, state


def reach_of(given: BoundedGiven, count: int) -> Tensor:
    """(B, N - 1, HV) int32: of N segments, as `reach.BoundedReach` makes it."""
    found = torch.empty(given.q.shape[0], count - 1, given.v.shape[2], device=given.q.device, dtype=torch.int32)
    spec = BoundedReachSpec(dtypes.name_of(given.beta.dtype))
    _launcher(given.k, spec)(given.k, (given.x, given.beta, given.A_log, given.bias), found, given.bound)
    return found


def spec_of(given: BoundedGiven, count: int = 1) -> ChannelSpec:
    """The spec of a launch with `count` segments per sequence."""
    beta, initial, cu = (x if x is None else dtypes.name_of(x.dtype) for x in (given.beta, given.initial, given.cu))
    return ChannelSpec(dtypes.name_of(given.q.dtype), given.q.shape[3], given.v.shape[3], initial,
                       "fp32" if given.final else None, delta=beta, packed=cu, l2norm=True, bounded=True,
                       reach=count > 1)


def _launcher(first, spec):
    key = first.get_device(), spec
    if key not in _launchers:
        arch.require_hopper(first.device)
        _launchers[key] = function(recipe(spec))
    return _launchers[key]
