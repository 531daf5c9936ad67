"""What the consumers of a window's task visit, whose rows are a tile of keys apart, against counting one by one."""
from dataclasses import replace

from hypothesis import given
from hypothesis import strategies as st

from tkq.attention.apart_ranges import HALF, KEYS, ROWS, Visit, row_tile, task_range, tiles_of
from tkq.attention.ranges import Extent, keys_of_row, limits_from
from tkq.attention.spec import FAR

EXTENTS = st.builds(
    Extent, rows_q=st.integers(1, 2500), rows_k=st.integers(1, 2500), tile_rows=st.just(128), block=st.just(KEYS),
    left=st.integers(FAR, 1700), right=st.integers(0, 3) | st.integers(0, 1700))


def rows_of(e, tile, w):
    first = row_tile(tile, w) * ROWS
    return range(first, min(first + ROWS, e.rows_q))


def spans(v: Visit):
    """The keys of each block, in the order of the visit."""
    for i in range(v.blocks):
        start = v.first + (v.blocks - 1 - i) * KEYS
        yield range(start, start + (KEYS if i else HALF))


@given(st.integers(1, 2000))
def test_every_row_is_one_task_s(rows):
    found = [row_tile(tile, w) for tile in range(tiles_of(rows)) for w in (0, 1)]
    assert sorted(found) == list(range(len(found))) and len(found) * ROWS >= rows
    assert len(found) * ROWS < rows + 4 * ROWS


@given(EXTENTS, st.integers(0, 60))
def test_the_consumers_see_their_keys_and_share_the_blocks(e, tile):
    r = task_range(e, tile % tiles_of(e.rows_q))
    assert r.start >= 0 and r.blocks >= 1
    upper, lower = r.visits
    for v in r.visits:
        assert v.blocks >= 1 and v.before in (0, 1) and v.behind in (0, 1)
        assert v.before + v.blocks + v.behind == r.blocks, "blocks are loaded that a consumer never releases"
        assert v.first == r.start + v.behind * KEYS
        assert 1 <= v.masked and v.masked + v.masked_left <= v.blocks
    assert upper.blocks + upper.pause == lower.blocks + lower.pause and 0 in (upper.pause, lower.pause)
    assert max(upper.pause, lower.pause) <= 1


@given(EXTENTS, st.integers(0, 60), st.integers(0, 1))
def test_the_masks_of_a_visit_leave_what_a_row_sees(e, tile, w):
    tile %= tiles_of(e.rows_q)
    v, rows = task_range(e, tile).visits[w], rows_of(e, tile, w)
    for row in {*rows[:2], *rows[30:34], *rows[-2:]}:
        begin, end = keys_of_row(e, row)
        left = []
        for i, span in enumerate(spans(v)):
            first, limit, most = limits_from(e, rows[0], span.start)
            columns = range(len(span))
            if i < v.masked:  # on the right alone: what is limited there is far from the limit on the left
                shown = [c for c in columns if c < limit + row - rows[0] and (e.right == 0 or c < most)]
                assert all(c >= first + row - rows[0] for c in shown), "a block needs both masks"
                columns = shown
            elif i >= v.blocks - v.masked_left:
                columns = [c for c in columns if c >= first + row - rows[0]]
            if i >= v.masked:
                assert max(begin, span.start) < end, "a row has seen no key, and its maximum is not guarded any more"
            left += [span.start + c for c in columns]
        assert sorted(left) == list(range(begin, end))


@given(EXTENTS, st.integers(0, 60), st.integers(0, 1))
def test_a_mask_is_there_for_something(e, tile, w):
    tile %= tiles_of(e.rows_q)
    v, rows = task_range(e, tile).visits[w], rows_of(e, tile, w)
    if len(rows) < ROWS:
        return  # the visit is that of all rows
    seen = [keys_of_row(e, row) for row in rows]
    for i, span in enumerate(spans(v)):
        if 0 < i < v.masked:
            assert any(end < span.stop for _, end in seen)
        if i >= v.blocks - v.masked_left:
            assert any(begin > span.start for begin, _ in seen)


def test_usual_windows_are_half_a_tile_and_whole_ones():
    for left, right, blocks in ((1023, 0, 9), (512, 511, 9), (4095, 0, 33), (1024, 0, 9)):
        e = Extent(16384, 16384, 128, KEYS, left=left, right=right)
        for tile in (80, 81):
            r = task_range(e, tile)
            assert r.blocks == blocks + 1
            assert [(v.blocks, v.masked, v.masked_left, v.before, v.behind, v.pause) for v in r.visits] == [
                (blocks, 1, 1, 0, 1, 0), (blocks, 1, 1, 1, 0, 0)]


def test_without_a_key_to_see_a_block_is_visited():
    e = Extent(1000, 10, 128, KEYS, left=600, right=0)
    assert all(v == replace(v, first=0, blocks=1) for tile in range(3) for v in task_range(e, tile).visits)
