"""How a call's work is spread over the GPU's SMs: V over blocks, sequences over segments. From sizes alone."""
from __future__ import annotations

from functools import lru_cache
from typing import NamedTuple

from tkq.linear_attention.config import CHUNK
from tkq.linear_attention.spec import NARROW

LONG = 32  # chunks of a sequence: shorter ones are done before what splits them would be worth another kernel
SHORTEST = 8  # chunks of a segment: below, launches take longer than what they save
GAIN = 0.8  # of the time without: what is split costs more work, and takes less time by this at most
PAIRS_GAIN = 0.95  # of segments of two heads a block, whose scores are less work
BUSY = 0.9  # share of the SMs: launches that keep as many busy are made one after the other
MOST = 65535  # sequences times segments: blocks along a dimension of the grid


class Sizes(NamedTuple):
    """Of a launch: sequences, computed heads, tokens of each sequence, K, V, multiprocessors; heads of q and k, as many
    as are computed where not given. delta: the delta rule's. reverse: from the last token to the first. queries:
    outputs are computed (else the corrected values alone). single: of one head a block: with sums of outputs times
    another tensor, second operands, or no scores (see `linear_attention.plan.paired`). exact: with such sums, whose
    operands are in two parts. second: with second operands. whole: no segments are asked for. known: inverses
    are given. reach: segments' states are made of those chunks alone that reach their end (see `reach.Reach`)."""

    sequences: int
    heads: int
    tokens: int
    K: int
    V: int
    sms: int
    delta: bool = False
    reverse: bool = False
    queries: bool = True
    key_heads: int | None = None
    single: bool = False
    exact: bool = False
    second: bool = False
    whole: bool = False
    known: bool = False
    reach: bool = False


class Split(NamedTuple):
    """groups: of 64 columns of V, of a block: 1 or 2. segments: of each sequence. heads: of a block: 1, or 2 that share
    one of q and k, each with a group."""

    groups: int
    segments: int
    heads: int = 1


@lru_cache(maxsize=1024)  # a backward asks for each of its launches, and the search takes longer than a launch
def split(sizes: Sizes) -> Split:
    """The one that takes the least time as `time` counts it, of those where that is less than `GAIN` (with two heads a
    block `PAIRS_GAIN`) of the time of whole sequences with as many columns a block as there is room for, or with two
    heads a block where that takes no longer; that one where there are none. Of those that take the same time, the one
    with the fewest segments, and then with the most columns a block."""
    whole, pairs = Split(min(2, _tiles(sizes.V)), 1), Split(2, 1, 2)
    usual = pairs if _paired(sizes) and time(sizes, pairs) <= time(sizes, whole) else whole
    if sizes.tokens <= (LONG - 1) * CHUNK or not sizes.sequences or not sizes.heads:
        return usual
    allowed = {1: GAIN * time(sizes, usual), 2: PAIRS_GAIN * time(sizes, usual)}
    found = [one for one in _in_segments(sizes) if time(sizes, one) <= allowed[one.heads]]
    return min(found, key=lambda one: (time(sizes, one), one.segments, -one.groups), default=usual)


