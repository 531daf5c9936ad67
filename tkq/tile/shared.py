"""Shared tiles: what lies in shared memory, swizzled as TMA writes it and wgmma reads it."""
from dataclasses import dataclass, replace
from typing import Any

import cutlass.cute as cute
from cutlass import BFloat16, Constexpr, Float32, Int32, Int64
from cutlass.cute.nvgpu import warpgroup
from cutlass.memory import SmemAllocator

from .dtypes import type_name
from .naps import begin_kernel
from .sync import Mailbox, Pipe, Semaphore
from .traced import Made

ALIGNMENT = 1024  # of a tile: the 128-byte swizzle repeats after as many bytes
MOST_BYTES = 226 * 1024  # of a block's shared memory: what the loader grants
_KINDS = {128: warpgroup.SmemLayoutAtomKind.K_SW128, 64: warpgroup.SmemLayoutAtomKind.K_SW64,
          32: warpgroup.SmemLayoutAtomKind.K_SW32}


@dataclass(frozen=True)
class st:
    """The *type* of a shared tile: ``rows x cols`` elements, columns contiguous, swizzled.

    Args:
        rows: a multiple of 8.
        cols: a multiple of 32 bytes: 32 elements of 8 bits, 16 of 16, 8 of 32.
        dtype: any 8-, 16- or 32-bit type of the DSL.
        swizzle: 32, 64 or 128 bytes; the widest that divides a row where not given. A tile whose rows are longer
            lies in panels of that width, one after the other.
        row_groups: the panels of 8 rows lie together, those of the next 8 behind them: so that any multiple of 8 rows
            is contiguous, and one copy of a ``row_groups`` tensor brings it.

    Raises:
        ValueError, TypeError: when traced, naming what does not fit.
    """

    rows: int
    cols: int
    dtype: Any = BFloat16
    swizzle: Any = None
    row_groups: bool = False

    def __post_init__(self):
        width = getattr(self.dtype, "width", None)
        if width not in (8, 16, 32):
            raise TypeError(f"st: dtype is {type_name(self.dtype)}, allowed are types of 8, 16 or 32 bits")
        if self.rows <= 0 or self.rows % 8:
            raise ValueError(f"st: rows is {self.rows}, allowed are positive multiples of 8")
        row_bytes = self.cols * width // 8
        if self.cols <= 0 or self.cols * width % 256:
            raise ValueError(f"st: cols is {self.cols}, allowed for {width} bits are multiples of {256 // width}")
        swizzle = self.swizzle or next(s for s in _KINDS if row_bytes % s == 0)
        if swizzle not in _KINDS or row_bytes % swizzle:
            raise ValueError(f"st: swizzle is {swizzle}, allowed are 32, 64, 128, dividing a row's {row_bytes} bytes")
        object.__setattr__(self, "swizzle", swizzle)

    def __str__(self):
        return f"{self.rows} x {self.cols} {type_name(self.dtype)}" + " in groups of 8 rows" * self.row_groups

    @property
    def bytes(self) -> int:
        """Bytes of one tile: what a TMA load of it brings."""
        return self.rows * self.cols * self.dtype.width // 8

    def layout(self, stages=None):
        """The composed layout (swizzle and all) of one tile, or of a ring of them."""
        atom = warpgroup.make_smem_layout_atom(_KINDS[self.swizzle], self.dtype)
        shape = (self.rows, self.cols) if stages is None else (self.rows, self.cols, stages)
        order = (1, 0, 2) if self.row_groups else (0, 1, 2)
        return cute.tile_to_shape(atom, shape, order=order[:len(shape)])


