"""Which configuration a call gets: from the spec."""
from __future__ import annotations

from tkq.linear_attention.channels.spec import ChannelSpec
from tkq.linear_attention.config import CHUNK, LinearConfig
from tkq.linear_attention.plan import MOST_STAGES, SHARED

SMALL = 4096  # bytes: of factors of columns and of tokens
FILLED = 2**15  # threads of sums over tokens that keep a GPU's memory at work
STEPS = 1  # of a chunk of gates of values, on their way: room for more chunks, then
PAD = 4  # columns behind a row of factors: those of a warp's rows and columns are then in different banks


def plan(spec: ChannelSpec) -> LinearConfig:
    """As many warpgroups for the state as its rows fill, two at most, or one with gates of values, where a block has 64
    of them. As many stages as there is room for."""
    tile, wide = 2 * CHUNK * CHUNK, 2 * CHUNK * spec.head_dim
    groups = 1 if spec.value_dim <= CHUNK or spec.of_values else 2
    stage = (2 + spec.pairs) * wide + (groups + spec.dot) * tile
    if spec.of_values:  # rows with their factors, or what rounding leaves of P; factors; P
        tiles = 2 * (1 + spec.pairs)
        step = tiles * tile + 2 * CHUNK * (CHUNK + PAD) * 2
        wide_tiles = staged_of_values(spec) + less_of_values(spec) * (1 + spec.rest)
        rest = STEPS * step + (spec.narrow + 2 * wide_tiles) * tile + 1024
    else:
        rest = 2 * wide + (groups + 2) * tile + SMALL
    if spec.delta:
        rest += (4 if groups == 1 or spec.head_dim <= CHUNK else 2) * wide + 2 * tile
        rest += 0 if shares_levels(spec) else 2 * tile + 1024
    return LinearConfig(groups, min(MOST_STAGES, (SHARED - rest) // stage), _registers(spec, groups))


def spilled(spec: ChannelSpec) -> int:
    """Local loads and stores that a kernel may have, where two warpgroups have the state: with the delta rule four
    fifths of them in chunks by levels; as many stay in registers with one warpgroup of 64 rows, which makes all scores
    twice, though. With one, K above 64 takes more registers of the scores than there are. Two passes of gates of values
    in one have an address there."""
    if spec.of_values:
        return 8 if spec.pairs else 0
    if plan(spec).groups == 1:
        return 16 if spec.delta else 72 * (spec.head_dim > CHUNK)
    return 760 if spec.delta else 48


def less_of_values(spec: ChannelSpec) -> int:
    """Of how many chunks there is what sums are less of."""
    return spec.sums * (1 if spec.pairs else 2)


def staged_of_values(spec: ChannelSpec) -> int:
    """How many outputs of fp32 leave through room of their own. Sums leave from where what they are less of came."""
    return (spec.dot and not spec.sums) + (spec.pairs and not spec.reverse)


def _registers(spec, groups):
    """The scores take most with the delta rule; packed, so does its state."""
    if groups == 2:
        return 24, 168, 160
    if spec.of_values:
        return 24, 232, 240
    return (24, 240, 240) if spec.delta and spec.packed else (24, 248, 232)


def shares_levels(spec: ChannelSpec) -> bool:
    """Has L the room of two levels' operands, once they have been multiplied?"""
    return 2 * 2 * spec.head_dim >= 4 * (CHUNK + 4)


def sums_segments(columns: int, chunks: int) -> int:
    """How many segments `sums.ColumnSums` makes of a sequence: one, or more where columns are so few that a GPU would
    have less to do than it can: all but the first segment are read twice then. columns: those of all sequences."""
    return max(1, min(FILLED // columns, chunks))
