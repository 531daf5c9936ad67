"""What the compiler makes of scales that lie in a stage which two blocks share."""
import re

import pytest

from tests.helpers.process.machine_code import entry_of
from tkq.gemm.fp8 import catalog
from tkq.testing import sass


@pytest.mark.skipif(sass.nvdisasm() is None, reason="nvdisasm is not installed")
def test_scales_are_used_before_the_stage_is_given_back():
    """An arrival at another block does not wait for loads by itself: an instruction that needs what they bring does."""
    shipped, = (x for x in catalog.shipped() if x.quick and "128x128_promoted" in x.name and "cluster2" in x.name)
    code, = sass.by_address(entry_of(shipped.recipe).path).values()
    words = [re.sub(r"^@!?\w+\s+", "", line) for _, line in sorted(code.items())]
    given_back = [i for i, line in enumerate(words) if line.startswith("SYNCS.ARRIVE") and ".RED" in line.split()[0]]
    found = ((i, re.match(r"LDS\S* R(\d+), \[(?!RZ)", line)) for i, line in enumerate(words))
    loads = [(i, int(load[1])) for i, load in found if load]
    assert len(given_back) > 1 and len(loads) > 3
    for i, register in loads:
        behind = next((at for at in given_back if at > i), len(words))
        assert any(re.search(rf",.*\bR{register}\b", line) for line in words[i + 1:behind]), words[i]
