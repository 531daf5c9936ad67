"""From torch tensors to a launch."""
from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from tkq.linear_attention.blocks.plan import by_blocks
from tkq.linear_attention.blocks.plan import plan as of_blocks
from tkq.linear_attention.config import CHUNK
from tkq.linear_attention.plan import plan
from tkq.linear_attention.spec import LinearSpec, SsdSpec
from tkq.linear_attention.token_rows.plan import by_rows
from tkq.linear_attention.token_rows.plan import plan as of_rows
from tkq.runtime import Recipe, function
from tkq.runtime.call import dtypes
from tkq.runtime.device import arch

_launchers: dict = {}  # what decides the kernel -> its function; as many as kinds of call


def recipe(spec: LinearSpec, groups: int | None = None, heads: int = 1) -> Recipe:
    """The kernel's. groups, heads: as `plan` has them. The delta rule's forward alone and Mamba-2's gradients have ones
    of their own."""
    if heads == 1 and by_rows(spec):
        return Recipe("tkq.linear_attention.token_rows.kernel:TokenRows", (spec, of_rows(spec)))
    if heads == 1 and by_blocks(spec, groups):
        return Recipe("tkq.linear_attention.blocks.kernel:DeltaBlocks", (spec, of_blocks(spec)))
    return Recipe("tkq.linear_attention.engine.kernel:LinearAttention", (spec, plan(spec, groups, heads)))


class Steps(NamedTuple):
    """Mamba-2's part of a launch, as `engine.ssd.SsdOperands` has it: d = clamp(softplus(dt + bias), low, high), or
    without softplus. gated: o is multiplied by silu(x). skip_gradient: the sums over tokens of v times x come out."""

    dt: Tensor
    A: Tensor
    bias: Tensor | None
    softplus: bool
    low: float
    high: float
    skip: Tensor | None = None
    gated: bool = False
    skip_gradient: bool = False

    @property
    def spec(self) -> SsdSpec:
        dt, bias, skip = (x if x is None else dtypes.name_of(x.dtype) for x in (self.dt, self.bias, self.skip))
        return SsdSpec(dt, bias, self.softplus, skip, 1 if skip is None else self.skip.dim(), self.gated,
                       self.skip_gradient)


class Given(NamedTuple):
    """What an engine's launch takes, as `engine.operands.Operands` has it. final: dtype of the final state, or None. x:
    for sums of o times x, or, with steps.gated, what o is multiplied by. reverse, strict, updates, others: as
    `LinearSpec` has them. cu: where packed sequences begin and end. state_indices: initial is a pool, which is written,
    too; final is its dtype. v_first: the final state lies in memory as (.., V, K). steps: Mamba-2's, in the place of g.
    state_v_first: states are (.., V, K). checkpoint_every: tokens, a multiple of 64, from a state that is written on
    the way to the next. part, segments: as `LinearSpec` and `engine.segmented` have them: with "states" what comes out
    is (B * N, HO, C, K), contiguous. groups, heads: as `plan` has them. q2, or k2 and v2: of the shapes of q, k and v,
    as `engine.second` has them; sums are of o times x, less o2 times v, or of o times v2, which x is, too. summed,
    less, kept, blocks: as `LinearSpec` has them; less is as o, kept is beta. inverse: (B, S, HO, 64), as a launch
    before it made it, of v's dtype; or None. transfers: with beta, reversed, as the forward made them (see `Made`):
    then there are as many segments; or None. starts: (B * N, HO, K, V), the states that segments begin with, as another
    launch made them: none are computed, there are as many segments, and final states are those behind each; or None.
    reach: (2, B * N, HO) int32, as `split.reach.Reach` makes it for both ways, reversed the forward's, or (1, ..),
    which is enough for a forward without updates; without a part (B, N - 1, HO), of N segments of each sequence, as
    `overlap.segments` takes it; or None. halves: reach and transfers are those of each half of a segment. apart: sums
    of each 64 columns of V come out, not added up."""

    q: Tensor
    k: Tensor
    v: Tensor
    g: Tensor | None = None
    beta: Tensor | None = None
    initial: Tensor | None = None
    final: torch.dtype | None = None
    x: Tensor | None = None
    reverse: bool = False
    strict: bool = False
    updates: bool = False
    cu: Tensor | None = None
    state_indices: Tensor | None = None
    v_first: bool = False
    steps: Steps | None = None
    state_v_first: bool = False
    others: bool = False
    checkpoint_every: int | None = None
    part: str | None = None
    segments: int = 1
    groups: int | None = None
    q2: Tensor | None = None
    k2: Tensor | None = None
    v2: Tensor | None = None
    heads: int = 1
    inverse: Tensor | None = None
    transfers: Tensor | None = None
    starts: Tensor | None = None
    reach: Tensor | None = None
    halves: bool = False
    summed: bool = False
    less: Tensor | None = None
    kept: Tensor | None = None
    blocks: bool = False
    apart: bool = False

    @property
    def of_inverse(self) -> str | None:
        """As `LinearSpec` has it: states of segments leave it to the outputs."""
        if self.inverse is not None:
            return "in"
        of_states = self.part == "states" and self.beta is not None and not self.reverse
        return "out" if of_states or (self.updates and not self.blocks) else None

    @property
    def second(self) -> str | None:
        """As `LinearSpec` has it."""
        return "query" if self.q2 is not None else "pair" if self.k2 is not None else None

    @property
    def gated(self) -> bool:
        """Does the state decay, without the delta rule?"""
        return self.beta is None and not self.g is self.steps is self.kept is None

    @property
    def dot(self) -> bool:
        """Are there sums of o times x?"""
        return self.x is not None and not (self.steps and self.steps.gated)


