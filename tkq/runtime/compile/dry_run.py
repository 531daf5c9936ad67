"""Which kernels calls would take, found out without a GPU: host functions run as ever, on tensors without memory
(``device="meta"``) that pass for CUDA's, and in the places of kernels stand functions that do nothing.

For a process of its own, which ends then: tensors count as on a GPU, and host functions cache what they found.
"""
from __future__ import annotations

_noted: dict | None = None  # Recipe -> None, in order
_device = "meta"


def begin(num_sms: int = 132, device: str = "meta") -> None:
    """From now on this process launches nothing, and plans for a Hopper GPU of ``num_sms`` SMs. device: "cuda"
    for calls on tensors of the GPU that is here, and plans for it."""
    global _noted, _device
    import torch

    from ..device import arch

    if device == "meta":
        arch.assume(num_sms)
        torch.Tensor.is_cuda = property(lambda tensor: True)
    _noted, _device = {}, device


def device() -> str:
    """Where tensors of a dry run's calls are to be."""
    return _device


def under_way() -> bool:
    return _noted is not None


def noted(recipe):
    """In a kernel's place."""
    _noted[recipe] = None
    return _nothing


def taken() -> list:
    """The recipes that calls asked for since ``begin`` or the last time. Host functions ask once for each kind of call:
    what was taken before does not come again."""
    found = list(_noted)
    _noted.clear()
    return found


def _nothing(*arguments):
    return None
