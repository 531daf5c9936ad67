"""The shape of the kernel that copies rows of any alignment: pure Python, no torch, no DSL."""
from dataclasses import dataclass

UNIT = 16  # bytes of an access


@dataclass(frozen=True)
class RealignSpec:
    """dtype: of all. both: there are two matrices to copy. threads: of a block; units: of 16 bytes that each takes."""

    dtype: str = "bf16"
    both: bool = False
    threads: int = 256
    units: int = 2
