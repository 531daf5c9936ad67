"""What the roles of the float8 GEMM see: what came in, a tile, what is shared, a consumer's registers."""
from dataclasses import dataclass
from typing import Any, Optional

import cutlass.cute as cute
from cutlass import Int32

from ... import tile as tk


@dataclass(frozen=True)
class Globals:
    a: tk.gl
    b: tk.gl  # (N, K)
    c: Any  # tk.gl, or the tensor itself where it is stored by elements
    scale_a: cute.Tensor  # (1,), (M,) or (M, steps)
    scale_b: cute.Tensor  # (1,), (N,), (N / 128, steps) or (N, steps)
    bias: Optional[cute.Tensor]  # (N,)
    out_scale: Optional[cute.Tensor]  # (1,)
    m: Int32
    n: Int32
    rows: Int32  # of cluster tiles
    cols: Int32
    steps: Int32  # of K


@dataclass(frozen=True)
class Tile:
    """Where a block works, in its tiles."""

    row: Int32
    col: Int32


@dataclass(frozen=True)
class Shared:
    a: tk.SharedTile  # a ring of stages, each of m / 64 tiles of 64 rows
    b: tk.SharedTile  # a ring of stages, each of ``split`` tiles
    c: Any  # ``panels`` tiles for each consumer; where warps store by themselves, each in four of 16 rows
    scales: Any  # (a's and b's of a step, stages)
    pipe: tk.Pipe


@dataclass(frozen=True)
class State:
    """A consumer's registers."""

    acc: list  # the sums: a tile for each wave and part
    full: tk.Ring  # the stage to multiply next
    done: tk.Ring  # the stage to release next
    rows: list  # scales of a's rows, for each wave
    cols: Any  # scales of b's columns, where they are fetched under the first product
    bias: Any  # a part of the columns' in each lane; None where there is none


# ---- what came in, as tensors --------------------------------------------------------------------


def transposed(x: cute.Tensor) -> cute.Tensor:
    """A view."""
    return cute.make_tensor(x.iterator, cute.select(x.layout, [1, 0]))


def at(dtype, address, layout) -> cute.Tensor:
    """A global tensor at an address: scales of one element have any number of dimensions, and torch's way of passing
    a tensor makes up strides of dimensions of one element."""
    width = dtype.width // 8
    return cute.make_tensor(cute.make_ptr(dtype, address, cute.AddressSpace.gmem, assumed_align=width), layout)


def vector(dtype, address, n) -> cute.Tensor:
    return at(tk.element_type(dtype), address, cute.make_layout(n))
