"""A launch of the engine, or, where few long sequences would leave most of the GPU idle, several: the states that
segments of sequences make, those that they begin with, and the outputs; with the delta rule also what segments make of
a state, and with its gates, ahead of all, which chunks reach a segment's end. Of its forward alone two, where that
says with which chunk each segment's block may begin."""
from __future__ import annotations

import torch
from torch import Tensor

from tkq.linear_attention import launch as engine
from tkq.linear_attention.blocks.plan import has_blocks_kernel
from tkq.linear_attention.config import CHUNK
from tkq.linear_attention.launch import Given, Made
from tkq.linear_attention.overlap.plan import Sizes as OverlapSizes
from tkq.linear_attention.overlap.plan import segment_count
from tkq.linear_attention.spec import GROUP
from tkq.linear_attention.split.plan import MOST, REACHED, SHORTEST, Sizes, Split, split
from tkq.linear_attention.split.spec import WIDEST, CombineSpec, ReachSpec
from tkq.runtime import Recipe, function
from tkq.runtime.call import dtypes
from tkq.runtime.device import arch

_launchers: dict = {}  # what decides the kernel -> its function


def recipe(spec: CombineSpec | ReachSpec) -> Recipe:
    """The kernel's that combines states, or finds which chunks reach them."""
    kernel = "reach:Reach" if isinstance(spec, ReachSpec) else "combine:CombineStates"
    return Recipe(f"tkq.linear_attention.split.{kernel}", (spec,))


def launch(given: Given, scale: float) -> Made:
    """As `tkq.linear_attention.launch.launch`."""
    return start(given, scale)[0]


def start(given: Given, scale: float) -> tuple:
    """As `tkq.linear_attention.launch.start`, with None in the place of the call where there are several."""
    how = split_of(given)
    count = overlapping(given, how)
    if count > 1:
        return in_overlapping_segments(given, scale, count), None
    if how.segments > 1 and given.beta is not None and not given.reverse and not given.updates:
        given = by_blocks(given)
    if given.summed:
        how = how._replace(groups=2)
    if how.segments > 1 or given.starts is not None:
        return in_segments(given, scale, how), None
    return engine.start(laid_out(given, how), scale)


def laid_out(given: Given, how: Split) -> Given:
    """As `how` says, but for segments."""
    return given._replace(groups=how.groups if how.groups == 1 else None, heads=how.heads)


