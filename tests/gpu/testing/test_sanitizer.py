"""compute-sanitizer over one small call of each kind of kernel: `tests/helpers/sanitizer/calls.py`,
`.._attention.py`."""
import os
import pathlib
import re
import shutil
import subprocess
import sys

import pytest

from tests.helpers.sanitizer import attention_calls, bad_calls, segment_calls
from tests.helpers.sanitizer import calls as sanitized_cases
from tests.helpers.sanitizer.racecheck_report import by_copy, by_store, described, races
from tkq.testing import sass

ROOT = pathlib.Path(__file__).parents[3]
TOOL = shutil.which("compute-sanitizer") or shutil.which("compute-sanitizer", path="/usr/local/cuda/bin")
FOUND = 9  # the exit status where the tool has something to report

pytestmark = [pytest.mark.slow, pytest.mark.skipif(TOOL is None, reason="compute-sanitizer is not installed")]


# Whose reports of racecheck are known, by a part of the kernel's name; those of the second list only where they are
# between copies into shared memory and reads, those of the third between stores and reads, as the instructions at the
# addresses say; where no nvdisasm is installed that is unknown, and the name is enough. That racecheck takes stores and
# reads for a race which mbarriers order is the last test's "sums".
KNOWN = {
    "tkqnormsbackward": "RowKernel: bulk copies, and numbers in slots, that mbarriers order: see the last test",
    "PersistentLayerNorm": "as RowKernel",
    "PersistentFp8": "as RowKernel",
    "MaskedGroups": "both consumers write equal words; its docstring says why",
}
COPIED = {
    "PipelinedPromotion": "as RowKernel: the producer copies a stage's scales (cp.async), consumers "
                      "read them, and stages come round; the small calls of Fp8Gemm use none twice",
    "tkqattentionbackward": "as RowKernel: a tile's statistics are brought by a bulk copy, beside Q's, and read by the "
                            "warpgroups with keys; stages come round where a block has more tiles than stages",
    "SmallMFp8Gemm": "as PipelinedPromotion, where a block has more steps of K than stages",
}

STORED = {
    "tkqattentionforward": "tasks go from the producer to the consumers by `tile.Mailbox`",
    "FlexForward": "tasks go from the scheduler warp to the producer by `tile.Mailbox`, with one slot",
    "tkqattentiondecodechunked": "tasks and blocks' words go from the producer to the consumers with Q and K",
    "tkqlinear_attention": "a chunk's P and decays go from the scores' warpgroup to the state's by a pipe",
    "DkvHdim256": "P goes from the warps with dV to those with dK, whose pipe its docstring draws",
    "Dkv_DqByTask": "tasks, by `tile.Mailbox`",
    "DqByQueryHead_AddDq": "as Dkv_DqByTask",
    "Dkv_OrderedDq": "as Dkv_DqByTask",
}


def known(race, listings):
    named = lambda names: any(name in race.kernel for name in names)
    seen = lambda names, kind: named(names) and (sass.nvdisasm() is None or kind(race, listings))
    return named(KNOWN) or seen(COPIED, by_copy) or seen(STORED, by_store)


def sanitized(tool, module, *arguments):
    """What the tool says of a module's run. Without torch's own pool of memory, so that an access behind a tensor is
    one behind an allocation."""
    # the driver's functions that it has not, which cuda.bindings asks for, are no errors of ours
    quiet = ("--report-api-errors", "no") if tool == "memcheck" else ()
    command = [TOOL, "--tool", tool, "--error-exitcode", str(FOUND), "--print-limit", "1000", *quiet, sys.executable,
               "-m", module, *arguments]
    return subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=500,
                          env={**os.environ, "PYTORCH_NO_CUDA_MEMORY_CACHING": "1"})


@pytest.mark.parametrize("cases", [sanitized_cases, attention_calls, segment_calls],
                         ids=["all but attention", "attention", "segments"])
@pytest.mark.parametrize("tool", ["memcheck", "racecheck"])
def test_nothing_is_found(tool, cases):
    """All families in one process, whose kernels others have compiled: most of the time is the tool's start."""
    ahead = subprocess.run([sys.executable, "-m", "tests.helpers.sanitizer.ahead", cases.__name__], cwd=ROOT,
                           capture_output=True, text=True)
    assert ahead.returncode == 0, ahead.stderr[-2000:]
    done = sanitized(tool, cases.__name__, *cases.FAMILIES)
    report = f"{done.stdout[-6000:]}\n{done.stderr[-2000:]}"
    raced = races(done.stdout)
    paths = re.findall(r"^kernels: (.*)", done.stdout, re.M) if raced and sass.nvdisasm() else []
    listings = [sass.by_address(path, tuple({race.kernel for race in raced})) for path in paths]
    shown = "\n".join(dict.fromkeys(described(race, listings) for race in raced))
    print(shown)
    assert all(known(race, listings) for race in raced), f"{shown}\n{report}"
    assert done.returncode == 0 or (raced and done.returncode == FOUND), report  # races may be warnings, with status 0
    assert f"ok  {next(iter(cases.FAMILIES))}" in done.stdout and "BAD" not in done.stdout, report


@pytest.mark.parametrize("family", bad_calls.FAMILIES)
def test_bad_indices_touch_nothing_outside(family):
    """Labels, positions, offsets of groups and cu_seqlens that no caller means."""
    done = sanitized("memcheck", bad_calls.__name__, family)
    assert done.returncode == 0, f"{done.stdout[-6000:]}\n{done.stderr[-2000:]}"
    assert f"ok  {family}" in done.stdout and "BAD" not in done.stdout, done.stdout[-6000:]


@pytest.mark.parametrize("what", ["copies", "scales", "sums"])
@pytest.mark.parametrize("order, reported", [("none", True), ("block", False), ("mbarrier", True)])
def test_what_racecheck_follows(what, order, reported):
    """It finds a race, and no race where the block meets; but what mbarriers order, plain to see in
    `tests/helpers/tile/kernels/races.py`, it takes for a race. Where this fails for "mbarrier", it has learned that:
    then RowKernel, and for "scales" PipelinedPromotion, are not to be in KNOWN."""
    done = sanitized("racecheck", "tests.helpers.sanitizer.racecheck_kernels", what, order)
    assert done.returncode == (FOUND if reported else 0), done.stdout
    assert f"ok  {what} {order}" in done.stdout and ("Race reported" in done.stdout) == reported, done.stdout
