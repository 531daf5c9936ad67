"""Query ranges of key blocks, masks and the order of tasks, against counting one by one."""
import heapq
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tkq.attention.common.integers import ceil_div
from tkq.attention.common.query_mask import (
    QueryExtent,
    TileRange,
    key_blocks_of,
    mask_limits,
    query_tiles_of,
    tile_of_task,
)

LIMITS = st.one_of(st.none(), st.integers(0, 400))
EXTENTS = st.builds(QueryExtent, rows_q=st.integers(1, 500), rows_k=st.integers(1, 500), left=LIMITS, right=LIMITS,
                    tile=st.sampled_from((64, 80, 128)), block=st.sampled_from((80, 128, 192)))


def sees(e, i, j):
    """The definition: keys from i + Sk - Sq - left to i + Sk - Sq + right."""
    at = i + e.rows_k - e.rows_q
    return (e.left is None or j >= at - e.left) and (e.right is None or j <= at + e.right)


@given(EXTENTS, st.integers(0, 499), st.integers(0, 10))
def test_the_mask_is_the_definition(e, first_key, tile):
    first_key %= e.rows_k
    tile %= ceil_div(e.rows_q, e.tile)
    first, end = mask_limits(e, first_key, tile)
    for row in range(min(64, e.rows_k - first_key)):
        for col in range(min(e.tile, e.rows_q - tile * e.tile)):
            seen = (first is None or col >= first + row) and (end is None or col < end + row)
            assert seen == sees(e, tile * e.tile + col, first_key + row), (row, col)


