"""How tensors of 16 bits lie in memory, as TMA and accesses of 16 bytes can take them."""
import torch
from torch import Tensor


def takes(x: Tensor) -> bool:
    """Do the strides and the address of x suit TMA: last dimension contiguous, the rest multiples of 16 bytes?"""
    return x.stride(-1) == 1 and x.data_ptr() % 16 == 0 and not any(
        x.stride(i) % 8 and x.shape[i] > 1 for i in range(x.dim() - 1))


def readable(x: Tensor) -> Tensor:
    """x, or a copy where TMA cannot take its strides or its address."""
    return x if takes(x) else x.clone(memory_format=torch.contiguous_format)
