"""What is tested is what is planned, whatever tkq.tune once found on this machine; and tests that take most of the
GPU's memory run alone, whatever other workers do."""
import fcntl
import os
import pathlib
import tempfile

import pytest

from tkq.runtime import ignore_tuned


@pytest.fixture(autouse=True)
def room(request):
    """Of all workers' tests: one that is marked `alone`, or any number of others."""
    alone = request.node.get_closest_marker("alone")
    with open(pathlib.Path(tempfile.gettempdir()) / f"tkq-tests-{os.getuid()}.lock", "a") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX if alone else fcntl.LOCK_SH)
        yield
        if alone:
            import torch

            torch.cuda.empty_cache()


@pytest.fixture(autouse=True)
def as_planned():
    ignore_tuned()
    yield
    ignore_tuned(False)
