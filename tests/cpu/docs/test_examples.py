"""The examples run here too: without a GPU they compile, and say that nothing was timed."""
import ast
import os
import pathlib
import re

import pytest

from tests.helpers.process import fresh

ROOT = pathlib.Path(__file__).parents[3]
EXAMPLES = sorted((ROOT / "examples").glob("*.py"))
MOST_LINES = {"write_a_reduction.py": 100, "write_a_row_kernel.py": 100, "write_a_tile_kernel.py": 120,
              "write_a_scan.py": 130}


@pytest.mark.parametrize("path", EXAMPLES, ids=lambda p: p.stem)
def test_runs_without_a_gpu(path):
    env = dict(os.environ, PYTHONPATH=str(ROOT), CUDA_VISIBLE_DEVICES="")
    done = fresh.run(path, imports="torch, cutlass.cute, tests.cpu.docs.sources_read", env=env, timeout=300)
    assert done.returncode == 0, done.stderr
    assert "No GPU" in done.stdout and "timed" in done.stdout
    assert set(re.findall(r"(\d+) spills", done.stdout)) <= {"0"}
    if path.stem == "write_a_flash_attention":  # the products are not serialised
        assert re.findall(r"tensor (\d+), wgmma waits (\d+)", done.stdout) == [("32", "4")]


def test_a_fused_backward_takes_at_most_40_lines():
    """The class and the function that launches it, comments and all."""
    source = (ROOT / "examples" / "write_a_row_kernel.py").read_text()
    parts = {node.name: node.end_lineno - node.lineno + 1 for node in ast.parse(source).body if hasattr(node, "name")}
    assert parts["SiluNormBackward"] + parts["silu_norm_backward"] <= 40, parts


@pytest.mark.parametrize("name", MOST_LINES)
def test_is_short(name):
    assert len((ROOT / "examples" / name).read_text().splitlines()) <= MOST_LINES[name]
