"""How many launches a call of every op is, and its backward: what the profiler counts on the GPU."""
import torch
from torch.profiler import ProfilerActivity, profile

from tests.every_op import CASES, incoming, results


def test_launches_per_call():
    """The numbers in the list (tests/every_op.py), which docs/launches.md shows."""
    found = {}
    for name, case in CASES.items():
        found[name] = (launches(case.call, *case.inputs("cuda").values()),)
        if case.leaves:
            inputs = case.inputs("cuda", grad=True)
            _, gradients = incoming(case.call(*inputs.values()))
            leaves = [inputs[leaf] for leaf in case.leaves]
            found[name] += (launches(case.call, *inputs.values()), launches(step, case, inputs, leaves, gradients))
    differ = {name: found[name] for name, case in CASES.items() if found[name] != case.launches}
    assert not differ


def step(case, inputs, leaves, gradients):
    recorded = [t for t in results(case.call(*inputs.values())) if t.requires_grad]
    torch.autograd.grad(recorded, leaves, gradients)


def launches(call, *inputs) -> int:
    """Kernels, copies and fills of a second call."""
    call(*inputs)
    torch.cuda.synchronize()
    with profile(activities=[ProfilerActivity.CUDA]) as record:
        call(*inputs)
        torch.cuda.synchronize()
    return sum(event.device_type == torch.autograd.DeviceType.CUDA for event in record.events())
