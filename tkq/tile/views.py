"""Global tensors seen in another way, so that TMA moves what a plain tensor would not let it. In the host function.

They may be combined: ``packed(ragged_store(x), n)``. A tensor without a depth is given one of 1 first.
"""
import cutlass.cute as cute
from cutlass import Int32, Int64


def packed(x: cute.Tensor, n: int) -> cute.Tensor:
    """((n, rows), cols, depth / n, ..): ``n`` neighbours in depth, row by row between each other; of x (rows, cols,
    depth [, batch]).

    A tile then has ``rows / n`` rows of each of them; n divides the tile's rows and x's depth. n = 1: x itself.

    Raises:
        ValueError: another rank, or a depth known when compiled that n does not divide. One known only at run time is
            the caller's to check.
    """
    _rank("packed", x, 3, 4)
    depth = x.shape[2]
    if not isinstance(n, int) or n < 1 or (isinstance(depth, int) and depth % n):
        known = depth if isinstance(depth, int) else "known at run time"
        raise ValueError(f"packed: n is {n}, x's depth is {known}, allowed are divisors of it, known when compiled")
    if n == 1:
        return x
    (rows, cols, depth, *rest), (row, col, step, *others) = x.shape, x.stride
    return cute.make_tensor(x.iterator, cute.make_layout(
        ((n, rows), cols, depth // n, *rest), stride=((step, row), col, step * n, *others)))


PIECE = 1 << 30  # the extent of a ragged tensor's rows


def ragged(x: cute.Tensor) -> cute.Tensor:
    """(2^30, cols, depth, (rows + 1, 2^30 + 1)), of x (rows, cols, depth): for ``gl.part``, pieces of the rows that TMA
    clips.

    TMA compares each coordinate with the tensor's extent, and nothing else. Here a row's place in memory is the sum of
    three coordinates: where the piece ends; 2^30 - size + r, which reaches the extent where r reaches the piece's size;
    and 2^30 steps that take those 2^30 rows off again, because addresses wrap around at 2^64. (Triton's ragged
    descriptors use the same property.)"""
    _rank("ragged", x, 3)
    row, unit = _row_stride(x)
    back = cute.assume(Int64(1 << 34) - row, divby=unit)
    return cute.make_tensor(x.iterator, cute.make_layout(
        (PIECE, *x.shape[1:], (x.shape[0] + 1, PIECE + 1)), stride=(row, *x.stride[1:], (row, back))))


def ragged_store(x: cute.Tensor) -> cute.Tensor:
    """As ``ragged``, of x (rows, cols, depth), with a dimension less, so that it can be ``packed``; for ``gl.store``
    and ``gl.add`` alone.

    The tensor begins ``rows`` rows before x, where there may be no memory. Stores touch what is inside and nothing
    else. Loads also read where the tensor begins, whatever their coordinates: in front of x an illegal access."""
    _rank("ragged_store", x, 3)
    rows, (row, _) = x.shape[0], _row_stride(x)
    base = (x.iterator - Int64(rows) * row).align(16)
    return cute.make_tensor(base, cute.make_layout((*x.shape, rows + 1), stride=(row, *x.stride[1:], row)))


GROUP = 8  # rows, after which the swizzle repeats


def row_groups(x: cute.Tensor, panel: int) -> cute.Tensor:
    """((8, groups), (panel, cols / panel), depth), of x (rows, cols, depth, pages), for tiles in groups of 8 rows: the
    rows of all pages, of which one copy brings any multiple of 8 with all columns. Page i begins with group
    ``i * groups_apart(x)``.

    Pages have a multiple of 8 rows, and are a multiple of 8 rows apart: both are the caller's to check.

    Raises:
        ValueError: another rank, or columns that are not panels, known when compiled.
    """
    _rank("row_groups", x, 4)
    (rows, cols, depth, pages), (row, _, step, _) = x.shape, x.stride
    if not isinstance(cols, int) or cols % panel:
        raise ValueError(f"row_groups: x has {cols} columns, allowed are multiples of {panel}, known when compiled")
    groups = (pages - 1) * groups_apart(x) + rows // GROUP
    return cute.make_tensor(x.iterator, cute.make_layout(
        ((GROUP, groups), (panel, cols // panel), depth), stride=((row, row * GROUP), (1, panel), step)))


def groups_apart(x: cute.Tensor):
    """Groups of 8 rows from a page to the next, of x as ``row_groups`` takes it."""
    return Int32(Int64(x.stride[3]) // (Int64(x.stride[0]) * GROUP))


def _rank(what, x, *allowed):
    if cute.rank(x) not in allowed:
        raise ValueError(f"{what}: x has {cute.rank(x)} dimensions, allowed are {' and '.join(map(str, allowed))}")


def _row_stride(x: cute.Tensor) -> tuple:
    """(elements from a row to the next, those of 16 bytes, of which it is a multiple). Where there is one row alone its
    stride may be any number: TMA would round it off, and a sum with other strides another way."""
    unit = 128 // x.element_type.width
    return cute.assume(Int64(x.stride[0]) // unit * unit, divby=unit), unit
