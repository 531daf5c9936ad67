"""Of a product of parameters, the part that runs without --slow.

Each combination of dtypes, sizes and options is a kernel to compile; most take code that others take too. A test says
which combinations its everyday run has, all pairs of values say, and --slow has them all:

    @pytest.mark.parametrize("dtype", ("bf16", "fp32"))
    @pytest.mark.parametrize("N", (1000, 1024))
    @pytest.mark.sampled(when=lambda dtype, N: dtype == "bf16" or N == 1000)
    def test_something(dtype, N): ...
"""
import inspect

import pytest


def mark(items) -> None:
    """Mark as slow what the `sampled` marks of its test leave out. `when` takes parameters of the test by their names,
    and says of a combination whether it always runs."""
    for item in items:
        for sample in item.iter_markers("sampled"):
            when = sample.kwargs["when"]
            if not when(*(item.callspec.params[name] for name in inspect.signature(when).parameters)):
                item.add_marker(pytest.mark.slow)
