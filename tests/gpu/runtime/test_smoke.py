"""Every op once, beside the CPU's reference: the smoke part of this suite. `test_bundle.py` runs it without the DSL."""
import pytest

from tests.helpers.ops import smoke

NAMES = list(smoke.cases(smoke.inputs("cpu")))


@pytest.mark.parametrize("name", NAMES)
def test_once(name):
    smoke.check(name)