class Made(NamedTuple):
    """o, the final state or None, (B, S, HO) sums of o times x or None; apart (P, B, S, HO), of each 64 columns. dv:
    with updates what `engine.delta` keeps; with q2 its outputs; or None. With beta and reversed o is the gradient of v,
    dots beta's. Summed, o and dv are of two neighbouring heads each. of_skip: (B, HO, V), D's gradient, or None; of
    segments (B * N, ..), of packed sequences (N, ..). diagonal: with steps and dots (B, S, HO), q k of each token.
    checkpoints: (B, S / checkpoint_every, HO, K, V), rows as `engine.checkpoints` has them, zeros in those of no
    checkpoint; or None. decays: (B * N, HO), of segments. inverse: (B, S, HO, 64), of v's dtype, where it was made to
    come out; or None. transfers: (B * N, HO, K, K) fp32, of what the delta rule's segments make of a state the
    transposes, where there are segments; not written where reach has nothing of a state; or None. They are the state of
    a launch with part "transfers". starts: (B * N, HO, K, V) fp32, the states that segments begin with, reversed those
    behind them, where there are segments; or None. reach: as `Given` has it, of a forward where it was made; or
    None."""

    o: Tensor
    state: Tensor | None
    dots: Tensor | None
    dv: Tensor | None = None
    of_skip: Tensor | None = None
    diagonal: Tensor | None = None
    checkpoints: Tensor | None = None
    decays: Tensor | None = None
    inverse: Tensor | None = None
    transfers: Tensor | None = None
    starts: Tensor | None = None
    reach: Tensor | None = None


def spec_of(given: Given) -> LinearSpec:
    """Of a launch."""
    def name(x):
        return None if x is None else dtypes.name_of(x if isinstance(x, torch.dtype) else x.dtype)

    g, steps = given.g, given.steps
    gate = "token" if steps else "none" if g is None else "head" if g.dim() == 1 else "token"
    return LinearSpec(name(given.q), given.q.shape[-1], given.v.shape[-1], gate, name(given.initial), name(given.final),
                      given.reverse, name(given.beta), given.dot, given.strict, given.updates, name(given.cu),
                      name(given.state_indices), steps and steps.spec, given.state_v_first, given.others,
                      None if given.checkpoint_every is None else "fp32", given.part, given.second,
                      given.of_inverse, given.summed, given.less is not None, name(given.kept), given.blocks,
                      _reach_of(given) is not None, _halves(given))


def _reach_of(given):
    """What a launch takes of it: segments' outputs none."""
    if given.reach is None or given.part == "outputs":
        return None
    return given.reach if given.part is None else given.reach[int(given.reverse)]


def _halves(given):
    """Does a launch make states of halves?"""
    return given.halves and given.part == "states"


def launch(given: Given, scale: float) -> Made:
    """One launch of the engine; none where there are no tokens."""
    return start(given, scale)[0]


def start(given: Given, scale: float) -> tuple:
    """(what is made, (the function that was launched, its arguments) or None)."""
    made, call = prepared(given, scale)
    if call is not None:
        call[0](*call[1])
    return added_up(given, made), call


def added_up(given: Given, made: Made) -> Made:
    """Of a launch that is on its way: sums of o times x as `given` wants them."""
    dots = made.dots
    return made if dots is None or given.apart else made._replace(dots=sum(dots[1:], dots[0]))