def _in_segments(sizes):
    """Of each count, one head a block and, where there are any, two. As many segments as have no more blocks than twice
    the SMs: beyond, waves are as full as they can be."""
    chunks = -(-sizes.tokens // CHUNK)
    for heads in (1, 2) if _paired(sizes) else (1,):
        filled = 2 * sizes.sms * heads // (sizes.sequences * sizes.heads) + 1
        most = 1 if sizes.whole else max(1, min(chunks // SHORTEST, MOST // sizes.sequences, filled))
        for count in range(heads, most + 1):  # heads: two of a block are in two segments at least
            if -(-chunks // -(-chunks // count)) == count:  # no segment is empty
                yield from (Split(groups, count, heads) for groups in range(heads, 1 + min(2, heads * _tiles(sizes.V))))


def _paired(sizes):
    """Do neighbouring heads share q and k, and does one fill a group?"""
    shared = sizes.key_heads and sizes.heads // sizes.key_heads % 2 == 0
    return bool(shared) and sizes.V <= CHUNK and sizes.K <= NARROW and not (sizes.delta or sizes.single)


def time(sizes: Sizes, how: Split) -> float:
    """Of all launches, in products of 64 x 64 x 64, of which an SM's tensor cores make one in about 128 clocks. A
    launch takes the longer of two: waves of blocks, times the chunks of each, times what a chunk takes; and what it
    moves to and from memory. States first cost a second look at keys and values."""
    few = sizes.reach and how.groups == 2  # by blocks, which make inverses of their own
    outputs = of_launch(sizes._replace(known=sizes.reverse or (how.segments > 1 and not few)), how, _tiles(sizes.V),
                        True)
    if how.segments == 1:
        return outputs
    reached = min(sizes.tokens, REACHED * CHUNK * how.segments) if few else sizes.tokens
    states = of_launch(sizes._replace(queries=False, tokens=reached), how, _tiles(sizes.V), False)
    if sizes.delta and not few:
        states += of_launch(sizes._replace(queries=False, known=True), how, _tiles(sizes.K), False)
    moved = sizes.sequences * sizes.heads * sizes.K * sizes.V * STATE / BYTES
    return outputs + states + LAUNCHES + (MATRIX if sizes.delta else moved) * how.segments


# Products that a thing takes as long as. Two launches more; what multiplies a segment's states; the barriers on the way
# from one state to the next; outputs; decays, masks and rounding of the delta rule's scores; its inverse, for which
# scores have fewer registers beside two warpgroups of states than beside one. With these the delta rule's times are
# within 7 % of those of bench/results/h200/tuning/linear_splits.json up to four segments.
LAUNCHES, MATRIX = 80, 40
BARRIERS, OUTPUTS, ELEMENTS = 4, 2, 12
INVERSE = {1: 16, 2: 26}
WAITS = 8  # for what a state gives for keys before it is solved, where inverses are given
PARTS = {1: 15, 2: 18}  # rounding operands in two parts; a third of it where there are no outputs
SECOND_HEAD = 1.5  # for each 64 of K: what a second head takes (bench/results/h200/tuning/mamba2_pairs.json)
REACHED = 8  # chunks: as many as a decay of 2^-0.32 a token lets reach the end (see `reach.NOTHING`)
BYTES = 220_000  # that memory gives in the time of a product: 3.0 TB/s, 128 clocks of 1.75 GHz
STATE = 32  # bytes of a segment's state, for each number: written and read twice in fp32, at half of memory's bandwidth


def of_launch(sizes: Sizes, how: Split, tiles: int, writes: bool) -> float:
    """Of blocks for `tiles` of 64 columns."""
    blocks = sizes.sequences * (sizes.heads // how.heads) * how.segments * -(-tiles * how.heads // how.groups)
    chunks = -(-sizes.tokens // CHUNK)
    each = of_chunk(sizes, how.groups, writes) + (how.heads - 1) * SECOND_HEAD * sizes.K / CHUNK
    computed = -(-blocks // sizes.sms) * -(-chunks // how.segments) * each
    columns = (sizes.key_heads or sizes.heads) * sizes.K * (1 + sizes.queries + sizes.second)
    columns += sizes.heads * sizes.V * (1 + writes * (1 + sizes.second))
    if sizes.delta and sizes.reverse and writes:  # what values lack, inverses
        columns += sizes.heads * (sizes.V + CHUNK)
    return max(computed, 2 * sizes.sequences * sizes.tokens * columns / BYTES)


def of_chunk(sizes: Sizes, groups: int, writes: bool = True) -> float:
    """A chunk of a block. sizes.queries: with P and what the state gives for queries. The scores' warpgroup and the
    states' share the tensor cores: their products add up. With the delta rule the scores' warpgroup takes longer."""
    k = sizes.K / CHUNK
    scores = k * (sizes.queries * (1 + sizes.second) + (sizes.delta and not sizes.known))
    # what the state takes up; what it gives for queries, and P; what it gives for keys, and what it lacks
    of_group = k + (k + 1 if sizes.queries else 0) + (k + 1 if sizes.delta else 0)
    of_group = (1 + sizes.exact) * (of_group + sizes.second * (k + 1 if writes else k))
    inverted = scores + INVERSE[groups] + ELEMENTS if sizes.delta and not sizes.known else 0
    if sizes.delta and sizes.known:
        inverted = scores + groups * of_group + WAITS * (1 + (sizes.reverse and writes))
    parts = sizes.exact * PARTS[groups] / (1 if writes else 3)
    return max(scores + groups * of_group, inverted) + parts + BARRIERS + (OUTPUTS if writes else 0)


def leaves_sms_idle(launches: tuple, sms: int) -> bool:
    """Do launches of whole sequences, one after the other, take waves of blocks that keep less than `BUSY` of the SMs
    busy? launches: of each ((sequences, computed heads, V), how)."""
    waves, blocks = 0, 0
    for (sequences, heads, V), how in launches:
        if how.segments > 1:
            return False
        count = sequences * (heads // how.heads) * -(-_tiles(V) * how.heads // how.groups)
        waves, blocks = waves - count // -sms, blocks + count
    return blocks < BUSY * waves * sms


def _tiles(columns):
    return -(-columns // CHUNK)
