"""What each of a task's two warpgroups sees of the key tiles that pass by: pure arithmetic, as in ``ranges``.

The queries are no more than the keys, and limited on both sides: a row sees a key, its own."""
from dataclasses import replace

from tkq.attention.ranges import Extent, KeyRange, key_range, least, most

ROWS, TILE = 64, 128  # of a warpgroup; keys
LOWER, UPPER = 1, 2  # halves of a key tile, see ``cut_of``


def at_least(a, b):
    """1 where a >= b, 0 elsewhere."""
    return most(least(a - b + 1, 1), 0)


def told(e: Extent, task: KeyRange, row) -> dict:
    """What a warpgroup is told of its 64 rows from ``row`` on, in a task whose rows see ``task``: its own ``KeyRange``.
    before, after: how many of the task's tiles it lets pass before and after those. cut: see ``cut_of``."""
    r = key_range(replace(e, tile_rows=ROWS), row)
    before = task.first + task.blocks - r.first - r.blocks
    return dict(vars(r), before=before, after=r.first - task.first, cut=cut_of(e, r, row))


def cut_of(e: Extent, r: KeyRange, row):
    """LOWER: of the first tile of the visit the 64 rows see only keys of the lower half. UPPER: of the last one only
    keys of the upper half. 0: neither, or a tile beside it needs the same mask."""
    own = row + e.rows_k - e.rows_q
    top = least(own + e.right + ROWS, e.rows_k) - (r.first + r.blocks - 1) * TILE
    lower = at_least(ROWS, top) * at_least(1, r.masked) * at_least(r.blocks - r.masked_left, 2)
    upper = at_least(own - e.left - r.first * TILE, ROWS) * at_least(r.masked_left, 1) * at_least(r.blocks, 3)
    return LOWER * lower + UPPER * upper * (1 - lower)
