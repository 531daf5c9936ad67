"""The small kernels by which racecheck is judged do what they stand for: a bulk copy, mbarriers, a read."""
import pytest

from tests.helpers.tile.cases import recipe


@pytest.mark.parametrize("what", ["copies", "scales", "sums"])
@pytest.mark.parametrize("order", ["mbarrier", "block", "none"])
@pytest.mark.machine_code(recipe=lambda what, order: recipe(f"races:build_{what}", (order,)))
def test_what_is_in_them(what, order, machine_code):
    kernel, = machine_code
    assert bool(kernel.count("UBLKCP")) == (what == "copies") and kernel.count("LDS")
    assert bool(kernel.count("LDGSTS")) == (what == "scales")
    waits = kernel.count("SYNCS.PHASECHK.TRANS64.TRYWAIT")
    assert bool(waits) == (what != "sums" or order == "mbarrier")
