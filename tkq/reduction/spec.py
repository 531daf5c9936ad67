"""What a subclass of ReductionBase was called with, in plain values: its repr is the compile key. Neither torch nor the
DSL."""
from dataclasses import dataclass
from typing import Optional


@dataclass(frozen=True)
class Argument:
    """What a compiled kernel knows of an argument. kind: "matrix" (M, N) with any row stride, "columns" (N,), "rows"
    (M,), "float", "int" or "none". vector: divides base address and row stride, in elements."""

    kind: str
    dtype: Optional[str] = None
    vector: int = 1


@dataclass(frozen=True)
class ReductionSpec:
    """module, qualname: the subclass; arguments: of `__call__`; options: of the constructor, sorted."""

    module: str
    qualname: str
    N: int
    arguments: tuple
    options: tuple = ()


def is_stream(p) -> bool:
    """Is a parameter of `__call__` the one for torch's current stream?"""
    return p.name == "stream" or str(getattr(p.annotation, "__name__", p.annotation)).endswith("CUstream")
