"""New tensors for what an op returns or keeps beside its result."""
import torch
from torch import Tensor

# What the code that torch.compile makes allocates with: 1.2 us, where torch.empty takes 2.7 (an H100's host).
_strided = getattr(torch._C._dynamo.guards, "_empty_strided_cuda", None)
_current, _filling = getattr(torch._C, "_cuda_getDevice", None), torch._C._get_deterministic_algorithms


def empty(like: Tensor, shape: tuple, stride: tuple, dtype: torch.dtype) -> Tensor:
    """A tensor on the device of `like`, not filled (but where torch is told to fill what is new)."""
    if _strided is not None and _current is not None and like.get_device() == _current() and not _filling():
        return _strided(shape, stride, dtype)
    return torch.empty_strided(shape, stride, dtype=dtype, device=like.device)


def floats(like: Tensor, shape: tuple, stride: tuple) -> Tensor:
    """The same of float32."""
    return empty(like, shape, stride, torch.float32)
