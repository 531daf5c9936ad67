"""Which part of a product of parameters runs without --slow."""
import types

import pytest

from tests.helpers.process import sampled


class Item:
    def __init__(self, *marks, **params):
        self.marks = [getattr(mark, "mark", mark) for mark in marks]
        self.callspec = types.SimpleNamespace(params=params)

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
