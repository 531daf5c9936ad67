"""Zeroes for dQ in the background, just ahead of the tasks: how many there are, and when."""
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tkq.attention.backward_grouped_config import GroupedConfig, part_of_turn
from tkq.attention.backward_plan import _BEHIND, recipe
from tkq.attention.backward_spec import BackwardSpec
from tkq.attention.backward_zeroes_config import ZeroesConfig, heads_begun
from tkq.attention.query_ranges import chained_heads, place


@given(blocks=st.integers(1, 8), heads=st.integers(1, 40), section=st.integers(1, 9), tail=st.integers(0, 20))
def test_the_heads_of_all_tasks_so_far_and_no_section_more(blocks, heads, section, tail):
    section = min(section, heads)
    last = chained_heads(heads, section, tail)  # the first head of the last section
    begun = 0
    for i in range(blocks * heads):
        head, _ = place(i, blocks, heads, section, True, tail)
        begun = max(begun, heads if head >= last else head // section * section + section)
        assert heads_begun(i + 1, blocks, heads, section, tail) == begun > head
    assert heads_begun(0, blocks, heads, section, tail) == 0
    assert heads_begun(blocks * heads + 500, blocks, heads, section, tail) == heads


@given(kv_heads=st.integers(1, 7), share=st.integers(1, 4), blocks=st.integers(1, 5), section=st.integers(1, 9),
       tail=st.integers(1, 12), ahead=st.integers(1, 50))
def test_each_task_finds_its_zeroes(kv_heads, share, blocks, section, tail, ahead):
    """Tiles are zeroed in the order in which parts come, those of a part side by side."""
    parts = kv_heads * share
    section = min(section, parts)
    turn = lambda i: part_of_turn(i, parts, share, section, tail)
    zeroed = [turn(i) for i in range(parts)]
    assert sorted(zeroed) == list(range(parts))
    for i in range(blocks * parts):
        part = turn(place(i, blocks, parts, section, True, tail)[0])
        assert part in zeroed[:heads_begun(i + ahead, blocks, parts, section, tail)]


def test_what_cannot_run_is_refused():
    config = ZeroesConfig.of(_BEHIND[128], split=2)
    assert config.check(128) is config and isinstance(config, GroupedConfig)
    assert recipe(BackwardSpec(right=True), config).module == "tkq.attention.backward_zeroes"
    with pytest.raises(ValueError, match="a task ahead"):
        ZeroesConfig.of(_BEHIND[128], split=2, ahead=0).check(128)
