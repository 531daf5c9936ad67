"""What the test kernels share. Register tiles are read and written element by element, in their documented order."""
import cuda.bindings.driver as cuda
import cutlass
import cutlass.cute as cute
from cutlass.cute.runtime import make_fake_tensor

import tkq.tile as tk


def tensor(name, *shape, divisor=16):
    """A fake row-major tensor. A size is an int, or a symbol (``sym``); strides not known are multiples of divisor."""
    strides, step = [], 1
    for extent in reversed(shape):
        strides.append(step)
        known = isinstance(step, int) and isinstance(extent, int)
        step = step * extent if known else cute.sym_int64(divisibility=divisor)
    return make_fake_tensor(tk.element_type(name), shape, tuple(reversed(strides)), assumed_align=16)


def any_strides(name, rows, cols):
    """A fake (rows, cols) of which nothing else is known, not even its alignment."""
    dtype = tk.element_type(name)
    return make_fake_tensor(dtype, (rows, cols), (cute.sym_int64(), cute.sym_int64()), assumed_align=dtype.width // 8)


def sym(divisibility=1):
    return cute.sym_int(divisibility=divisibility)


class OneBlock:
    """``body(*tensors)`` by one block of ``threads`` threads."""

    def __init__(self, body, threads=128):
        self.body, self.threads = body, threads

    @cute.jit
    def __call__(self, first: cute.Tensor, others, stream: cuda.CUstream):
        """others: the tensors behind the first, which says on which GPU this runs; or None."""
        self.kernel(_all(first, others)).launch(grid=[1, 1, 1], block=[self.threads, 1, 1], stream=stream,
                                                min_blocks_per_mp=1)

    @cute.kernel
    def kernel(self, tensors: tuple):
        self.body(*tensors)


def _all(first, others):
    return (first,) if others is None else (first, *others)


def one_block(body, tensors, threads=128):
    """What a builder of a `OneBlock` returns."""
    return OneBlock(body, threads), (tensors[0], tensors[1:] or None)


def get(tile, src, row0=0):
    """tile = src[row0 :], plain loads; src (.., cols)."""
    view = tile.rows_view
    for r in range(2):
        for j in range(tile.cols // 4):
            view[r, j] = tile.dtype(src[row0 + tk.first_row() + 8 * r, tk.first_col() + 8 * (j // 2) + j % 2])


def put(dst, tile, row0=0):
    """dst[row0 :] = tile, plain stores."""
    view = tile.rows_view
    for r in range(2):
        for j in range(tile.cols // 4):
            dst[row0 + tk.first_row() + 8 * r, tk.first_col() + 8 * (j // 2) + j % 2] = dst.element_type(view[r, j])


@cute.jit
def put_rows(dst, v):
    """Every thread stores its two rows' values in its own column of dst (64, 4)."""
    for r in cutlass.range_constexpr(2):
        dst[tk.first_row() + 8 * r, tk.lane_id() % 4] = v.tensor[r]
