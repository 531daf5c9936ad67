"""bench.studies.cold_start: what its processes see and what is reported of it. On the CPU by the references: no kernel
runs."""
import json
import math
import subprocess
import sys

import pytest

import tkq
from bench.core.results import Environment, Report
from bench.studies import cold_start
from bench.studies.cold_process import TORCH
from tests.helpers.ops import smoke
from tests.helpers.ops.every_op import NOT_OPS
from tests.helpers.process import fresh


def test_a_process_measures_a_case_in_a_copy_of_itself():
    asked = "\n".join(("rmsnorm, gradients", "softmax", "no such case", TORCH))
    command = [sys.executable, "-m", "bench.studies.cold_process", "cache", "cpu"]
    done = subprocess.run(command, cwd=cold_start.ROOT, input=asked, capture_output=True, text=True, timeout=120,
                          check=True)
    imports, gradients, plain, problem, torchs = map(json.loads, done.stdout.splitlines())
    assert imports.keys() == {"torch", "tkq", "tvm_ffi", "functions"} and min(imports.values()) > 0
    assert problem == {"problem": "KeyError: 'no such case'"}
    for found in (gradients, torchs):
        assert len(found["first"]) == 2 and min(found["first"]) > 0 and not found["dsl"]
    assert plain["first"] > 0 and plain["second"] > 0


# In a fork all first calls, for what they import; in the process itself those without gradients once more, for the
# kernels of torch's that they launch.
FIRST_CALLS = """
import os, sys
from torch.utils._python_dispatch import TorchDispatchMode
from bench.studies import cold_process, cold_start
cold_process.imported()
from tests.helpers.ops import smoke
from tkq.runtime.compile import dry_run

class Seen(TorchDispatchMode):
    def __torch_dispatch__(self, f, types, args=(), kwargs=None):
        if f.namespace != "tkq" and not f.is_view and "empty" not in f.name():
            print("launches", op, f, flush=True)
        return f(*args, **(kwargs or {}))

dry_run.begin()
calls = smoke.cases(smoke.inputs("meta"))
process = os.fork()
if not process:
    before = set(sys.modules)
    for op in cold_start.OPS:
        if op != cold_process.TORCH:
            calls[op]()
    assert dry_run.taken()
    for name in sorted(set(sys.modules) - before):
        if name.startswith(("tkq", "cutlass")):
            print("imports", name)
    print("imported", flush=True)
    os._exit(0)
assert os.waitpid(process, 0)[1] == 0
for op in cold_start.OPS:
    if not op.endswith(", gradients"):
        with Seen():
            calls[op]()
"""


@pytest.fixture(scope="module")
def first_calls():
    """Lines of what first calls do that they should not, and "imported", where the fork came to its end."""
    done = fresh.run(FIRST_CALLS)
    assert done.returncode == 0, done.stderr
    return done.stdout.splitlines()


def test_a_first_call_imports_nothing_of_tkq(first_calls):
    """Forward or backward: it would wait for that."""
    assert [line for line in first_calls if not line.startswith("launches")] == ["imported"]


def test_every_case_is_one_of_the_smoke_cases():
    g = smoke.inputs("cpu")
    assert {op for op in cold_start.OPS if op != TORCH} <= set(smoke.cases(g))
    assert len(set(cold_start.OPS)) == len(cold_start.OPS)
    assert {op.removesuffix(", gradients") for op in cold_start.OPS if op.endswith(", gradients")} <= {
        *smoke.recorded(g), "torch.sum"}


def test_every_op_has_its_first_calls_measured():
    """Each function, and each backward that tests/helpers/ops/smoke.py has: of the plain calls."""
    measured = {op.partition(" ")[0].rstrip(",") for op in cold_start.OPS}
    own = {"flex_attention"}  # whose kernels are those of a user's function
    assert {name for name, module in tkq._PUBLIC.items() if module.endswith("ops")} - NOT_OPS - own <= measured
    recorded = {op.removesuffix(", gradients") for op in cold_start.OPS if op.endswith(", gradients")}
    assert recorded - {"torch.sum"} == {name for name in smoke.recorded(smoke.inputs("cpu")) if " " not in name}


def test_what_is_measured_makes_no_inputs(first_calls):
    """A conversion by torch in a case, its first kernel of that kind, took longer than the op's own first call."""
    assert [line for line in first_calls if line.startswith("launches")] == []


def test_each_call_has_the_bound_and_both_together_have_none():
    seen = {"first": [0.02, 0.031], "second": [0.001, 0.001], "dsl": False}
    found = {c.name: c for c in cold_start.costs_of("rmsnorm, gradients", "cache", [seen])}
    assert found["first call, cache: rmsnorm, recorded"].holds() is True
    assert found["first call, cache: rmsnorm, backward"].holds() is False
    both = found["first calls, cache: rmsnorm, both"]
    assert both.holds() is None and both.median_us == pytest.approx(51_000)


