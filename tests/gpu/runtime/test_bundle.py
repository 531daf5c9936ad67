"""A bundle runs the smoke part of this suite on a machine without the DSL, a compiler and a cache."""
import os
import pathlib
import subprocess
import sys

import pytest

from tests.helpers.ops import smoke
from tkq.runtime.compile import link

CHECKOUT = pathlib.Path(__file__).resolve().parents[3]


@pytest.mark.skipif(link.why_not() is not None or link.runtime_kind() != "static",
                    reason=link.why_not() or "bundles need the DSL's static runtime library")
@pytest.mark.parametrize("each", [pytest.param(1, marks=pytest.mark.slow), 10])
def test_the_smoke_part_without_the_dsl(tmp_path, each):
    made = subprocess.run([sys.executable, "-m", "tests.helpers.ops.smoke", "bundle", str(tmp_path), "-j", "4",
                           "--each", str(each)], cwd=CHECKOUT, text=True, capture_output=True)
    assert made.returncode == 0, made.stdout + made.stderr
    cases = [f"tests/gpu/runtime/test_smoke.py::test_once[{name}]" for name in smoke.names(each)]
    done = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "-p", "tests.helpers.process.without_dsl", "-p", "no:cacheprovider",
         "-p", "no:xdist", *cases],
        cwd=CHECKOUT, text=True, capture_output=True,
        env={**os.environ, "TKQ_BUNDLE": str(tmp_path), "TKQ_CACHE_DIR": str(tmp_path / "none")})
    assert done.returncode == 0, done.stdout[-5000:] + done.stderr[-2000:]
    assert " passed" in done.stdout and "skipped" not in done.stdout and not (tmp_path / "none").exists()
