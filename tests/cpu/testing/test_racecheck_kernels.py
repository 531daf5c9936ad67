"""The small kernels by which racecheck is judged do what they stand for: a bulk copy, mbarriers, a read."""
import pytest

from tests.helpers.tile.cases import recipe
from tkq.testing import sass


@pytest.mark.parametrize("what", ["copies", "scales", "sums"])
@pytest.mark.parametrize("order", ["mbarrier", "block", "none"])
def test_what_is_in_them(what, order):
    kernel, = sass.report(recipe(f"races:build_{what}", (order,)))
    assert bool(kernel.count("UBLKCP")) == (what == "copies") and kernel.count("LDS")
    assert bool(kernel.count("LDGSTS")) == (what == "scales")
    waits = kernel.count("SYNCS.PHASECHK.TRANS64.TRYWAIT")
    assert bool(waits) == (what != "sums" or order == "mbarrier")