def split_of(given: Given) -> Split:
    """What `plan.split` says; as many segments as a launch had whose transfers, or starts, are given. Packed sequences,
    whose lengths the GPU alone knows, pools, checkpoints, and states that are wider than a block of `CombineStates`
    has threads are left whole."""
    (B, S, H, K), (HV, V) = given.q.shape, given.v.shape[2:]
    if given.blocks and given.reverse and given.transfers is None:
        return Split(2, 1)
    if given.starts is not None:
        return Split(2, len(given.starts) // B)
    if given.transfers is not None:
        return Split(2, len(given.transfers) // (B * (1 + given.halves)))
    if given.cu is not None or given.state_indices is not None or given.checkpoint_every or K > WIDEST:
        return Split(2, 1)
    return split(Sizes(B, max(H, HV), S, K, V, arch.num_sms(given.v.device), given.beta is not None, given.reverse,
                       True, H,
                       given.dot or given.others or not given.second is given.kept is None,
                       given.dot and given.beta is None, given.second is not None,
                       given.beta is not None and given.reverse,
                       # a backward has what is won more than once; without, it is less than what gates may cost
                       reach=given.updates and _by_gates(given)))


def _by_gates(given):
    """May gates decide what reaches a segment's end? Of the delta rule's forward by blocks."""
    return (given.beta is not None and given.g is not None and not given.reverse and given.v.is_cuda
            and has_blocks_kernel(given.q.shape[3], given.v.shape[3]))


def overlapping(given: Given, how: Split) -> int:
    """How many overlapping segments of each sequence: of the delta rule's forward without gradients, where `how` leaves
    it whole. A head that never forgets is gone through by one block."""
    whole = given.cu is given.state_indices is given.checkpoint_every is None and not given.updates
    if how.segments > 1 or not (whole and given.v.numel() and _by_gates(given)):
        return 1
    (B, S, heads, V), shared, sms = given.v.shape, given.q.shape[2], arch.num_sms(given.v.device)
    return segment_count(OverlapSizes(B, max(heads, shared), S, -(-V // (2 * GROUP)), sms, REACHED))


def in_overlapping_segments(given: Given, scale: float, count: int) -> Made:
    """Of the delta rule's forward, with `count` segments per sequence, all by one launch behind the one that says which
    chunks reach them."""
    reach = reach_of(given._replace(segments=count), 1)[0].view(len(given.v), count, -1)
    return engine.launch(given._replace(reach=reach[:, :-1]), scale)


def by_blocks(given: Given) -> Given:
    """The delta rule's forward with updates, to go block by block where its columns are whole, and its sequences, or
    where gates may decide what reaches a segment's end."""
    if not (given.v.is_cuda and has_blocks_kernel(given.q.shape[3], given.v.shape[3])):
        return given._replace(blocks=False)
    how = split_of(given)
    return given._replace(blocks=how.groups == 2 and (how.segments == 1 or _by_gates(given)))


def sums_neighbours(given: Given) -> bool:
    """Can a launch with second operands, or one of Mamba-2's for B and C, add up outputs of neighbouring heads? Where
    these share values by twos, and a block has two groups of V's columns."""
    heads, of_values = given.q.shape[2], given.v.shape[2]
    if not heads or heads // of_values % 2 or given.v.shape[3] <= GROUP:
        return False
    return not given.v.is_cuda or split_of(given).groups == 2


def in_segments(given: Given, scale: float, how: Split) -> Made:
    """Of any given without cu and state_indices. What segments add to states and make of them is computed first, with
    no outputs: nothing is corrected behind them, and all of them are rounded once, from the state that one launch has
    there but for the order in which it was summed."""
    given = laid_out(given, how)._replace(segments=how.segments)
    if given.starts is not None:
        return _outputs(given, scale, given.starts, given.final)
    if given.blocks and not given.reverse:
        given = given._replace(halves=_in_halves(given))
        given = given._replace(reach=reach_of(given, 1 + given.updates))
    parts = given._replace(segments=given.segments * (1 + given.halves))
    made = engine.launch(states_of(parts), scale)
    transfers, inverse = given.transfers, given.inverse
    if made.inverse is not None:
        inverse = made.inverse
        transfers = engine.launch(states_of(parts)._replace(part="transfers", inverse=inverse), scale).state
    first, final = combined(parts, made.state, made.decays if transfers is None else transfers)
    if given.halves:
        first = first[int(given.reverse)::2]
    inverse = None if given.blocks else inverse
    made = _outputs(given._replace(inverse=inverse), scale, first)
    kept = dict(inverse=inverse, transfers=transfers, reach=given.reach) if given.updates else {}
    return made._replace(state=final, **kept)


def _outputs(given: Given, scale: float, starts: Tensor, final: torch.dtype | None = None) -> Made:
    """Of segments that begin with these states, with those behind them where these have a dtype."""
    return engine.launch(given._replace(part="outputs", initial=starts, final=final), scale)._replace(starts=starts)


def _in_halves(given):
    """Are states made of halves of segments? Where heads are few that keep a state for longer than a segment, twice as
    many blocks have half of their chunks each."""
    chunks = -(-given.q.shape[1] // CHUNK)
    each = -(-chunks // given.segments)
    return each % 2 == 0 and each >= 2 * SHORTEST and 2 * len(given.q) * given.segments <= MOST


def reach_of(given: Given, ways: int = 2) -> Tensor:
    """(ways, B * N, HO) as `Given` has it, of the delta rule's forward."""
    k, heads, rows = given.k, max(given.q.shape[2], given.v.shape[2]), given.segments * (1 + given.halves)
    found = torch.empty(ways, len(k) * rows, heads, device=k.device, dtype=torch.int32)
    run(ReachSpec(dtypes.name_of(k.dtype), k.shape[3], dtypes.name_of(given.beta.dtype)), k, given.g, given.beta, found)
    return found


def states_of(given: Given) -> Given:
    """What makes the states: without all that decides outputs alone. By blocks a forward's are made by chunks, whose
    inverses transfers have, too."""
    steps = given.steps and given.steps._replace(skip=None, gated=False, skip_gradient=False)
    x = given.x if given.dot and given.beta is None else None
    return given._replace(part="states", initial=None, final=torch.float32, x=x,
                          strict=False, updates=False, others=False, steps=steps, q2=None, summed=False, less=None,
                          heads=given.heads if given.gated else 1,
                          blocks=given.blocks and given.reverse)


def combined(given: Given, states: Tensor, decays: Tensor | None) -> tuple:
    """(states that segments begin with (B * N, HO, K, V), the final state or None); or (.., V, K), as given has them.
    states, decays: of `launch.Made`; with the delta rule transfers are in the place of decays."""
    B, V, rows = given.q.shape[0], given.v.shape[3], states.shape[0]
    final = engine.final_state(given, states.shape[1])

    def v_first(x):
        return x if x is None or given.state_v_first else x.mT

    transfer = "none" if decays is None else "heads"
    if given.beta is not None:
        transfer = "transposed" if given.reverse else "matrix"
    spec = CombineSpec(states.shape[3], transfer, *(x if x is None else dtypes.name_of(x.dtype)
                                                    for x in (given.initial, final)), given.reverse,
                       given.reach is not None, given.halves)
    reach = None if given.reach is None else given.reach.view(-1, B, rows // B, given.reach.shape[2])
    decays = None if decays is None else decays.view(B, rows // B, *decays.shape[1:])
    run(spec, states.view(B, rows // B, *states.shape[1:]), decays, v_first(given.initial), v_first(final), V,
        reach)
    return states if given.state_v_first else states.mT, final


def run(spec: CombineSpec | ReachSpec, first: Tensor, *rest) -> None:
    """The kernel of these tensors."""
    key = first.get_device(), spec
    if key not in _launchers:
        arch.require_hopper(first.device)
        _launchers[key] = function(recipe(spec))
    _launchers[key](first, *rest)
