"""Facts of a CUDA device, asked once."""
import functools
import warnings
from typing import NamedTuple

import torch

HOPPER = (9, 0)
_elsewhere = torch.device("cpu")
_assumed = None  # what a device without an index has, where a dry run says so


class _Assumed(NamedTuple):
    """In place of a device's properties."""

    multi_processor_count: int
    name: str = "Hopper GPU"
    major: int = HOPPER[0]
    minor: int = HOPPER[1]


def assume(num_sms: int) -> None:
    """For a dry run: tensors that are on no GPU, whose index is -1, count as on a Hopper GPU of
    ``num_sms`` multiprocessors, and what is allocated beside them has no memory."""
    global _elsewhere, _assumed
    _elsewhere, _assumed = torch.device("meta"), _Assumed(num_sms)


def device(index: int) -> torch.device:
    """The CUDA device of an index; below 0, which a CPU tensor's ``get_device`` says, the CPU."""
    return torch.device("cuda", index) if index >= 0 else _elsewhere


def _index(device) -> int:
    device = torch.device(device)
    if device.type != "cuda":
        if _assumed is not None:
            return -1
        raise ValueError(f"device: got {device}, expected a CUDA device")
    return torch.cuda.current_device() if device.index is None else device.index


@functools.cache
def _properties(index: int):
    return _assumed if index < 0 else torch.cuda.get_device_properties(index)


def num_sms(device) -> int:
    """How many multiprocessors (SMs) the device has."""
    return _properties(_index(device)).multi_processor_count


def processors(device) -> int:
    """``num_sms``, under its old name, for one minor version."""
    warnings.warn("tkq.runtime.arch.processors is now arch.num_sms; the next minor version drops the old name",
                  DeprecationWarning, stacklevel=2)
    return num_sms(device)


def model(device) -> str:
    """The kind of device: what its driver calls it, and its number of multiprocessors."""
    found = _properties(_index(device))
    return f"{found.name}, {found.multi_processor_count} processors"


def capability(device) -> tuple:
    """The compute capability, as (9, 0)."""
    properties = _properties(_index(device))
    return properties.major, properties.minor


def require_hopper(device) -> None:
    """RuntimeError on a GPU that the kernels do not run on. They use instructions (wgmma, setmaxnreg) that exist on
    compute capability 9.0 alone: neither older nor newer GPUs run sm_90a code."""
    found = capability(device)
    if found != HOPPER:
        raise RuntimeError(
            f"tkq: {torch.device(device)} is a {_properties(_index(device)).name} of compute capability "
            f"{found[0]}.{found[1]}; the kernels need a Hopper GPU (H100, H200, GH200), compute capability 9.0")
