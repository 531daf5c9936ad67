"""Pairs of blocks on their way through key tiles: both have the tiles that their rows see, and share those at the same
slot."""
from hypothesis import example, given, settings
from hypothesis import strategies as st

from tkq.attention.pair_ranges import let_pass, way_of
from tkq.attention.ranges import Extent, ceil_div, key_range

ROWS = 128
# As the plan takes them: no more queries than keys, and a left limit of 512 or more.
EXTENTS = st.builds(
    lambda rows, more, left, right: Extent(rows, rows + more, ROWS, 128, left, right), st.integers(1, 6000),
    st.sampled_from((0, 0, 1, 63, 64, 128)) | st.integers(0, 4000),
    st.sampled_from((512, 575, 576, 577, 1023, 1024)) | st.integers(512, 3000),
    st.sampled_from((0, 0, 1, 63, 64, 511)) | st.integers(0, 6000))


def tiles_of(e, task, rank):
    """(way, {slot: tile} of a block, the slots that its consumers let pass)"""
    seen = [key_range(e, (2 * task + i) * ROWS) for i in range(2)]
    way = way_of(*seen, rank)
    before, after = let_pass(way, seen[rank])
    tiles = {slot: way.top - slot for slot in range(way.slots) if slot != way.alone or way.there}
    passed = {*range(before), *range(way.slots - after, way.slots)}
    assert before >= 0 and after >= 0 and before + seen[rank].blocks + after == way.slots
    assert [way.top - slot for slot in range(before, way.slots - after)] == list(
        reversed(range(seen[rank].first, seen[rank].first + seen[rank].blocks)))
    return way, tiles, passed


@settings(max_examples=200)
@example(Extent(1, 512, ROWS, 128, 600, 0))
@example(Extent(1153, 1153, ROWS, 128, 512, 511))
@given(EXTENTS)
def test_both_blocks_have_what_they_see_and_share_the_rest(e):
    for task in range(ceil_div(e.rows_q, 2 * ROWS)):
        (upper, first, passed_first), (lower, second, passed_second) = (tiles_of(e, task, rank) for rank in (0, 1))
        assert upper.slots == lower.slots >= 2
        # The first block is a slot behind: its slot 0 meets the second's slot 1.
        assert upper.alone == upper.slots - 1 and lower.alone == 0
        assert [first[slot] for slot in range(upper.slots - 1)] == [second[slot] for slot in range(1, lower.slots)]
        # Only an empty slot is let pass, and every empty one.
        assert passed_first == (set() if upper.there else {upper.slots - 1})
        assert passed_second == (set() if lower.there else {0})
