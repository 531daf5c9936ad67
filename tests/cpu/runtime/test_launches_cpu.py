"""Launches per call, where no GPU is needed: the page is made of what was counted, for every op."""
import torch

from tests.helpers.emulation import fake_gpu
from tests.helpers.ops import launch_table
from tests.helpers.ops.every_op import CASES, of_all, results


def test_the_page_is_what_was_counted():
    assert launch_table.PAGE.read_text() == launch_table.text()
    wanted = {name: 3 if case.leaves else 1 for name, case in CASES.items()}
    assert {name: len(found) for name, found in launch_table.numbers().items()} == wanted


@of_all(list(CASES.values()))
def test_compiled_functions_per_call(case):
    """A call asks for no more than what it was counted to launch: each of these is one kernel at least."""
    most = launch_table.numbers()[case.name]
    with fake_gpu.launches() as seen:
        case.call(*case.inputs().values())
        assert 0 < len(seen) <= most[0]
        if case.leaves:
            seen.clear()
            inputs = case.inputs(grad=True)
            recorded = [t for t in results(case.call(*inputs.values())) if t.requires_grad]
            assert len(seen) <= most[1]
            leaves = [inputs[name] for name in case.leaves]
            torch.autograd.grad(recorded, leaves, [torch.zeros_like(t) for t in recorded])
            assert len(seen) <= most[2]
