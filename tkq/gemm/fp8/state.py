"""What the roles of the float8 GEMM see: the tiles in shared memory, what came in, a tile of C, what is shared, a
consumer's registers."""
import math
from dataclasses import dataclass
from typing import Any, Optional

import cutlass.cute as cute
from cutlass import Float32, Int32, Int64

from ... import tile as tk
from ..epilogue import registers as ep
from .config import STEP, Fp8Config, prefetches_scales


@dataclass(frozen=True)
class Tiles:
    """The types of the tiles in shared memory. a, b: a step's, as they are loaded; a_part, b_part: what they consist of
    in a stage. c: what one store takes, None without TMA; an epilogue subtile, 64 rows of ``store_n`` columns of C,
    goes out in ``stores`` of them."""

    a: tk.st
    b: tk.st
    a_part: tk.st
    b_part: tk.st
    c: Any
    store_n: int
    stores: int

    @staticmethod
    def of(spec, config: Fp8Config) -> "Tiles":
        """64 rows of A and, of B, the columns that are multiplied together are a part."""
        x, a, b = config, tk.element_type(spec.a), tk.element_type(spec.b)
        tma, stores = spec.store == "tma", 4 if x.store_per_warp else 1
        store_n = x.store_n(spec.out) if tma else math.gcd(64, x.part)
        return Tiles(
            a=tk.st(x.m, STEP, a), b=tk.st(x.n, STEP, b), a_part=tk.st(64, STEP, a), b_part=tk.st(x.part, STEP, b),
            c=tk.st(64 // stores, store_n, tk.element_type(spec.out)) if tma else None, store_n=store_n, stores=stores)


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
    counter: Optional[Int64] = None  # the address of wave sync's


@dataclass(frozen=True)
class Tile:
    """Where a block works, in its tiles."""

    row: Int32
    col: Int32


@dataclass(frozen=True)
class Shared:
    a: tk.SharedTile  # a ring of stages, each of m / 64 tiles of 64 rows
    b: tk.SharedTile  # a ring of stages, each of ``split`` tiles
    c: Any  # ``store_buffers`` tiles for each consumer; where warps store by themselves, each in four of 16 rows
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
    edge: Any = None  # of groups along K: see ``MaskedGroups``

    @staticmethod
    def of(spec, config: Fp8Config, pipe: tk.Pipe) -> "State":
        x = config
        return State([tk.rt_fl(x.part) for _ in range(x.m_subtiles * x.split)], pipe.ring(), pipe.ring(),
                     [tk.rv() for _ in range(x.m_subtiles)], tk.cv(x.n) if prefetches_scales(spec, x) else None,
                     ep.lane_cols(-(-x.n // 64) * 64, tk.element_type(spec.bias)) if spec.bias else None)


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


def scales_at(spec, given, extent, steps) -> cute.Tensor:
    """Scales at ``given``: (address, stride of rows or columns, stride of steps)."""
    address, stride, step = given
    shape = {"tensor": (1,), "row": (extent,)}.get(spec.scale_b, (extent, steps))
    return at(Float32, address, cute.make_layout(shape, stride=(stride, step)[:len(shape)]))
