"""What the kernels are compiled for, of lists and captured values: any sizes and strides."""
from cutlass import AddressSpace, BFloat16, Float16, Float32, Int8, Int16, Int32, Int64, Uint8
from cutlass.cute.runtime import make_fake_tensor

from tkq.attention.flex.operands import Captured
from tkq.runtime.compile import fake

_ELEMENTS = {"bool": Uint8, "uint8": Uint8, "int8": Int8, "int16": Int16, "int32": Int32, "int64": Int64,
             "fp16": Float16, "bf16": BFloat16, "fp32": Float32}
_NUMBERS = {"i32": Int32, "f32": Float32}


def captured(graph) -> Captured | None:
    """What a graph's slots hold."""
    if graph is None or not (graph.tensors or graph.numbers):
        return None
    tensors = tuple(_tensor(_ELEMENTS[dtype], tuple(fake.sym() for _ in range(max(rank, 1))))
                    for dtype, rank in graph.tensors)
    return Captured(tensors or None, tuple(_NUMBERS[kind](1) for kind in graph.numbers) or None)


def gradient(rank: int):
    """Of a captured tensor of that rank."""
    return _tensor(Float32, tuple(fake.sym() for _ in range(max(rank, 1))))


def ints(*shape):
    """int32, of any strides."""
    return _tensor(Int32, shape)


def states():
    """What each block of a mask is, int8 (B, H, rows, columns), of any strides."""
    return _tensor(Int8, tuple(fake.sym() for _ in range(4)))


def _tensor(element, shape):
    strides = tuple(fake.sym64() for _ in shape)
    return make_fake_tensor(element, shape, strides, memspace=AddressSpace.gmem, assumed_align=element.width // 8)
