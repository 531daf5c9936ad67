"""``import tkq`` is light: nothing of the DSL, and of what is not tkq's own next to nothing on top of torch."""
import json
import pathlib
import re
import subprocess
import sys

import pytest

from tests.helpers.process import fresh
from tkq.runtime.compile import ffi

CHECKOUT = pathlib.Path(__file__).resolve().parents[3]


def run(program):
    """What it prints last. Where torch is part of the question, `afresh` starts an interpreter for it."""
    return printed(fresh.run(program))


def afresh(program):
    return printed(subprocess.run([sys.executable, "-c", program], cwd=CHECKOUT, capture_output=True, text=True,
                                  timeout=120))


def printed(done):
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout.splitlines()[-1])


IMPORTED = """
import json, sys
import torch
before = set(sys.modules)
import tkq
from bench.studies.cold_process import OF_THE_DSL
for name in sorted(set(tkq.__all__) - OF_THE_DSL):
    getattr(tkq, name)
import tkq.nn, tkq.integrations.sdpa
print(json.dumps(sorted(set(sys.modules) - before)))
"""
SLOW_PARTS_OF_TORCH = ("torch._dynamo", "torch._inductor", "torch.distributed", "torch.fx.experimental")  # with sympy


def test_the_public_functions_bring_tvm_ffi_and_no_more():
    """How long that takes is measured by bench.studies.cold_start."""
    brought = run(IMPORTED)
    packages = {name.partition(".")[0] for name in brought} - sys.stdlib_module_names
    of_tvm_ffi = {"tvm_ffi", "cuda", "cython_runtime"}  # it looks for cuda-python
    assert {name for name in packages if not name.startswith("_")} <= {"tkq", "bench", "torch", *of_tvm_ffi}
    assert [name for name in brought if name.startswith(SLOW_PARTS_OF_TORCH)] == []


def test_imports_ask_for_no_device_so_a_process_may_fork_after_them():
    """As PyTorch counts devices it starts CUDA: then a forked process cannot use it."""
    if not ffi._has_both():
        pytest.skip("a PyTorch before 2.10, for which tvm-ffi asks for devices: see tkq/runtime/compile/ffi.py")
    seen = run("""
import json, traceback
import torch
asked = []
def count():
    asked.append(traceback.format_stack())
    return 1
torch._C._cuda_getDeviceCount = count  # PyTorch for a CPU, too, then takes itself for one that has CUDA
assert torch.cuda.is_available() and asked
asked.clear()
import tkq
from bench.studies.cold_process import OF_THE_DSL
for name in sorted(set(tkq.__all__) - OF_THE_DSL):
    getattr(tkq, name)
import tkq.nn, tkq.integrations.sdpa, tests.helpers.ops.smoke
print(json.dumps(asked))
""")
    assert seen == []


def test_tvm_ffi_comes_by_way_of_the_module_that_keeps_it_from_asking():
    """But for what the kernels are keyed by: what calls those has imported that module before."""
    found = {str(path.relative_to(CHECKOUT)) for path in (CHECKOUT / "tkq").rglob("*.py")
             if re.search(r"^ *(import|from) tvm_ffi", path.read_text(), re.MULTILINE)}
    assert found == {f"tkq/runtime/compile/{name}.py" for name in ("ffi", "link")}


def test_import_tkq_its_plans_and_its_runtime_need_neither_torch_nor_the_dsl():
    seen = afresh("""
import json, sys
import tkq, tkq.warmup.catalog, tkq.runtime, tkq.testing.sass
import tkq.attention.forward.plan, tkq.gemm.dense.plan, tkq.norms.plan
print(json.dumps(sorted({"torch", "cutlass", "tvm_ffi", "numpy"} & set(sys.modules))))
""")
    assert seen == []


def test_the_list_of_shipped_kernels_needs_no_dsl():
    seen = run("""
import json, sys
import tkq.warmup.catalog
print(json.dumps([len(tkq.warmup.catalog.shipped()), "cutlass" in sys.modules]))
""")
    assert seen[0] > 20 and not seen[1]


def test_a_call_on_cpu_tensors_needs_no_dsl():
    seen = run("""
import json, sys
import torch, tkq
y = tkq.rmsnorm(torch.ones(2, 8))
print(json.dumps(dict(y=y.tolist(), dsl="cutlass" in sys.modules)))
""")
    assert not seen["dsl"] and all(abs(value - 1) < 1e-5 for row in seen["y"] for value in row)
