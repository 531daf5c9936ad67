"""What each of a task's two warpgroups sees of the key tiles that pass by: pure arithmetic, as in ``ranges``.

The queries are no more than the keys, and limited on both sides: a row sees a key, its own."""
from dataclasses import replace

from tkq.attention.ranges import Extent, KeyRange, key_range, least, most

ROWS = 64  # of a warpgroup, and so many keys of a tile are left out
LOWER, UPPER = 1, 2  # what is left of a key tile without those, see ``cut_of``


def at_least(a, b):
    """1 where a >= b, 0 elsewhere."""
    return most(least(a - b + 1, 1), 0)


def first_key(e: Extent, row):
    """The first that a task's rows, from ``row`` on, see."""
    return most(row + e.rows_k - e.rows_q - e.left, 0)


def from_key(e: Extent, key) -> Extent:
    """Keys counted from that one on."""
    return replace(e, rows_k=e.rows_k - key)


def told(e: Extent, task: KeyRange, row) -> dict:
    """What a warpgroup is told of its 64 rows from ``row`` on, in a task whose rows see ``task``: its own ``KeyRange``.
    before, after: how many of the task's tiles it lets pass before and after those. cut: see ``cut_of``."""
    r = key_range(replace(e, tile_rows=ROWS), row)
    before = task.first + task.blocks - r.first - r.blocks
    return dict(vars(r), before=before, after=r.first - task.first, cut=cut_of(e, r, row))


def cut_of(e: Extent, r: KeyRange, row):
    """LOWER: of the first tile of the visit the 64 rows see none of the last 64 keys. UPPER: of the last one none of
    the first 64. 0: neither, or a tile beside it needs the same mask."""
    own = row + e.rows_k - e.rows_q
    top = least(own + e.right + ROWS, e.rows_k) - (r.first + r.blocks - 1) * e.block
    lower = at_least(e.block - ROWS, top) * at_least(1, r.masked) * at_least(r.blocks - r.masked_left, 2)
    upper = at_least(own - e.left - r.first * e.block, ROWS) * at_least(r.masked_left, 1) * at_least(r.blocks, 3)
    return LOWER * lower + UPPER * upper * (1 - lower)
