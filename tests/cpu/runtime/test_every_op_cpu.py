"""Every op as a citizen of PyTorch (tests/helpers/ops/every_op.py, tests/helpers/ops/every_op_checks.py), on the CPU's
path; and that the list has every op. tests/gpu/runtime/test_every_op.py is the same on a GPU, and what only a GPU
has."""
import importlib
import pkgutil

import pytest
import torch

import tkq
from tests.helpers.ops import every_op_checks as checks
from tests.helpers.ops.every_op import CASES, NOT_OPS, WITH_GRADIENTS, of_each, results

# torch.jit.script: what torch's own forward mode still uses
pytestmark = pytest.mark.filterwarnings("error", "ignore:.torch.jit.script. is deprecated")


every, differentiable = of_each(CASES.values()), of_each(WITH_GRADIENTS)


@pytest.fixture(autouse=True)
def quiet(capfd):
    """Nothing is said on the way, by torch's C++ neither."""
    yield
    assert capfd.readouterr().err == ""


def test_the_list_has_every_public_function():
    assert {case.function for case in CASES.values()} == tkq._PUBLIC.keys() - NOT_OPS


def test_the_list_makes_every_custom_op():
    for module in pkgutil.walk_packages(tkq.__path__, "tkq."):
        if module.name.endswith("ops"):
            importlib.import_module(module.name)
    registered = checks.registered()
    made = {op._schema.name.partition("::")[2] for case in CASES.values() for op, _ in checks.op_calls(case, "cpu")}
    assert made == registered


@every
def test_opcheck(case):
    checks.passes_opcheck(case, "cpu", checks.QUICK)


@pytest.mark.slow
@every
def test_opcheck_through_aot_dispatcher(case):
    checks.passes_opcheck(case, "cpu", ("test_aot_dispatch_dynamic",))


@every
def test_compile(case):
    checks.compiles_once(case, "cpu", "eager", checks.ROWS[::2])


@pytest.mark.slow
@every
def test_compile_through_aot_dispatcher(case):
    checks.compiles_once(case, "cpu")


@every
def test_export(case):
    checks.exports(case, "cpu")


@every
def test_autocast(case):
    checks.keeps_its_types_under_autocast(case, "cpu")
    if case.cast:
        checks.autocasts(case, "cpu")
    else:
        checks.keeps_its_types_under_autocast(case, "cpu", torch.float32)


@differentiable
def test_grad_scaler(case):
    checks.scales_gradients(case, "cpu")


@differentiable
def test_checkpoint(case):
    for reentrant in (False, True):
        checks.checkpoints(case, "cpu", reentrant)


@differentiable
@pytest.mark.parametrize("way", checks.WAYS)
def test_second_derivatives(case, way):
    checks.refuses_second_derivatives(case, "cpu", way)


@every
def test_vmap(case):
    checks.refuses_vmap(case, "cpu")


@every
def test_other_devices(case):
    checks.makes_tensors_on_its_inputs_device(case)


@differentiable
def test_no_rows(case):
    checks.goes_back_through_no_rows(case, "cpu")


@of_each(case for case in CASES.values() if case.name == case.function)
def test_no_tensor(case):
    checks.names_what_is_no_tensor(case, "cpu")


@differentiable
def test_forward_mode(case):
    checks.refuses_forward_mode(case, "cpu")


@differentiable
def test_functional_gradients(case):
    checks.refuses_functional_gradients(case, "cpu")


def test_threads():
    checks.runs_in_threads(CASES["rmsnorm"], "cpu")


@differentiable
def test_results_and_gradients_as_autograd_may_have_them(case):
    """Results are no views of what nobody sees, so that they may be written over; gradients may be zeros that have no
    memory."""
    inputs = case.inputs(grad=True)
    found = [t for t in results(case.call(*inputs.values())) if t.requires_grad]
    assert not any(t._is_view() for t in found)
    torch.autograd.backward(found, [torch._efficientzerotensor(t.shape, dtype=t.dtype) for t in found])
    assert not any(inputs[name].grad.any() for name in case.leaves)


@every
def test_under_autocast_of_the_other_type(case):
    """What keeps its types keeps them, what is cast is: no tensor meets one of the other 16 bits."""
    for given, wanted in ((torch.bfloat16, torch.float16), (torch.float16, torch.bfloat16)):
        inputs = case.inputs(grad=True, dtype=given)
        with torch.autocast("cpu", dtype=wanted):
            recorded = [x for x in results(case.call(*inputs.values())) if x.requires_grad]
        if recorded:
            leaves = [inputs[name] for name in case.leaves]
            torch.autograd.grad(recorded, leaves, [torch.ones_like(x) for x in recorded])
