"""Hedgehog's forward: what an SM's instruction cache holds of it."""
import pytest

from tests.helpers.process.loops import CACHED, in_loops
from tests.helpers.process.machine_code import entry_of
from tkq.linear_attention.hedgehog.catalog import shipped

NAMES = "hedgehog-bf16-d64-f64", "hedgehog-bf16-d128-f64-kept"
FORWARD = {kernel.name: kernel.recipe for kernel in shipped() if kernel.name in NAMES}


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.machine_code(recipe=lambda name: FORWARD[name])
def test_loops_are_in_the_instruction_cache(name, machine_code):
    """The softmaxes of both signs are one code: twice in it they are not."""
    count, = in_loops(entry_of(FORWARD[name]).path).values()
    assert 100 < count <= CACHED