@given(EXTENTS, st.integers(0, 10))
def test_a_block_visits_the_tiles_that_see_it_and_masks_where_one_does_not(e, block):
    first_key = block % ceil_div(e.rows_k, e.block) * e.block
    keys = range(first_key, min(first_key + e.block, e.rows_k))
    r = query_tiles_of(e, first_key)
    assert 0 <= r.first <= r.first_unmasked <= r.end_unmasked <= r.end <= ceil_div(e.rows_q, e.tile)
    seen = {i: [sees(e, i, keys[0]), *(sees(e, i, j) for j in keys)] for i in range(e.rows_q)}
    seeing = {i // e.tile for i, which in seen.items() if any(which)}
    assert set(range(r.first, r.end)) >= seeing, "a tile is left out"
    if seeing:
        assert r.first == min(seeing) and r.end == max(seeing) + 1, "a tile that no key sees"
    else:
        assert r.first == r.end
    for tile in range(r.first_unmasked, r.end_unmasked):
        rows = range(tile * e.tile, min((tile + 1) * e.tile, e.rows_q))
        assert len(keys) == e.block and all(all(seen[i]) for i in rows), f"tile {tile} needs a mask"


@given(EXTENTS.map(lambda e: replace(e, left=None)))
def test_without_a_limit_on_the_left_the_first_blocks_come_by_a_tile_and_all_up_to_its_last(e):
    """dQ that goes from block to block counts on it."""
    ranges = [query_tiles_of(e, first_key) for first_key in range(0, e.rows_k, e.block)]
    for tile in range(ceil_div(e.rows_q, e.tile)):
        come_by = [block for block, r in enumerate(ranges) if r.first <= tile < r.end]
        assert come_by == list(range(key_blocks_of(e, tile * e.tile).end))


@given(EXTENTS, st.integers(0, 10))
def test_no_tile_is_masked_without_need(e, block):
    first_key = block % ceil_div(e.rows_k, e.block) * e.block
    r = query_tiles_of(e, first_key)
    if first_key + e.block > e.rows_k:
        return  # the keys past the end: every tile has a mask
    for tile in (*range(r.first, r.first_unmasked), *range(r.end_unmasked, r.end)):
        rows = range(tile * e.tile, min((tile + 1) * e.tile, e.rows_q))
        assert not all(sees(e, i, j) for i in rows for j in (first_key, first_key + e.block - 1)) or (
            tile < r.end_unmasked and rows[-1] - rows[0] + 1 < e.tile), f"tile {tile} needs none"


@given(EXTENTS, st.integers(0, 10))
def test_a_tile_visits_the_blocks_it_sees_and_masks_where_it_does_not(e, tile):
    first_row = tile % ceil_div(e.rows_q, e.tile) * e.tile
    rows = range(first_row, min(first_row + e.tile, e.rows_q))
    r = key_blocks_of(e, first_row)
    assert 0 <= r.first <= r.first_unmasked <= r.end_unmasked <= r.end <= ceil_div(e.rows_k, e.block)
    seen = {j // e.block for i in rows for j in range(e.rows_k) if sees(e, i, j)}
    assert list(range(r.first, r.end)) == sorted(seen) or set(range(r.first, r.end)) > seen == set()
    assert not seen or (r.first, r.end) == (min(seen), max(seen) + 1)
    for block in range(r.first, r.end):
        keys = range(block * e.block, min((block + 1) * e.block, e.rows_k))
        needs = len(keys) < e.block or not all(sees(e, i, j) for i in rows for j in (keys[0], keys[-1]))
        masked = not r.first_unmasked <= block < r.end_unmasked
        assert masked or not needs, f"block {block} needs a mask"
        assert needs or not masked or len(rows) < e.tile, f"block {block} needs none"


@given(EXTENTS, st.integers(0, 499), st.integers(0, 10))
def test_the_mask_of_a_tile_of_queries_is_the_definition(e, first_row, block):
    first_row %= e.rows_q
    block %= ceil_div(e.rows_k, e.block)
    first, end = mask_limits(e.mirrored, first_row, block)
    for row in range(min(64, e.rows_q - first_row)):
        for col in range(min(e.block, e.rows_k - block * e.block)):
            seen = (first is None or col >= first + row) and (end is None or col < end + row)
            assert seen == sees(e, first_row + row, block * e.block + col), (row, col)


def test_few_tiles_are_masked():
    causal = QueryExtent(4096, 4096, 64, 128, right=0)
    assert [query_tiles_of(causal, 128 * b) for b in (0, 31)] == [TileRange(0, 2, 64, 64), TileRange(62, 64, 64, 64)]
    assert query_tiles_of(QueryExtent(4096, 4096, 64, 128), 128) == TileRange(0, 0, 64, 64)
    window = QueryExtent(4096, 4096, 64, 128, left=1023, right=0)
    r = query_tiles_of(window, 1024)
    assert (r.first, r.first_unmasked, r.end_unmasked, r.end) == (16, 18, 32, 34)
    assert query_tiles_of(QueryExtent(100, 130, 64, 128), 128) == TileRange(0, 2, 2, 2)  # keys past the end
    assert [key_blocks_of(causal, 64 * t) for t in (0, 63)] == [TileRange(0, 0, 0, 1), TileRange(0, 0, 31, 32)]
    assert key_blocks_of(QueryExtent(100, 130, 64, 128), 64) == TileRange(0, 0, 1, 2)


@given(st.integers(1, 40), st.integers(1, 40), st.integers(1, 50), st.booleans(), st.integers(0, 50))
def test_each_block_of_each_head_comes_once(blocks, heads, l2_section, longest_first, tail_heads):
    l2_section = min(l2_section, heads)
    order = [tile_of_task(i, blocks, heads, l2_section, longest_first, tail_heads) for i in range(blocks * heads)]
    assert sorted(order) == [(h, b) for h in range(heads) for b in range(blocks)]
    if longest_first:
        last = max(heads - tail_heads, 0) // l2_section * l2_section
        for start in (*range(0, last, l2_section), last):
            end = heads if start == last else start + l2_section
            part = order[start * blocks:end * blocks]
            assert {h for h, _ in part} == set(range(start, end))
            assert [b for _, b in part] == sorted(b for _, b in part)
        assert heads - last >= min(tail_heads, heads)


@pytest.mark.parametrize("length, heads, l2_section", [(1024, 256, 24), (2048, 128, 12), (4096, 64, 6), (8192, 32, 3),
                                                    (16384, 16, 1)])
def test_processors_that_take_causal_blocks_end_together(length, heads, l2_section):
    """Dealt out to 132: the last one ends within 2 % of the mean, for it begins no long block late."""
    blocks, tiles, free = length // 128, length // 64, [0] * 132
    for i in range(heads * blocks):
        _, block = tile_of_task(i, blocks, heads, l2_section, True, -(-264 // blocks))
        heapq.heappush(free, heapq.heappop(free) + tiles - 2 * block + 3)  # and what a block costs by itself
    assert max(free) <= 1.02 * sum(free) / 132
