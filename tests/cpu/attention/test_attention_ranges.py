"""Block ranges, masks and the order of tasks, against counting one by one."""
from dataclasses import replace

from hypothesis import given, settings
from hypothesis import strategies as st

from tkq.attention.common.integers import ceil_div
from tkq.attention.common.mask import Extent, KeyBlockRange, key_blocks_of, keys_of_row, limits_in_block
from tkq.attention.common.tile_order import even_l2_section, heads_in_l2_section, tile_of_task, work_rank

LIMITS = st.none() | st.integers(0, 3) | st.integers(0, 400)
EXTENTS = st.builds(
    Extent, rows_q=st.integers(1, 700), rows_k=st.integers(0, 700), tile_rows=st.sampled_from((16, 64, 128, 192, 256)),
    block=st.sampled_from((64, 80, 112, 128, 176)), left=LIMITS, right=LIMITS)


def sees(e, row, key):
    """The definition."""
    own = row + e.rows_k - e.rows_q
    return (e.left is None or key >= own - e.left) and (e.right is None or key <= own + e.right)


def seen(e, row):
    return [key for key in range(e.rows_k) if sees(e, row, key)]


def visit(e, row):
    """As the kernel asks for it."""
    return key_blocks_of(replace(e, rows_k=max(e.rows_k, 1)), row)


def rows_of(e, tile):
    first = tile % ceil_div(e.rows_q, e.tile_rows) * e.tile_rows
    return range(first, min(first + e.tile_rows, e.rows_q))


@given(EXTENTS, st.integers(0, 699))
def test_keys_of_row_is_the_definition(e, row):
    row %= e.rows_q
    assert list(range(*keys_of_row(e, row))) == seen(e, row)


@given(EXTENTS, st.integers(0, 43))
def test_a_task_visits_what_its_rows_see_and_masks_what_they_do_not(e, tile):
    rows = rows_of(e, tile)
    r = visit(e, rows[0])
    assert r.first >= 0 and r.n_masked_right >= 1 and r.n_masked_right + r.n_masked_left <= r.blocks
    keys = [key for row in rows for key in seen(e, row)]
    visited = range(r.first * e.block, (r.first + r.blocks) * e.block)
    if keys:
        assert visited.start <= min(keys) and max(keys) < visited.stop, "keys are left out"
    for i in range(r.n_masked_right, r.blocks):  # in the order of the visit
        block = r.first + r.blocks - 1 - i
        span = range(block * e.block, (block + 1) * e.block)
        for row in rows:
            begin, end = keys_of_row(e, row)
            assert span.stop <= end, f"block {block} needs a mask on the right"
            if i < r.blocks - r.n_masked_left:
                assert begin <= span.start, f"block {block} needs a mask on the left"
            assert max(begin, span.start) < end, f"row {row} has seen no key, and its maximum is not guarded any more"


@given(EXTENTS, st.integers(0, 43))
def test_no_block_is_visited_or_masked_in_vain(e, tile):
    rows = rows_of(e, tile)
    keys = [key for row in rows for key in seen(e, row)]
    if len(rows) < e.tile_rows or not keys:
        return  # the range is that of a full tile
    r = visit(e, rows[0])
    assert r.first == min(keys) // e.block and r.first + r.blocks - 1 == max(keys) // e.block
    needs = lambda block: any(not sees(e, row, key) or key >= e.rows_k for row in rows
                              for key in range(block * e.block, (block + 1) * e.block))
    masks = [r.first + r.blocks - 1 - i for i in range(r.blocks) if i < r.n_masked_right
             or i >= r.blocks - r.n_masked_left]
    assert all(needs(block) for block in masks if block != r.first + r.blocks - 1)


