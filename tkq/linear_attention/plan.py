"""The configuration of a launch of `engine.kernel.LinearAttention`, from its spec. What decides before it:
`split.plan`, of segments, and of columns and heads a block; `blocks.plan.by_blocks` and `token_rows.plan.by_rows`, of
the other kernels. Calls begin in `split.launch.start`."""
from __future__ import annotations

from tkq.linear_attention.config import CHUNK, LinearConfig
from tkq.linear_attention.spec import NARROW, LinearSpec

SHARED = 222 * 1024  # bytes of a block that tiles may take: 5 KB are left for factors and semaphores
MOST_STAGES = 4
# registers: of pairs, where the producer's warpgroup makes what gates are for, too; where scores are made in ping-pong
OF_PAIRS, PING_PONG = (40, 104, 184), (24, 144, 200)


def plan(spec: LinearSpec, groups: int | None = None, heads: int = 1) -> LinearConfig:
    """As many warpgroups for the state as V fills, two at most, or one where they have no registers for two: where K
    is above 128 a state of 64 rows is 72 to 128 of a thread's. As many stages as there is room for. groups: of these
    warpgroups, at most. heads: 2: of a block, where `paired` allows it.

    Raises:
        ValueError: heads is neither 1 nor, where `paired` allows it, 2.
    """
    if heads != 1 and not (heads == 2 and paired(spec)):
        raise ValueError(f"plan: heads is {heads}, allowed is 1{' or 2' * paired(spec)} for {spec}")
    groups = heads if spec.value_dim <= CHUNK or spec.head_dim > NARROW or groups == 1 else 2
    if heads == groups == 1 and ping_pong(spec):
        stages, outputs = _room(spec, groups, heads, MOST_STAGES)
        if stages == MOST_STAGES:  # so that a stage is always the same warpgroup's
            return LinearConfig(groups, stages, PING_PONG, scores=2, score_stages=MOST_STAGES, outputs=outputs)
    ahead = MOST_STAGES if factors_alone(spec) else 2
    stages, outputs = _room(spec, groups, heads, ahead)
    return LinearConfig(groups, stages, OF_PAIRS if heads == 2 else _registers(spec, groups), heads, score_stages=ahead,
                        outputs=outputs)


def _room(spec, groups, heads, ahead):
    """(stages of tokens, tiles for a warpgroup's outputs) that there is room for. ahead: stages of scores."""
    tile, alone = 2 * CHUNK * CHUNK, factors_alone(spec)
    operands, values = 2 - alone + (spec.second is not None), 1 + spec.has_x + (spec.second == "pair")
    known = spec.inverse == "in"
    stage = operands * 2 * CHUNK * spec.head_dim + (groups * values + known) * tile
    scores = 4 * spec.scored if spec.second else (ahead if spec.scored else 2) * heads + 2 * spec.exact
    rest = 0 if alone else (scores + groups + spec.summed) * tile
    if spec.delta:
        rest += (2 if known else 4) * tile + 1024
    elif spec.ssd or ahead * heads > 2:  # factors of more stages, or of more kinds
        rest += 2048 * (ahead * heads - 1)
    stages = min(MOST_STAGES, (SHARED - rest) // stage)
    return stages, 1 + (plain(spec) and not spec.summed and (SHARED - rest - groups * tile) // stage >= stages)


def paired(spec: LinearSpec) -> bool:
    """Can a block have two heads that share one of q and k? Each has a warpgroup of the state, and scores of its own
    made of the same products, or, of states alone, factors. K is 128 at most, and there are no sums of o times x, whose
    scores are in two parts: with more, registers are short. Sequences and states are those of a batch, in the order of
    the batch."""
    one = spec.delta or spec.dot or spec.second or not (spec.scored or factors_alone(spec))
    found = spec.packed or spec.pool or spec.checkpoints or spec.kept
    return spec.value_dim <= CHUNK and spec.head_dim <= NARROW and not (one or found)


def plain(spec: LinearSpec) -> bool:
    """Are there scores and outputs, one of each, in one part, and no delta rule?"""
    return spec.writes and spec.scored and not (spec.delta or spec.dot or spec.second)


def ping_pong(spec: LinearSpec) -> bool:
    """Are scores worth two warpgroups in ping-pong? With gates and one warpgroup of the state: without,
    they do not take longer than what the state does with them. Not those for which registers are short."""
    return plain(spec) and spec.gated and spec.head_dim <= NARROW


def factors_alone(spec: LinearSpec) -> bool:
    """Does a launch make states alone, of gates that make a factor for each token?"""
    return spec.part == "states" and spec.gated and not spec.delta


def spilled(spec: LinearSpec) -> int:
    """Local loads and stores that a kernel may have: of wider states with the delta rule, all of them in front of the
    loop over chunks; where a block finds its sequence or its states, numbers of its task, of the delta rule's forward
    and of Mamba-2; where the delta rule has three outputs."""
    found = spec.packed or spec.pool
    if spec.delta and (spec.updates or (spec.reverse and spec.writes)):
        return 16 if found else 8
    if spec.delta and (spec.head_dim > NARROW or not spec.writes):
        return 8
    if spec.delta and found and not spec.reverse:
        return 16
    return 4 if spec.ssd and found else 0


def _registers(spec, groups):
    """The delta rule's scores take more, where they make an inverse."""
    if spec.head_dim > NARROW:
        return 40, 224, 240
    if groups == 1:
        return 24, 232, 240
    if spec.inverse == "in":
        return (24, 128, 176) if spec.reverse and spec.writes else (24, 104, 192)
    if spec.second and spec.writes and (spec.both_ways or not spec.scored):
        return (24, 88, 200) if spec.scored else (24, 56, 216)
    return (24, 136, 176) if spec.delta else (24, 104, 192)
