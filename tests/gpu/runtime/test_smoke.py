"""Every op once, beside the CPU's reference: the smoke part of this suite. Every day `test_bundle.py` runs each tenth
case without the DSL, by the kernels of a bundle; by those of the cache with --slow, and where no bundle can be made."""
import os

import pytest

from tests.helpers.ops import smoke
from tkq.runtime.compile import link

NAMES = smoke.names()
IN_A_BUNDLE = "TKQ_BUNDLE" in os.environ
NO_BUNDLE = link.why_not() is not None or link.runtime_kind() != "static"


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.sampled(when=lambda name: IN_A_BUNDLE or NO_BUNDLE)
def test_once(name):
    smoke.check(name)