@given(EXTENTS, st.integers(0, 43))
def test_the_masks_of_a_visit_leave_what_a_row_sees(e, tile):
    """As the kernel applies them: both sides in the first ``masked`` blocks, the left in the last ``n_masked_left``."""
    rows = rows_of(e, tile)
    r = visit(e, rows[0])
    for row in rows:
        left = []
        for i in range(r.blocks):
            block = r.first + r.blocks - 1 - i
            first, end, most = limits_in_block(e, rows[0], block)
            columns = range(e.block)
            if i < r.n_masked_right:
                limit = most if end is None else end + row - rows[0]
                limit = limit if e.right in (0, None) else min(limit, most)  # causal rows end before
                columns = [c for c in columns if c < limit]
            if e.left is not None and (i < r.n_masked_right or i >= r.blocks - r.n_masked_left):
                columns = [c for c in columns if c >= first + row - rows[0]]
            left += [block * e.block + c for c in columns]
        assert sorted(left) == seen(e, row)


@given(EXTENTS, st.integers(0, 43), st.integers(0, 300))
def test_a_far_limit_on_the_left_needs_no_mask_where_the_right_does(e, tile, more):
    e = replace(e, left=e.tile_rows + e.block + more)
    rows = rows_of(e, tile)
    r = visit(e, rows[0])
    for i in range(r.n_masked_right):
        start = (r.first + r.blocks - 1 - i) * e.block
        assert all(begin <= start or end <= start for begin, end in (keys_of_row(e, row) for row in rows))


def test_few_blocks_are_masked():
    e = Extent(4096, 4096, 128, 128, right=0)
    assert [key_blocks_of(e, 128 * i).n_masked_right for i in range(32)] == [1] * 32
    full = Extent(4096, 4096, 128, 128)
    assert key_blocks_of(full, 0) == key_blocks_of(full, 1024)
    window = Extent(16384, 16384, 128, 128, left=1023, right=0)
    assert key_blocks_of(window, 8192) == KeyBlockRange(56, 9, 1, 1)


@given(st.integers(1, 40), st.integers(1, 30), st.integers(1, 64), st.booleans())
def test_every_task_is_placed_once(tiles, heads, l2_section, causal):
    places = [tile_of_task(i, tiles, heads, l2_section, causal) for i in range(tiles * heads)]
    assert sorted(places) == [(h, t) for h in range(heads) for t in range(tiles)]


@settings(max_examples=30)
@given(st.integers(2, 20), st.integers(1, 30), st.integers(1, 8))
def test_causal_sections_begin_with_their_longest_tasks(tiles, heads, l2_section):
    places = [tile_of_task(i, tiles, heads, l2_section, True) for i in range(tiles * heads)]
    for first in range(0, heads, l2_section):
        mine = [t for h, t in places if first <= h < first + l2_section]
        assert mine == sorted(mine, reverse=True)
    numbers = [h // l2_section for h, _ in places]
    assert numbers == sorted(numbers), "sections are not worked on one by one"


@given(st.integers(1, 1 << 26), st.integers(1, 64), st.integers(1, 16), st.integers(1, 1 << 15))
def test_sections_fit(kv_bytes, mb, group, kv_heads):
    n = heads_in_l2_section(kv_bytes, mb << 20, group, kv_heads * group)
    assert n % group == 0 and group <= n <= kv_heads * group
    assert n == group or n // group * kv_bytes <= mb << 20


@given(st.integers(1, 16), st.integers(1, 300), st.integers(1, 300))
def test_sections_are_evened_and_no_more_of_them(group, kv_heads, most):
    l2_section, heads = min(most, kv_heads) * group, kv_heads * group
    even = even_l2_section(l2_section, group, heads)
    count = -(-heads // l2_section)
    assert even % group == 0 and group <= even <= l2_section
    assert -(-heads // even) <= count
    last = heads - (-(-heads // even) - 1) * even
    assert last >= heads - (count - 1) * l2_section, "the last section is narrower than before"
    if kv_heads % count == 0:
        assert last == even


@given(st.integers(0, 1 << 22), st.integers(0, 1 << 22))
def test_more_work_ranks_first(a, b):
    ranks = [work_rank(n) for n in (a, b)]
    assert all(0 <= rank <= 30 for rank in ranks)
    if a > b:
        assert ranks[0] <= ranks[1], "a longer sequence comes later"
    if max(a, b) < 1 << 15 and 2 * min(a, b) <= max(a, b) and min(a, b):
        assert ranks[0] != ranks[1], "twice as much work has the same rank"
