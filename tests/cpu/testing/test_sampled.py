"""Which part of a product of parameters runs without --slow."""
import itertools
import types

import pytest

from tests.helpers.process import sampled


class Item:
    def __init__(self, *marks, **params):
        self.marks = [getattr(mark, "mark", mark) for mark in marks]
        self.callspec = types.SimpleNamespace(params=params)
        self.nodeid = f"a.py::test_a[{params}]"

    def iter_markers(self, name):
        return [mark for mark in self.marks if mark.name == name]

    def add_marker(self, mark):
        self.marks.append(mark.mark)

    @property
    def slow(self):
        return bool(self.iter_markers("slow"))


def test_what_does_not_fulfil_a_condition_is_slow():
    fast = pytest.mark.sampled(when=lambda dtype, N: dtype == "bf16" or N == 1000)
    items = [Item(fast, N=N, dtype=dtype, causal=True) for dtype in ("bf16", "fp32") for N in (1000, 1024)]
    plain = Item(N=1024, dtype="fp32")
    sampled.mark([*items, plain])
    assert [item.slow for item in items] == [False, False, False, True] and not plain.slow


def test_each_condition_counts():
    item = Item(pytest.mark.sampled(when=lambda N: N < 10), pytest.mark.sampled(when=lambda N: N > 10), N=20)
    sampled.mark([item])
    assert item.slow


def test_a_parameter_that_the_test_lacks():
    with pytest.raises(KeyError, match="rows"):
        sampled.mark([Item(pytest.mark.sampled(when=lambda rows: rows), N=20)])


def slow_of(sizes, *marks, slow=()):
    """Which of all combinations of numbers below some sizes are slow, those that are so by themselves left out."""
    each = [pytest.mark.parametrize(name, range(size)) for name, size in zip("abc", sizes)]
    items = [Item(*marks, *each, *[pytest.mark.slow] * (at in slow), **dict(zip("abc", at)))
             for at in itertools.product(*map(range, sizes))]
    sampled.mark(items)
    return {tuple(item.callspec.params.values()) for item in items if item.slow} - set(slow)


@pytest.mark.parametrize("sizes", ((1,), (4, 2), (2, 3, 4), (5, 5)))
def test_few_have_each_value(sizes):
    slow = slow_of(sizes, pytest.mark.sampled(each_value=True))
    kept = set(itertools.product(*map(range, sizes))) - slow
    assert all({at[i] for at in kept} == set(range(n)) for i, n in enumerate(sizes)) and len(kept) == max(sizes)


def test_each_value_of_those_that_are_not_slow_anyway():
    few = pytest.mark.sampled(each_value=True)
    assert slow_of((2, 2), few, slow=[(0, 0)]) == {(1, 1)}
    first = pytest.mark.sampled(when=lambda a: a == 0)
    assert slow_of((2, 3), few, first) == {(1, 0), (1, 1), (1, 2)}  # each value of b is beside a of 0 alone


def test_each_test_has_its_values_for_itself():
    few, each = pytest.mark.sampled(each_value=True), pytest.mark.parametrize("a", (0,))
    one, other = Item(few, each, a=0), Item(few, each, a=0)
    other.nodeid = "b.py::test_b[0]"
    sampled.mark([one, other])
    assert not one.slow and not other.slow


def test_parameters_that_come_together_have_one_value():
    marks = (pytest.mark.sampled(each_value=True), pytest.mark.parametrize("a, b", ()),
             pytest.mark.parametrize(["c"], ()))
    items = [Item(*marks, a=a, b=b, c=c) for a, b in ((0, 0), (0, 1), (1, 1), (1, 0)) for c in ([1], [2])]
    sampled.mark(items)
    assert [item.slow for item in items] == [False, True, True, False, False, True, True, False]
