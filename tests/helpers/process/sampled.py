"""Of a product of parameters, the part that runs without --slow.

Each combination of dtypes, sizes and options is a kernel to compile; most take code that others take too. A test says
which combinations its everyday run has, all pairs of values say, and --slow has them all:

    @pytest.mark.parametrize("dtype", ("bf16", "fp32"))
    @pytest.mark.parametrize("N", (1000, 1024))
    @pytest.mark.sampled(when=lambda dtype, N: dtype == "bf16" or N == 1000)
    def test_something(dtype, N): ...

Where any combinations do that have each value of each `parametrize`, `@pytest.mark.sampled(each_value=True)` takes as
few as have them.
"""
import collections
import inspect

import pytest


def mark(items) -> None:
    """Mark as slow what the `sampled` marks of its test leave out. `when` takes parameters of the test by their names,
    and says of a combination whether it always runs. `each_value`: of those that always run otherwise, as few as have
    each value of each `parametrize` (of several parameters together, where it has them), the first ones first."""
    tests = {}
    for item in items:
        few = False
        for sample in item.iter_markers("sampled"):
            when = sample.kwargs.get("when")
            few = few or sample.kwargs.get("each_value", False)
            if when and not when(*(item.callspec.params[name] for name in inspect.signature(when).parameters)):
                item.add_marker(pytest.mark.slow)
        if few and not any(item.iter_markers("slow")):
            tests.setdefault(item.nodeid.partition("[")[0], []).append(item)
    for items_of_test in tests.values():
        seen = {}
        kept = _few_with_each_value([set(_numbered(item, seen)) for item in items_of_test])
        for i, item in enumerate(items_of_test):
            if i not in kept:
                item.add_marker(pytest.mark.slow)


def _few_with_each_value(combinations: list) -> set:
    """Places of combinations, {(parameters, number of their value)} each, that have all that is in any: each time the
    first of those with most that is in none before, and of these whose values are in the fewest."""
    missing, kept, used = set().union(*combinations), set(), collections.Counter()
    while missing:
        best = max(range(len(combinations)),
                   key=lambda i: (len(combinations[i] & missing), -sum(used[one] for one in combinations[i])))
        kept.add(best)
        missing -= combinations[best]
        used.update(combinations[best])
    return kept


def _numbered(item, seen: dict):
    """(parameters, number) of an item's values. seen: {parameters: their values so far}, of its test."""
    for mark in item.iter_markers("parametrize"):
        names = mark.args[0]
        names = tuple(name.strip() for name in names.split(",")) if isinstance(names, str) else tuple(names)
        value, values = [item.callspec.params[name] for name in names], seen.setdefault(names, [])
        if value not in values:
            values.append(value)
        yield names, values.index(value)
