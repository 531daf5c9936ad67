"""How far ahead dQ's accumulator is zeroed: far enough that no task waits for what waits for it."""
from hypothesis import given
from hypothesis import strategies as st

from tkq.attention.common.query_mask import tile_of_task
from tkq.attention.common.tile_order import l2_section_of, serial_block, serial_heads, zero_ahead_of


def reach(head, blocks, heads, l2_section, longest_first, tail_heads):
    """The last head of the tasks that come before the last one of ``head``."""
    order = [tile_of_task(i, blocks, heads, l2_section, longest_first, tail_heads) for i in range(blocks * heads)]
    last = max(i for i, (h, _) in enumerate(order) if h == head)
    return max(h for h, _ in order[:last + 1])


@given(blocks=st.integers(1, 6), heads=st.integers(1, 20), l2_section=st.integers(1, 20), tail_heads=st.integers(0, 25),
       tiles=st.integers(1, 5), longest_first=st.booleans())
def test_all_tasks_up_to_the_end_of_a_head_can_begin(blocks, heads, l2_section, tail_heads, tiles, longest_first):
    """While the first tile of a head is not done with, tiles are zeroed up to ``zero_ahead_of`` ahead of it."""
    l2_section = min(l2_section, heads)
    for head in range(heads):
        zeroed = head * tiles + zero_ahead_of(l2_section, tail_heads, tiles)
        assert zeroed >= (reach(head, blocks, heads, l2_section, longest_first, tail_heads) + 1) * tiles


@given(blocks=st.integers(1, 6), heads=st.integers(1, 20), l2_section=st.integers(1, 20), tail_heads=st.integers(1, 25),
       longest_first=st.booleans())
def test_blocks_of_a_chain_come_from_the_last_to_the_first(blocks, heads, l2_section, tail_heads, longest_first):
    """So one may wait for all behind it: they have been claimed. The last heads have their longest tasks first."""
    l2_section = min(l2_section, heads)
    first = serial_heads(heads, l2_section, tail_heads) if longest_first else heads
    plain = [tile_of_task(i, blocks, heads, l2_section, longest_first, tail_heads) for i in range(blocks * heads)]
    order = [(head, serial_block(block, blocks, head < first)) for head, block in plain]
    assert sorted(order) == [(head, block) for head in range(heads) for block in range(blocks)]
    assert first <= max(heads - tail_heads, 0) or not longest_first
    begun = {task: i for i, task in enumerate(order)}
    for head in range(heads):
        places = [begun[head, block] for block in range(blocks)]
        assert places == sorted(places, reverse=head < first)
    assert all(head >= first for head, _ in order[first * blocks:])


@given(rows=st.integers(0, 1 << 20), row_bytes=st.integers(1, 1 << 15), heads=st.integers(1, 1000))
def test_a_section_fits_or_is_one_head(rows, row_bytes, heads):
    l2_section = l2_section_of(rows, row_bytes, 24 << 20, heads)
    assert 1 <= l2_section <= heads
    assert l2_section == 1 or l2_section * min(rows, 1 << 15) * row_bytes <= 24 << 20
