"""Global tensors seen in another way, so that TMA moves what a plain tensor would not let it. In the host function.

Both take x of (rows, cols, depth [, batch]) and may be combined: ``packed(ragged(x), n)``.
"""
import cutlass.cute as cute


def packed(x: cute.Tensor, n: int) -> cute.Tensor:
    """((n, rows), cols, depth / n, ..): ``n`` neighbours in depth, row by row between each other.

    A tile then has ``rows / n`` rows of each of them; n divides the tile's rows and x's depth. n = 1: x itself."""
    if n == 1:
        return x
    (rows, cols, depth, *rest), (row, col, step, *others) = x.shape, x.stride
    return cute.make_tensor(x.iterator, cute.make_layout(
        ((n, rows), cols, depth // n, *rest), stride=((step, row), col, step * n, *others)))


def ragged(x: cute.Tensor) -> cute.Tensor:
    """(rows, cols, depth, rows + 1), of x (rows, cols, depth): for ``gl.part``, pieces of the rows that TMA clips.

    TMA compares each coordinate with the tensor's extent, and nothing else. Here a row's place in memory is the sum of
    two coordinates, less ``rows``: where the piece ends, and rows - size + r, which reaches the extent where r reaches
    the piece's size. (Triton's ragged descriptors, and QuACK's, use the same property.)"""
    rows, row = x.shape[0], x.stride[0]
    base = cute.domain_offset((-rows, 0, 0), x).iterator.align(16)  # a row is a multiple of 16 bytes
    return cute.make_tensor(base, cute.make_layout((*x.shape, rows + 1), stride=(*x.stride, row)))
