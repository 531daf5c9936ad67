"""The shape of the kernel that copies rows of any alignment: pure Python, no torch, no DSL."""
from dataclasses import dataclass

UNIT = 16  # bytes of an access


@dataclass(frozen=True)
class RealignSpec:
    """dtype: of both. aligned: the destination's rows begin and end at multiples of 16 bytes; what is more than the
    source's becomes zero. threads: of a block; units: of 16 bytes that each takes."""

    dtype: str = "bf16"
    aligned: bool = True
    threads: int = 256
    units: int = 2
