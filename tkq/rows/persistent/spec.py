"""What a RowKernel was asked for, in plain values: its repr is the compile key. Neither torch nor the DSL."""
from dataclasses import dataclass

from .shape import RowShape

WIDTH = {"bf16": 16, "fp16": 16, "fp32": 32}
MAX_ROWS = 1 << 30  # the kernel counts rows in 32 bits


@dataclass(frozen=True)
class Stream:
    """A tensor argument. align: bytes that the address of an (N,) tensor is a multiple of."""

    name: str
    dtype: str
    align: int = 16

    @property
    def width(self) -> int:
        """Bits of an element."""
        return WIDTH[self.dtype]


@dataclass(frozen=True)
class RowSpec:
    """module, qualname: the subclass of RowKernel. The other tuples name what a call has of what the class can take.

    loads, stores: (M, N). vectors, columns: (N,), columns contiguous and 16-byte aligned. scalars, results: (M,) fp32.
    vector, bulk, sums: see ``RowShape``. options: the class's compile-time options, as pairs.
    """

    module: str
    qualname: str
    N: int
    loads: tuple
    stores: tuple = ()
    vectors: tuple = ()
    scalars: tuple = ()
    results: tuple = ()
    columns: tuple = ()
    vector: int = 8
    bulk: bool = True
    sums: tuple = (1,)
    options: tuple = ()

    def __post_init__(self):
        for s in (*self.loads, *self.stores, *self.vectors, *self.columns):
            if s.dtype not in WIDTH:
                raise TypeError(f"{s.name}: got dtype {s.dtype}, allowed are {', '.join(WIDTH)}")

    @property
    def shape(self) -> RowShape:
        """What the plan depends on. Where nothing comes of a row but column sums, no exchange is needed."""
        return RowShape(self.N, tuple(s.width for s in self.loads), tuple(s.width for s in self.stores),
                        tuple(s.width for s in self.vectors), len(self.columns), self.sums, self.vector, self.bulk)
