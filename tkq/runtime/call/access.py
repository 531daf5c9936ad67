"""How wide a kernel's accesses of a call's tensors may be."""
from torch import Tensor

FARTHEST = (1 << 31) - 1  # bytes from one token to the next, which kernels have in 32 bits


def vector_of(time: bool, *tensors: Tensor | None) -> int:
    """Elements in one access of (B, T, C) tensors of one dtype, up to 16 bytes: as many as addresses, sizes and strides
    of all allow. time: neighbouring tokens are neighbours in memory, not neighbouring channels."""
    inner, bits, size = (1 if time else 2), 16, 1
    for x in tensors:
        if x is not None:
            size = x.itemsize
            bits |= x.data_ptr() | x.shape[inner] * size
            for dim in (0, 3 - inner):
                if x.shape[dim] > 1:
                    bits |= x.stride(dim) * size
    return (bits & -bits) // size