def test_what_came_is_on_disk_and_what_did_not_is_named(tmp_path):
    results = cold_start.Results(Report(Environment.here()), tmp_path / "cold_start.json")
    results.add("", "cache", {"torch": 2.0, "tkq": 0.002, "tvm_ffi": 0.2, "functions": 0.1})
    results.add("softmax", "cache", {"first": 0.009, "second": 0.001, "dsl": False})
    saved = Report.from_json((tmp_path / "cold_start.json").read_text())
    assert [c.name for c in saved.costs] == [
        "first call, cache: softmax", "second call, cache: softmax", "import torch",
        "import tkq, after torch", "tvm-ffi, which launches, after that", "all functions of tkq, after that",
        "tkq, tvm-ffi and all functions, after torch"]
    assert saved.costs[-1].median_us == pytest.approx(302_000) and saved.costs[-1].holds() is False
    assert [c.at_most for c in saved.costs[2:-1]] == [None] * 4
    results.add("rope", "bundle", {"problem": "of its own"})
    results.missing(("softmax", "rope", TORCH))
    assert Report.from_json((tmp_path / "cold_start.json").read_text()).problems == [
        "rope, bundle: of its own", "softmax, bundle: not measured", "rope, cache: not measured",
        f"{TORCH}, cache: not measured"]


def test_of_two_measurements_their_mean_counts():
    found = cold_start.cost("a first call", [0.034, 0.012])
    assert (found.median_us, found.least_us, found.most_us, found.samples) == pytest.approx((23e3, 12e3, 34e3, 2))


def test_a_third_round_begins_with_what_has_taken_longest(tmp_path):
    results = cold_start.Results(Report(Environment.here()), tmp_path / "cold_start.json")
    ops, longest = ("softmax", "rmsnorm, gradients"), {"cache": (0.012, 0.031), "bundle": (0.034, 0.008)}
    order = []
    for op, source in cold_start.in_order(ops, 3, results):
        order.append((op, source))
        plain, backward = longest[source]
        first = plain if op == "softmax" else [0.007, backward]
        results.add(op, source, {"first": first, "second": first, "dsl": False})
    assert order[:4] == order[4:8] == cold_start.asked_for(ops)
    assert order[8:] == [("softmax", "bundle"), ("rmsnorm, gradients", "cache"), ("softmax", "cache"),
                         ("rmsnorm, gradients", "bundle")]


COUNTED = """
import json, os, sys, time
beside = os.path.join(sys.argv[1], "one is measured")
os.close(os.open(beside, os.O_CREAT | os.O_EXCL))  # fails where another is
time.sleep(0.02)
os.unlink(beside)
print(json.dumps({"torch": 2.0, "tkq": 0.001, "tvm_ffi": 0.2, "functions": 0.1}), flush=True)
for line in sys.stdin:
    os.close(os.open(beside, os.O_CREAT | os.O_EXCL))
    time.sleep(0.02)
    if line.strip() == "dies":
        os.unlink(beside)
        break
    os.unlink(beside)
    print(json.dumps({"first": 0.009, "second": 0.001, "dsl": False}), flush=True)
"""


def test_one_thing_is_measured_at_a_time_and_one_that_dies_is_named(tmp_path, monkeypatch):
    begun, beside = [], []

    def started(source, bundle):
        beside.append(sum(process.poll() is None for process in begun))
        begun.append(subprocess.Popen([sys.executable, "-c", COUNTED, tmp_path], text=True, stdin=subprocess.PIPE,
                                      stdout=subprocess.PIPE))
        return begun[-1]

    monkeypatch.setattr(cold_start, "started", started)
    results = cold_start.Results(Report(Environment.here()), tmp_path / "cold_start.json")
    cold_start.measure(("softmax", "rope"), 3, tmp_path, results, math.inf)
    assert results.report.problems == [] and {c.samples for c in results.report.costs} == {3, 6}  # and imports
    assert beside == [0, 1, 0, 0, 0, 0]  # the two that measure cases wait for one another, the others are alone
    cold_start.measure(("dies", "rope"), 1, tmp_path, results, math.inf)
    assert results.report.problems == [f"dies, {source}: the process that measures has ended"
                                       for source in cold_start.SOURCES]


def test_when_the_time_is_up_nothing_begins_but_what_cases_need(tmp_path, monkeypatch):
    monkeypatch.setattr(cold_start, "started", lambda source, bundle: subprocess.Popen(
        [sys.executable, "-c", COUNTED, tmp_path], text=True, stdin=subprocess.PIPE, stdout=subprocess.PIPE))
    results = cold_start.Results(Report(Environment.here()), tmp_path / "cold_start.json")
    cold_start.measure(("softmax",), 3, tmp_path, results, -math.inf)
    assert [(c.name, c.samples) for c in results.report.costs if c.name.startswith(("first", "import torch"))] == [
        ("import torch", 2)]