@dataclass(frozen=True)
class SharedTile:
    """A ring of ``stages`` tiles in shared memory or, once indexed, one of them. A handle: nothing is copied."""

    staged: cute.Tensor  # (rows, cols, stages), the swizzle is in the pointer
    type: Constexpr[st]
    stage: Any = None

    def __getitem__(self, stage):
        """One tile of the ring. Raises: ValueError where a number that is known when compiled is beyond it."""
        if isinstance(stage, int) and not 0 <= stage < self.stages:
            raise ValueError(f"stage is {stage} of a ring of {self.type}, allowed are 0 to {self.stages - 1}")
        return replace(self, stage=stage)

    @property
    def tensor(self):
        """The CuTe tensor: (rows, cols) of one tile, (rows, cols, stages) of a ring."""
        return self.staged if self.stage is None else self.staged[None, None, self.stage]

    @property
    def stages(self):
        """How many tiles the ring has."""
        return cute.size(self.staged, mode=[2])

    def stacked(self, n):
        """The same memory as a ring of tiles ``n`` times as high. Only where a row is one swizzle panel wide."""
        if self.type.cols * self.type.dtype.width > 8 * self.type.swizzle:
            raise ValueError(f"stacked: {self.type} is wider than its swizzle of {self.type.swizzle} bytes")
        if n < 1 or self.stages % n:
            raise ValueError(f"stacked: n is {n}, allowed are divisors of the {self.stages} stages")
        high = st(self.type.rows * n, self.type.cols, self.type.dtype, self.type.swizzle)
        return SharedTile(cute.make_tensor(self.staged.iterator, high.layout(self.stages // n).outer), high)

    def panel(self, n):
        """The n-th columns of one tile, as many as its swizzle is wide (64 of 16 bits and 128 bytes): a tile, the same
        memory. n is known when compiled.

        Raises:
            TypeError: of a ring, or of a tile in groups of 8 rows. ValueError: n is beyond the tile."""
        width = 8 * self.type.swizzle // self.type.dtype.width
        count = self.type.cols // width
        if self.stage is None or self.type.row_groups:
            raise TypeError(f"panel: of a ring, or of {self.type}, allowed is one tile whose panels lie one by one")
        if not (isinstance(n, int) and 0 <= n < count):
            raise ValueError(f"panel: n is {n}, {self.type} allows 0 to {count - 1}")
        type = st(self.type.rows, width, self.type.dtype, self.type.swizzle)
        ring = cute.make_tensor(self.staged.iterator, type.layout(self.stages * count).outer)
        return SharedTile(ring, type, self.stage * count + n)

    def scratch(self, type):
        """The same memory as a ring of as many tiles of another type as fit: what was in it is of no use then."""
        stages = self.type.bytes * self.stages // type.bytes
        if stages < 1:
            raise ValueError(f"scratch: {self.stages} tiles of {self.type} have no room for {type}")
        layout = type.layout(stages)
        ptr = cute.recast_ptr(self.staged.iterator, layout.inner, dtype=type.dtype)
        return SharedTile(cute.make_tensor(ptr, layout.outer), type)

    @property
    def pairs(self):
        """An 8-bit tile as one of 16 bits, half as wide: for ldmatrix. A recast alone would lose the swizzle."""
        if self.type.dtype.width != 8:
            raise TypeError(f"pairs: the tile is {self.type}, allowed are 8-bit types")
        type = st(self.type.rows, self.type.cols // 2, BFloat16, self.type.swizzle, self.type.row_groups)
        layout = type.layout(self.stages)
        ptr = cute.recast_ptr(self.staged.iterator, layout.inner, dtype=BFloat16)
        return SharedTile(cute.make_tensor(ptr, layout.outer), type, self.stage)

    @property
    def staged_T(self):
        """(cols, rows, stages): the transpose, as a view."""
        rows, cols, stages = self.type.rows, self.type.cols, self.staged.shape[2]
        return cute.composition(self.staged, cute.make_ordered_layout((cols, rows, stages), order=(1, 0, 2)))


class SharedAllocator:
    """Hands out a block's shared memory, in the order of the calls. Every thread makes the same calls.

    Raises:
        ValueError: when traced, where all that was asked for is more than the 226 KB that a block can have. What
            alignment costs is not counted.
    """

    def __init__(self):
        begin_kernel()
        self.smem = SmemAllocator()
        self.bytes = 0

    def _take(self, what, n, dtype):
        self.bytes += n * dtype.width // 8
        if self.bytes > MOST_BYTES:
            raise ValueError(f"SharedAllocator: with {what} the block has {self.bytes} bytes of shared memory, allowed "
                             f"are {MOST_BYTES}")

    def tile(self, type: st, stages=1) -> SharedTile:
        """A ring of ``stages`` tiles."""
        self._take(f"{stages} tiles of {type}", stages * type.rows * type.cols, type.dtype)
        layout = type.layout(stages)
        return SharedTile(self.smem.allocate_tensor(type.dtype, layout.outer, ALIGNMENT, layout.inner), type)

    def vector(self, n, stages=1, dtype=Float32) -> cute.Tensor:
        """(n, stages) plain elements, aligned to 128 bytes: bulk copies reach it."""
        return self.allocate_tensor(dtype, cute.make_layout((n, stages)), 128)

    def semaphores(self, n=1) -> Semaphore:
        """``n`` semaphores, to be ``init``-ialised in ``init_block``."""
        return Semaphore(self.allocate_array(Int64, n, 8), Made("semaphores"))

    def pipe(self, stages, bytes, consumers, cluster=1, producers=1, copies=0) -> Pipe:
        """Full and empty semaphores for a ring of stages: see ``Pipe`` for the counts."""
        full, empty = self._pair("pipe", stages)
        return Pipe(full, empty, stages, bytes, consumers, cluster, producers, copies)

    def mailbox(self, fields, stages, consumers) -> Mailbox:
        """``fields`` ints a slot, from the producer warp to ``consumers`` warps."""
        slots = self.allocate_tensor(Int32, cute.make_layout((fields, stages)), 16)
        return Mailbox(slots, *self._pair("mailbox", stages), fields, stages, consumers)

    def _pair(self, by, stages):
        made = Made(by)
        return [Semaphore(self.allocate_array(Int64, stages, 8), made) for _ in range(2)]

    def allocate_tensor(self, element_type, layout, byte_alignment=1, swizzle=None):
        """As ``cutlass.memory.SmemAllocator``: for kernels that lay their memory out themselves."""
        n = cute.cosize(layout)
        self._take(f"a tensor of {n} {type_name(element_type)}", n, element_type)
        return self.smem.allocate_tensor(element_type, layout, byte_alignment=byte_alignment, swizzle=swizzle)

    def allocate_array(self, element_type, num_elems=1, byte_alignment=1):
        """As ``cutlass.memory.SmemAllocator``: a pointer."""
        self._take(f"an array of {num_elems} {type_name(element_type)}", num_elems, element_type)
        return self.smem.allocate_array(element_type, num_elems, byte_alignment=byte_alignment)
