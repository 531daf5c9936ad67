"""How many launches a call of every op is (tests/helpers/ops/every_op.py), and its backward: counted on a GPU, and
shown.

    python -m tests.helpers.ops.launch_table --count      # on a GPU: launches.json, which the GPU suite compares with
    python -m tests.helpers.ops.launch_table --write      # anywhere: docs/launches.md, made of it
"""
import argparse
import json
import pathlib

import torch

from tests.helpers.ops.every_op import CASES, incoming, results

NUMBERS = pathlib.Path(__file__).with_name("launches.json")
PAGE = pathlib.Path(__file__).parents[3] / "docs" / "launches.md"
_HEAD = """# Launches per call

<!-- python -m tests.helpers.ops.launch_table --write -->
Kernels, copies and fills per call: without gradients, with autograd, and in the backward. Counted by PyTorch's profiler
on an H100 or H200 from the second call on, in eager mode, on small tensors
([every_op.py](../tests/helpers/ops/every_op.py) has the calls). Every run of the GPU suite checks them. Larger inputs
may have other plans. Hedgehog's gradients with maps of 32 columns are partly PyTorch's; with maps of 64 columns they
are tkq's own kernels ([Hedgehog](linear_attention.md#hedgehog)), whose launches have not been counted.

| call | forward | forward with autograd | backward |
| --- | --- | --- | --- |
"""


def numbers() -> dict:
    """{case: [of a call, of one that autograd records, of such a one and its backward]}; the first alone where there is
    no gradient."""
    return json.loads(NUMBERS.read_text())


_WORDS = {"causal_conv1d, of packed sequences": "causal_conv1d, variable-length, with initial and final states",
          "hedgehog": "hedgehog, maps of 32 columns", ", of heads": ", per head", ", of each row": ', reduction="none"',
          ", of packed sequences": ", variable-length"}


def text() -> str:
    rows = ((_title(name), *_cells(found)) for name, found in numbers().items())
    return _HEAD + "".join(f"| {' | '.join(map(str, row))} |\n" for row in rows)


def _cells(found) -> tuple:
    return found[0], *(("", "") if len(found) == 1 else (found[1], found[2] - found[1]))


def _title(name: str) -> str:
    for words, title in _WORDS.items():
        name = name.replace(words, title)
    return name


def count() -> dict:
    """As `numbers`, counted."""
    found = {}
    for name, case in CASES.items():
        found[name] = [launches(case.alone or case.call, *case.inputs("cuda").values())]
        if case.leaves:
            inputs = case.inputs("cuda", grad=True)
            _, gradients = incoming(case.call(*inputs.values()))
            leaves = [inputs[leaf] for leaf in case.leaves]
            found[name] += launches(case.call, *inputs.values()), launches(step, case, inputs, leaves, gradients)
    return found


def step(case, inputs, leaves, gradients):
    recorded = [t for t in results(case.call(*inputs.values())) if t.requires_grad]
    torch.autograd.grad(recorded, leaves, gradients)


def launches(call, *inputs) -> int:
    """Kernels, copies and fills of a second call."""
    from torch.profiler import ProfilerActivity, profile

    call(*inputs)
    torch.cuda.synchronize()
    with profile(activities=[ProfilerActivity.CUDA]) as record:
        call(*inputs)
        torch.cuda.synchronize()
    return sum(event.device_type == torch.autograd.DeviceType.CUDA for event in record.events())


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--count", action="store_true")
    parser.add_argument("--write", action="store_true")
    chosen = parser.parse_args()
    if chosen.count:
        lines = (f"{json.dumps(name)}: {json.dumps(found)}" for name, found in count().items())
        NUMBERS.write_text("{\n" + ",\n".join(lines) + "\n}\n")
    if chosen.write:
        PAGE.write_text(text())
    if NUMBERS.exists():
        print(text(), end="")
