"""A bundle runs the smoke part of this suite on a machine without the DSL, a compiler and a cache."""
import os
import pathlib
import subprocess
import sys

import pytest

from tkq.runtime.compile import link

CHECKOUT = pathlib.Path(__file__).resolve().parents[3]


@pytest.mark.skipif(link.why_not() is not None or link.runtime_kind() != "static",
                    reason=link.why_not() or "bundles need the DSL's static runtime library")
def test_the_smoke_part_without_the_dsl(tmp_path):
    made = subprocess.run([sys.executable, "-m", "tests.helpers.ops.smoke", "bundle", str(tmp_path), "-j", "8"],
                          cwd=CHECKOUT,
                          text=True, capture_output=True)
    assert made.returncode == 0, made.stdout + made.stderr
    done = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "-p", "tests.helpers.process.without_dsl", "-p", "no:cacheprovider",
         "-p", "no:xdist",
         "tests/gpu/runtime/test_smoke.py"],
        cwd=CHECKOUT, text=True, capture_output=True,
        env={**os.environ, "TKQ_BUNDLE": str(tmp_path), "TKQ_CACHE_DIR": str(tmp_path / "none")})
    assert done.returncode == 0, done.stdout[-5000:] + done.stderr[-2000:]
    assert " passed" in done.stdout and "skipped" not in done.stdout and not (tmp_path / "none").exists()
