"""Which keys the two consumers of a block see of a window, where their rows are a tile of keys apart: pure arithmetic, as
``ranges``.

Rows of 64 queries and tiles of 128 keys: a consumer sees ``left + right + 64`` keys, of the windows that models use half
a tile more than a whole number of tiles. Were its rows next to the other consumer's, the two would see that half at
opposite ends of a common range, and each would wait for the other where that has a whole one. So the upper one's rows
are 128 below the lower one's, its tiles are the same but one further on, and both begin with half a tile. Blocks are
counted from the first key that the lower consumer's first row sees, not from key 0."""
from dataclasses import dataclass
from typing import Any

from tkq.attention.ranges import Extent, ceil_div, least, most

ROWS, KEYS = 64, 128  # of a consumer, of a tile
HALF = KEYS // 2


@dataclass(frozen=True)
class Visit:
    """A consumer's blocks of a task, from the topmost down: of the topmost only the first half, whole ones behind it.

    first: the key at which the lowest begins. blocks: how many, 1 or more. masked, masked_left: as of ``KeyRange``.
    before, behind: how many of the task's blocks above and below it leaves out, 0 or 1. pause: how many fewer blocks it
    has than the other consumer."""

    first: Any
    blocks: Any
    masked: Any
    masked_left: Any
    before: Any
    behind: Any
    pause: Any


@dataclass(frozen=True)
class TaskRange:
    """A task's blocks, which begin at key ``start``, and what of them each consumer visits."""

    start: Any
    blocks: Any
    visits: tuple


def tiles_of(rows):
    """Tasks of a head. In two of them are 4 tiles of 64 rows."""
    return ceil_div(rows, 4 * ROWS) * 2


def row_tile(tile, consumer):
    """Which tile of 64 rows a consumer has in a head's task ``tile``: the first consumer the upper one."""
    return tile // 2 * 4 + tile % 2 + 2 * (1 - consumer)


def task_range(e: Extent, tile) -> TaskRange:
    """left and right are limited, rows_k is 1 or more. block is KEYS."""
    own = [row_tile(tile, w) * ROWS + e.rows_k - e.rows_q for w in (0, 1)]  # the first row's own key
    first = [least(most(one - e.left, 0), e.rows_k - 1) for one in own]
    end = [least(one + e.right + ROWS, e.rows_k) for one in own]
    start = first[1]
    bottom = [(key - start) // KEYS for key in first]
    top = [most(ceil_div(most(key - start - HALF, 0), KEYS), low) for key, low in zip(end, bottom)]
    count = [high - low + 1 for high, low in zip(top, bottom)]
    return TaskRange(start, top[0] + 1, tuple(
        _visit(e, start, own[w], bottom[w], count[w], top[0] - top[w], most(count[1 - w] - count[w], 0))
        for w in (0, 1)))


def _visit(e, start, own, bottom, blocks, before, pause):
    whole = most(least(own + e.right + 1, e.rows_k) - start, 0) // KEYS  # blocks that every row sees up to their end
    masked = least(most(bottom + blocks - whole, 1), blocks)
    left = ceil_div(most(own + ROWS - 1 - e.left - start, 0), KEYS) - bottom  # from there on, each from its beginning
    return Visit(start + bottom * KEYS, blocks, masked, most(least(left, blocks - masked), 0), before, bottom, pause)
