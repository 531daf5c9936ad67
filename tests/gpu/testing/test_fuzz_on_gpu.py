"""Random calls of every operation on a GPU: what ends neither right nor refused by name fails."""
import subprocess
import sys

import pytest

from tests.fuzz.run import OPERATIONS

GROUPS = [list(OPERATIONS)[i::3] for i in range(3)]


@pytest.mark.parametrize("names", GROUPS, ids=",".join)
def test_calls_end_right_or_are_refused_by_name(names):
    """In a process of its own: after an illegal access a process has no GPU any more."""
    command = [sys.executable, "-m", "tests.fuzz", "--device", "cuda", "--calls", "400", "--seconds", "20", "--only",
               ",".join(names)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stdout[-6000:] + done.stderr[-2000:]
