"""The order in which several workers take GPU tests."""
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.helpers.process.long_first import LONG, is_long, ordered

WORDS = st.lists(st.sampled_from((*LONG, "test_a.py", "test_b.py")), max_size=60)


@given(WORDS, st.integers(1, 17))
def test_each_once_and_the_others_in_their_order(kinds, workers):
    names = [f"{kind}::{i}" for i, kind in enumerate(kinds)]
    found = ordered(names, workers)
    assert sorted(found) == sorted(names)
    assert [n for n in found if not is_long(n)] == [n for n in names if not is_long(n)]


@pytest.mark.parametrize("workers", (2, 5, 16))
def test_each_part_begins_with_its_long_ones(workers):
    names = [f"test_a.py::{i}" for i in range(1500)] + [f"{LONG[0]}::{i}" for i in range(workers)]
    found, part = ordered(names, workers), len(names) / workers
    begins = [i for i, name in enumerate(found) if is_long(name)]
    assert all(abs(at - i * part) <= 2 for i, at in enumerate(begins)) and len(begins) == workers
