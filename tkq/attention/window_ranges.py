"""The tasks of windows: strips of a head that a block goes through once, from its last key tile to its first.

Two warpgroups see the same key tiles pass by, each with 64 rows of Q at a time. Whoever has come to the end of what its
rows see goes on with rows that see the next tiles. 64 rows see ``span`` tiles at most, so the rows that follow each
other are ``span`` tiles of 128 rows apart, and a head has 2 * span sequences of them: warpgroup 0 has those with the
first 64 rows of a tile, warpgroup 1 those with the last. A *strip* is a sequence of each warpgroup, ``shift`` tiles
apart so that the two do not come to an end at once, in some of its *segments*: a segment is one tile of each.

Pure arithmetic, as in ``ranges``: the kernel calls these functions on run-time ints, the tests on Python's. The queries
are no more than the keys, and limited on both sides, so that a row sees a key, its own.
"""
from dataclasses import replace
from typing import Any, NamedTuple

from tkq.attention import ranges
from tkq.attention.ranges import Extent, KeyRange, ceil_div, key_range, least, most

ROWS, TILE = 64, 128  # of a warpgroup; of the two warpgroups' tiles, and keys
LOWER, UPPER = 1, 2  # halves of a key tile, see ``cut_of``


class Strip(NamedTuple):
    """head: of all batches. tiles: of each warpgroup, in segment 0. low, high: the segments low .. high - 1, visited
    from the last to the first; none where they are equal."""

    head: Any
    tiles: tuple
    low: Any
    high: Any


def at_least(a, b):
    """1 where a >= b, 0 elsewhere."""
    return most(least(a - b + 1, 1), 0)


def span_of(e: Extent):
    """How many key tiles 64 rows see at most. Nothing below 0 is divided: what the DSL takes from a tensor's shape is
    rounded to 0 then, and not down."""
    own = e.rows_k - e.rows_q
    before = [(own + row + TILE - e.left % TILE) % TILE for row in (0, ROWS)]  # keys of the first tile, not seen
    return most(*((keys + e.left + ROWS - 1 + e.right) // TILE + 1 for keys in before))


def segments_of(rows_q, span):
    return ceil_div(rows_q, TILE * span)


def bands_of(segments):
    """In how many steps a head's segments are dealt out: half of them first, then half of what is left, and so on: the
    last strips are short, and blocks end together."""
    return sum(least(segments >> b, 1) for b in range(24))


def place(index, span, segments, heads, section, shift, rows_q) -> Strip:
    """Task ``index``. The strips of a head's keys run at once, so that these come out of L2: of a step, ``section``
    heads are worked on together, the strips with the last rows first, as a head's first rows see few keys."""
    band, within = index // (span * heads), index % (span * heads)
    head, tile = ranges.place(within, span, heads, section, True)
    moved = tile ^ shift
    over = moved // span  # 1 where there is no such tile: those two are not apart
    tiles = tile, moved + over * (tile - moved)
    last = (segments - 1) * span  # the last segment may not be there
    there = least(at_least(rows_q, first_row(tiles[0] + last, 0) + 1) + at_least(
        rows_q, first_row(tiles[1] + last, 1) + 1), 1)
    low, high = segments >> (band + 1), segments >> band
    high = least(high, segments - 1 + there)
    return Strip(head, tiles, least(low, high), high)


def first_row(tile, wg):
    return tile * TILE + wg * ROWS


def seen(e: Extent, tile, wg) -> tuple:
    """(first key tile, end, KeyRange, 1 or 0: there are such rows) of a warpgroup's 64 rows; an end of 0 without."""
    row = first_row(tile, wg)
    r = key_range(replace(e, tile_rows=ROWS), row)
    there = at_least(e.rows_q, row + 1)
    return r.first, (r.first + r.blocks) * there, r, there


def ends_of(e: Extent, strip: Strip, span) -> tuple:
    """(first key tile of a strip, end). Not of an empty one."""
    upper, lower = [[seen(e, tile + s * span, wg) for wg, tile in enumerate(strip.tiles)]
                    for s in (strip.high - 1, strip.low)]
    far = e.rows_k  # more than there are tiles
    return least(*(first + (1 - there) * far for first, _, _, there in lower)), most(*(x[1] for x in upper))


def cut_of(e: Extent, r: KeyRange, row):
    """LOWER: of the first tile of the visit the 64 rows see only keys of the lower half. UPPER: of the last one only
    keys of the upper half. 0: neither, or a tile beside it needs the same mask. Of rows that follow each other the ones
    are never UPPER and the next LOWER: one of the two products that run at once is of a whole tile."""
    own = row + e.rows_k - e.rows_q
    end = own + e.right + ROWS  # of what the last row would see, were there so many keys
    top = least(end, e.rows_k) - (r.first + r.blocks - 1) * TILE
    lower = at_least(ROWS, top) * at_least(1, r.masked) * at_least(r.blocks - r.masked_left, 2)
    next_may_be_lower = at_least(ROWS - 1, (end - 1) % TILE)
    upper = at_least(own - e.left - r.first * TILE, ROWS) * at_least(r.masked_left, 1) * at_least(r.blocks, 3)
    return LOWER * lower + UPPER * upper * (1 - lower) * (1 - next_may_be_lower)


def told(e: Extent, strip: Strip, span, ends, s, wg) -> dict:
    """What warpgroup wg is told of its rows in segment s. ends: of the strip, ``ends_of``.

    tile, and its ``KeyRange``: no blocks where there are no such rows. before, after: how many key tiles it lets pass
    before and after those that its rows see. chained: the next rows begin with the next tile. cut: see ``cut_of``."""
    bottom, top = ends
    tile = strip.tiles[0] + wg * (strip.tiles[1] - strip.tiles[0]) + s * span
    first, end, r, there = seen(e, tile, wg)
    newest, oldest = at_least(s, strip.high - 1), at_least(strip.low, s)
    following = seen(e, tile - span, wg)[1]  # of the rows of the next segment
    following = following + oldest * (bottom - following)
    after = first + (1 - there) * (top - first) - following
    return dict(tile=tile, blocks=r.blocks * there, masked=r.masked, first=r.first, masked_left=r.masked_left,
                before=newest * there * (top - end), after=after, chained=there * (1 - oldest) * at_least(0, after),
                cut=cut_of(e, r, first_row(tile, wg)))
