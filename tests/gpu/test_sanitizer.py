"""compute-sanitizer over one small call of each kind of kernel: `tests/sanitized.py`, `.._attention.py`."""
import os
import pathlib
import shutil
import subprocess
import sys

import pytest

from tests import sanitized, sanitized_attention

ROOT = pathlib.Path(__file__).parents[2]
TOOL = shutil.which("compute-sanitizer") or shutil.which("compute-sanitizer", path="/usr/local/cuda/bin")
FOUND = 9  # the exit status where the tool has something to report

pytestmark = [pytest.mark.slow, pytest.mark.skipif(TOOL is None, reason="compute-sanitizer is not installed")]


@pytest.mark.parametrize("cases", [sanitized, sanitized_attention], ids=["all but attention", "attention"])
@pytest.mark.parametrize("tool", ["memcheck", "racecheck"])
def test_nothing_is_found(tool, cases):
    """All families in one process: most of the time is the tool's start. Without torch's own pool of memory, so that
    an access behind a tensor is one behind an allocation."""
    command = [TOOL, "--tool", tool, "--error-exitcode", str(FOUND), "--print-limit", "20",
               sys.executable, "-m", cases.__name__, *cases.FAMILIES]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=500,
                          env={**os.environ, "PYTORCH_NO_CUDA_MEMORY_CACHING": "1"})
    report = f"{done.stdout[-6000:]}\n{done.stderr[-2000:]}"
    assert done.returncode == 0, report
    assert f"ok  {next(iter(cases.FAMILIES))}" in done.stdout and "BAD" not in done.stdout, report
