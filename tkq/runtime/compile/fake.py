"""Fake arguments, which stand for torch tensors of any size while a kernel is compiled. Imports the DSL."""
import cutlass
import cutlass.cute as cute
from cutlass.cute.runtime import make_fake_tensor

from ...tile.dtypes import element_type


def sym(divisibility: int = 1):
    """A size known at run time, below 2^31, a multiple of ``divisibility``. One object used twice means equal sizes."""
    return cute.sym_int(divisibility=divisibility)


def sym64(divisibility: int = 1):
    """A 64-bit size or stride known at run time, a multiple of ``divisibility``."""
    return cute.sym_int64(divisibility=divisibility)


def tensor(dtype_name: str, shape: tuple, stride: tuple | None = None, align: int = 16, host: bool = False):
    """A tensor argument: what a call passes is checked against it.

    shape, stride: ints or ``sym``/``sym64``, in elements. Without stride: row-major; strides over a size that is known
        at run time are, too (64-bit; rows may be padded), multiples of what is known of the sizes below them.
    align: bytes that the address is a multiple of; 16 is what 128-bit accesses and TMA need.
    host: a tensor in host memory; otherwise on the GPU.
    """
    if len(shape) == 0:
        raise ValueError("fake.tensor: got an empty shape, at least one dimension is needed")
    stride = _row_major(shape) if stride is None else stride
    space = cutlass.AddressSpace.generic if host else cutlass.AddressSpace.gmem
    return make_fake_tensor(element_type(dtype_name), shape, stride, memspace=space, assumed_align=align)


def scalar(dtype_name: str, host: bool = False):
    """A tensor argument of no dimension: one element, at any address that its type allows."""
    kind = element_type(dtype_name)
    space = cutlass.AddressSpace.generic if host else cutlass.AddressSpace.gmem
    return make_fake_tensor(kind, (), (), memspace=space, assumed_align=kind.width // 8)


def _row_major(shape):
    strides, known, static = [], 1, True
    for extent in reversed(shape):
        strides.append(known if static else sym64(divisibility=known))
        if isinstance(extent, int):
            known *= extent
        else:
            known, static = known * extent.divisibility, False
    return tuple(reversed(strides))
