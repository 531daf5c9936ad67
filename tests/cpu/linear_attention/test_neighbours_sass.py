"""What the compiler makes of outputs that two blocks of a cluster add up."""
import pytest

from tests.helpers.process.machine_code import entry_of
from tkq.linear_attention.launch import recipe
from tkq.linear_attention.spec import LinearSpec
from tkq.testing import sass


@pytest.mark.skipif(sass.nvdisasm() is None, reason="nvdisasm is not installed")
def test_what_was_sent_is_read_before_the_sender_is_told():
    """An arrival at another block does not wait for loads by itself: between both stands a fence that does."""
    spec = LinearSpec("bf16", 64, 128, gate="token", second="query", kept="fp32", summed=True)
    code, = sass.by_address(entry_of(recipe(spec)).path).values()
    words = [line.removeprefix("@").split(maxsplit=1)[-1] if line.startswith("@") else line
             for _, line in sorted(code.items())]
    told = [i for i, line in enumerate(words) if line.startswith("SYNCS.ARRIVE") and ".RED" in line.split()[0]]
    assert len(told) == 2  # of o, of what is beside it
    for i in told:
        since = words[max(j for j in range(i) if words[j].startswith("LDSM")):i]
        assert any(line.startswith("MEMBAR") for line in since)
