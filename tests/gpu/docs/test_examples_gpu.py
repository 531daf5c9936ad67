"""The examples as a user runs them: each checks its results itself and prints what it timed. The Llamas in small."""
import importlib.util
import os
import pathlib
import re

import pytest

from tests.helpers.process import fresh

IMPORTS = "torch, pytest, cutlass.cute"  # as test_naps.py has it: the process from which programs are forked is one
ROOT = pathlib.Path(__file__).parents[3]
EXAMPLES = sorted((ROOT / "examples").glob("*.py"))
ON_A_BASE = "write_a_reduction", "write_a_row_kernel", "write_an_epilogue", "write_a_based"
# 300 of the first are test_layers_on_gpu's, with --slow. Of the second, as many as it takes to be better than guesses,
# whose loss a wrong convolution has, too.
FEWER = {"hybrid_train": ["--steps", "20"], "long_convolution_train": ["--steps", "300"]}


def is_llama(path):
    return path.stem.startswith("llama")


def is_slow(path):
    """It trains or generates, with layers that have tests of their own; or its kernel is on a base class whose own
    tests have more of it."""
    return is_llama(path) or path.stem in FEWER or path.stem in ON_A_BASE


def test_there_are_examples():
    assert len(EXAMPLES) >= 4


@pytest.mark.parametrize("path", [pytest.param(p, id=p.stem, marks=pytest.mark.slow if is_slow(p) else ())
                                  for p in EXAMPLES])
def test_example(path):
    env = {**os.environ, "PYTHONPATH": os.pathsep.join([str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])])}
    llama = is_llama(path)
    if llama and importlib.util.find_spec("transformers") is None:
        pytest.skip("transformers is not installed")
    words = ["--small"] if llama else FEWER.get(path.stem, [])
    done = fresh.run(path, *words, imports=IMPORTS, env=env, timeout=240)
    report = f"{done.stdout[-3000:]}\n{done.stderr[-3000:]}"
    assert done.returncode == 0, report
    times = [float(n) for n in re.findall(r"([\d.]+) (?:ms|us)\b", done.stdout)]
    assert len(times) >= 2 and min(times) > 0.0, f"no times in what it printed:\n{report}"
    assert "nothing" not in done.stdout and "failed" not in done.stdout, report
