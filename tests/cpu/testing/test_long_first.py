"""The order in which several workers take GPU tests."""
from hypothesis import given
from hypothesis import strategies as st

from tests.helpers.process.long_first import LONG, is_long, ordered

WORDS = st.lists(st.sampled_from((*LONG, "test_a.py", "test_b.py")), max_size=60)


@given(WORDS)
def test_each_once_and_the_others_in_their_order(kinds):
    names = [f"{kind}::{i}" for i, kind in enumerate(kinds)]
    found = ordered(names)
    assert sorted(found) == sorted(names)
    assert [n for n in found if not is_long(n)] == [n for n in names if not is_long(n)]


@given(WORDS)
def test_the_long_ones_begin_first(kinds):
    found = ordered([f"{kind}::{i}" for i, kind in enumerate(kinds)])
    places = [next((i for i, kind in enumerate(LONG) if kind in name), len(LONG)) for name in found]
    assert places == sorted(places)
