"""The machine code of the pointwise kernels: every load of x is under way before the first result is computed."""
import pytest

from tkq.pointwise.catalog import shipped
from tkq.testing import sass

# one of each: forward and backward, the memory layouts, the sources of positions
NAMES = ("geglu-bf16-apart-v8-d2-forward", "geglu-bf16-apart-v8-d2-both", "geglu_tanh-bf16-apart-v8-d2-both",
         "swiglu-bf16-split-v8-d3-both", "swiglu-bf16-interleaved-v4-d3-forward", "swiglu-bf16-interleaved-v4-d3-both",
         "rope-bf16-r128-tbf16-interleaved-offset-v8", "rope-bf16-r128-tfp32-half-offsets-int64-varlen-v8",
         "rope_qk-bf16-r128-tfp32-half-offset-v8", "rope-fp32-r64-tfp32-interleaved-offset-rest64-v4")
KERNELS = [kernel for kernel in shipped() if kernel.name in NAMES]


def test_the_names_are_right():
    assert {kernel.name for kernel in KERNELS} == set(NAMES)


@pytest.mark.parametrize("kernel", KERNELS, ids=lambda kernel: kernel.name)
@pytest.mark.machine_code(recipe=lambda kernel: kernel.recipe)
def test_machine_code(kernel, machine_code):
    sass.assert_sass(machine_code, kernel.expectation)
    order = [opcode for one in machine_code for opcode in one.order]
    loads = [i for i, opcode in enumerate(order) if opcode.startswith("LDG")]
    packed = [i for i, opcode in enumerate(order) if opcode.startswith(("F2FP", "STG"))]
    assert len(loads) >= 3 and max(loads) < min(packed)