def prepared(given: Given, scale: float) -> tuple:
    """(room for what is made, with sums apart, (the function that makes it, its arguments)), of a launch that is still
    to come; or what is made, and None, where there is none."""
    q, k, v, g, beta, initial, _, x, *_ = given
    (B, S, H, _), (HV, V) = q.shape, v.shape[2:]
    heads, device, steps, writes = max(H, HV), v.device, given.steps, given.part in (None, "outputs")
    o = torch.empty(B, S, heads // (1 + given.summed), V, device=device, dtype=v.dtype) if writes else None
    x = x if writes and given.second != "pair" else None
    dots = diagonal = of_skip = decays = None
    if writes:
        state = initial if given.state_indices is not None else final_state(given, heads, given.segments)
    else:
        state, decays = _of_segments(given, heads)
    if writes and given.dot:
        # sums of no sequence's tokens are nothing: with beta they are its gradient
        make = torch.empty if given.cu is None or beta is None else torch.zeros
        dots = make(-(-V // CHUNK), B, S, heads, device=device, dtype=torch.float32)
    dv = torch.empty_like(o) if writes and _gives_two(given) else None
    inverse = _inverse(given, heads)
    if steps and steps.skip_gradient:
        count = B * given.segments if given.cu is None else given.cu.shape[0] - 1
        of_skip = torch.empty(count, heads, V, device=device, dtype=torch.float32)
    if steps and given.dot and writes:
        diagonal = torch.empty(B, S, heads, device=device, dtype=torch.float32)
    checkpoints, call, every = _checkpoints(given, heads), None, given.checkpoint_every
    if checkpoints is not None and not checkpoints.numel():
        given = given._replace(checkpoint_every=None)
    if given.cu is not None and given.cu.shape[0] == 1:  # no sequence has these tokens
        o.zero_()
        dv = None if dv is None else dv.zero_()
    elif B * S * heads:
        of_steps = steps and (steps.dt, steps.A, steps.bias, steps.skip, steps.low, steps.high, of_skip, diagonal)
        last = state if writes or given.state_v_first else state.mT
        beta = beta if given.kept is None else given.kept
        call = _launcher(given), (q, (k, v, o, g, beta, initial, last, x, dots, dv, given.cu, given.state_indices,
                                      *((checkpoints, every // CHUNK) if given.checkpoint_every else (None, None)),
                                      decays, given.q2, given.k2, given.v2, inverse, given.less,
                                      _reach_of(given)), scale, of_steps)
    else:
        if state is not None and state is not initial:
            state.zero_() if initial is None else state.copy_(initial)
        if of_skip is not None:
            of_skip.zero_()
    return Made(o, state, dots, dv, of_skip, diagonal, checkpoints, decays,
                inverse if given.of_inverse == "out" else None), call


def _gives_two(given):
    """Are there outputs beside o?"""
    return given.second == "query" or given.updates


def _inverse(given, heads):
    """The one that is given, or room for it; None without."""
    if given.of_inverse != "out":
        return given.inverse
    return given.v.new_empty(*given.q.shape[:2], heads, CHUNK)


def _checkpoints(given, heads):
    """Room for checkpoints, (B, rows, HO, K, V), of which K or V comes first in memory; None where there are none."""
    if given.checkpoint_every is None:
        return None
    (B, S, _, K), V = given.q.shape, given.v.shape[3]
    v_first, make = given.v_first or given.state_v_first, torch.empty if given.cu is None else torch.zeros
    found = make(B, S // given.checkpoint_every, heads, *((V, K) if v_first else (K, V)), device=given.v.device)
    return found.mT if v_first else found


def final_state(given, heads, segments=1):
    """Room for the final states, or those behind segments; None where they are not asked for."""
    if given.final is None:
        return None
    count = given.q.shape[0] * segments if given.cu is None else given.cu.shape[0] - 1
    sizes = given.q.shape[3], given.v.shape[3]
    v_first = given.v_first or given.state_v_first
    found = torch.empty(count, heads, *(reversed(sizes) if v_first else sizes), device=given.v.device,
                        dtype=given.final)
    return found.mT if v_first and not given.state_v_first else found


def _of_segments(given, heads):
    """Room for what segments make of states: what they add, (B * N, HO, C, K), and factors (B * N, HO) or None."""
    rows, K, V = given.q.shape[0] * given.segments, given.q.shape[3], given.v.shape[3]
    columns = K if given.part == "transfers" else V
    states = torch.empty(rows, heads, columns, K, device=given.v.device, dtype=torch.float32)
    return states, torch.empty(rows, heads, device=given.v.device, dtype=torch.float32) if given.gated else None


def no_states(q, v, cu, v_first, dtype=torch.float32, heads=None) -> Tensor:
    """Room for final states, (N, HV, K, V), of which K or V comes first in memory."""
    count, sizes = q.shape[0] if cu is None else cu.shape[0] - 1, (q.shape[3], v.shape[3])
    shape = count, heads or v.shape[2], *(reversed(sizes) if v_first else sizes)
    found = torch.empty(shape, device=v.device, dtype=dtype)
    return found.mT if v_first else found


def _launcher(given):
    q, _, v, g, beta, initial, final, x, *ways = given[:11]
    types = (t if t is None else t.dtype for t in (beta, initial, given.cu, given.state_indices))
    of_steps = given.steps and given.steps.spec
    gate = 0 if g is None else g.dim()
    key = (q.get_device(), q.dtype, q.shape[3], v.shape[3], gate, *types, final, x is None, of_steps,
           given.state_v_first, given.others, given.checkpoint_every is None, *ways, given.part, given.groups,
           given.second, given.heads, given.of_inverse, given.summed, given.less is None,
           given.kept if given.kept is None else given.kept.dtype, given.blocks, _reach_of(given) is None,
           _halves(given))
    if key not in _launchers:
        arch.require_hopper(q.device)
        _launchers[key] = function(recipe(spec_of(given), given.groups, given.heads))
    return _launchers[key]
