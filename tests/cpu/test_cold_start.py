"""bench.cold_start: what its processes see and what is reported of it. On the CPU by the references: no kernel runs."""
import json
import subprocess
import sys

import pytest

from bench import cold_start
from bench.cold_process import TORCH
from bench.results import Environment, Report
from tests import smoke


def test_a_process_measures_a_case_in_a_copy_of_itself():
    asked = "\n".join(("rmsnorm, gradients", "softmax", "no such case", TORCH))
    command = [sys.executable, "-m", "bench.cold_process", "cache", "cpu"]
    done = subprocess.run(command, cwd=cold_start.ROOT, input=asked, capture_output=True, text=True, timeout=120,
                          check=True)
    imports, gradients, plain, problem, torchs = map(json.loads, done.stdout.splitlines())
    assert imports.keys() == {"torch", "tkq", "functions"} and min(imports.values()) > 0
    assert problem == {"problem": "KeyError: 'no such case'"}
    for found in (gradients, torchs):
        assert len(found["first"]) == 2 and min(found["first"]) > 0 and not found["dsl"]
    assert plain["first"] > 0 and plain["second"] > 0


IMPORTED_IN_CALLS = """
import sys, types
from bench import cold_process, cold_start
cold_process.imported()
from tests import smoke
from tkq.runtime import rehearsal
on_cpu = vars(smoke.inputs("cpu"))
rehearsal.begin()
calls = smoke.cases(types.SimpleNamespace(**{name: t.to("meta") for name, t in on_cpu.items()}))
before = set(sys.modules)
for op in cold_start.OPS:
    if op != cold_process.TORCH:
        calls[op]()
assert rehearsal.taken()
print(sorted(name for name in set(sys.modules) - before if name.startswith(("tkq", "cutlass"))))
"""


def test_a_first_call_imports_nothing_of_tkq():
    """Forward or backward: it would wait for that."""
    command = [sys.executable, "-c", IMPORTED_IN_CALLS]
    done = subprocess.run(command, cwd=cold_start.ROOT, capture_output=True, text=True, timeout=120, check=True)
    assert done.stdout.strip() == "[]"


def test_every_case_is_one_of_the_smoke_cases():
    g = smoke.inputs("cpu")
    assert {op for op in cold_start.OPS if op != TORCH} <= set(smoke.cases(g))
    assert len(set(cold_start.OPS)) == len(cold_start.OPS)
    assert {op.removesuffix(", gradients") for op in cold_start.OPS if op.endswith(", gradients")} <= {
        *smoke.recorded(g), "torch.sum"}


def test_each_call_has_the_bound_and_both_together_have_none():
    seen = {"first": [0.02, 0.031], "second": [0.001, 0.001], "dsl": False}
    found = {c.name: c for c in cold_start.costs_of("rmsnorm, gradients", "cache", [seen])}
    assert found["first call, cache: rmsnorm, recorded"].holds() is True
    assert found["first call, cache: rmsnorm, backward"].holds() is False
    both = found["first calls, cache: rmsnorm, both"]
    assert both.holds() is None and both.median_us == pytest.approx(51_000)


def test_what_came_is_on_disk_and_what_did_not_is_told(tmp_path):
    results = cold_start.Results(Report(Environment.here()), tmp_path / "cold_start.json")
    results.add("", "cache", {"torch": 2.0, "tkq": 0.002, "functions": 0.2})
    results.add("softmax", "cache", {"first": 0.009, "second": 0.001, "dsl": False})
    saved = Report.from_json((tmp_path / "cold_start.json").read_text())
    assert [c.name for c in saved.costs] == [
        "first call, cache: softmax", "second call, cache: softmax", "import torch",
        "import tkq, after torch", "all functions of tkq, after that"]
    results.add("rope", "bundle", {"problem": "of its own"})
    results.missing(("softmax", "rope", TORCH))
    assert Report.from_json((tmp_path / "cold_start.json").read_text()).problems == [
        "rope, bundle: of its own", "softmax, bundle: not measured", "rope, cache: not measured",
        f"{TORCH}, cache: not measured"]
