"""Thread-value layouts: which thread of a block holds which elements of its tile."""
from dataclasses import dataclass
from typing import Any

from ..runtime.compile import build
from .grid import LEFT_OUT, Cell, Grid, chosen, whole


def traced(f):
    """What f() gives where layouts of the DSL can be made: inside a trace of an empty host function. No GPU is needed.

    Raises: whatever f does."""
    import cutlass.cute as cute

    found = []

    @cute.jit
    def nothing():
        found.append(f())

    with build._one_at_a_time:
        cute.compile(nothing, options=f"--gpu-arch {build.keys.TARGET}")
    return found[0]


def plain(x):
    """A shape or a stride as Python's ints, in tuples as it was."""
    return tuple(map(plain, x)) if isinstance(x, tuple) else int(x)


def offset(i: int, shape, stride) -> int:
    """Where the i-th element of a mode is: coordinates count up from the left, as CuTe's do."""
    if not isinstance(shape, tuple):
        return i * stride
    total = 0
    for extent, step in zip(shape, stride):
        n = size(extent)
        total += offset(i % n, extent, step)
        i //= n
    return total


def size(shape) -> int:
    n = 1
    for extent in shape if isinstance(shape, tuple) else ():
        n *= size(extent)
    return n if isinstance(shape, tuple) else shape


@dataclass(frozen=True)
class TVLayout:
    """rows, cols: of the tile. shape, stride: of the map from (thread, value) to an element of the tile, counted down
    its columns."""

    rows: int
    cols: int
    shape: tuple
    stride: tuple

    @property
    def threads(self) -> int:
        return size(self.shape[0])

    @property
    def values(self) -> int:
        return size(self.shape[1])

    def place(self, thread: int, value: int) -> tuple:
        """(row, column) of the element."""
        at = offset(thread, self.shape[0], self.stride[0]) + offset(value, self.shape[1], self.stride[1])
        return at % self.rows, at // self.rows

    def owners(self) -> dict:
        """{(row, column): (thread, value)}"""
        return {self.place(t, v): (t, v) for t in range(self.threads) for v in range(self.values)}

    @property
    def vector(self) -> int:
        """Values in a row that are neighbours in memory, for each thread: one access."""
        n = 1
        row, col = self.place(0, 0)
        while n < self.values and self.place(0, n) == (row, col + n):
            n += 1
        return n


@dataclass(frozen=True)
class TVPicture(Grid):
    """A ``Grid`` whose cells are accesses: neighbouring values of one thread. layout: all of it."""

    layout: Any = None


def tv_layout(kernel, rows: int = 8, columns: int = 14, copy_bits: int | None = None) -> TVPicture:
    """A picture of the thread-value layout of a kernel of ``ReductionBase``: a cell is one access, with its thread and
    which of the thread's values it holds; colours are threads.

    Args:
        kernel: an instance of a subclass of ReductionBase, as it is compiled: ``Softmax(BFloat16, 4096)``.
        rows, columns: how many are drawn at most; what is left out is marked.
        copy_bits: of the widest access; without, the kernel's own.
    Raises:
        TypeError: kernel has no thread-value layout; rows, columns or copy_bits is no int.
        ValueError: rows or columns is below 1; copy_bits is none of 16, 32, 64 and 128, or fewer than an element has.

    Example::

        from cutlass import BFloat16

        print(viz.tv_layout(tkq.ReductionBase(BFloat16, 1000, stage=1)))
    """
    if isinstance(kernel, type) or not hasattr(kernel, "_get_tv_layout"):
        raise TypeError(f"tv_layout: kernel is {kernel!r}, allowed are instances of subclasses of ReductionBase")
    whole("tv_layout: rows", rows)
    whole("tv_layout: columns", columns)
    if copy_bits is not None:
        whole("tv_layout: copy_bits", copy_bits)
        if copy_bits not in (16, 32, 64, 128) or copy_bits < kernel.dtype.width:
            raise ValueError(f"tv_layout: copy_bits is {copy_bits}, allowed are 16, 32, 64 and 128, from "
                             f"{kernel.dtype.width} on")
    bits = copy_bits or _copy_bits(kernel)
    layout, cluster = traced(lambda: _layout_of(kernel, bits))
    row_threads = size(layout.shape[0][0]) if isinstance(layout.shape[0], tuple) else layout.threads
    vector, width = layout.vector, kernel.dtype.width
    shown_rows = chosen(layout.rows, rows)
    shown = chosen(layout.cols // vector, columns, also=(row_threads,))
    owners, cells = layout.owners(), {}
    for i, row in enumerate(shown_rows):
        for j, access in enumerate(shown):
            if row is not None and access is not None:
                thread, value = owners[row, access * vector]
                past = cluster == 1 and access * vector >= kernel.N
                cells[i, j] = Cell((f"T{thread}", _span("V", value, vector)), None if past else thread)
    notes = [f"{layout.threads} threads, {row_threads} to a row: {layout.rows} rows at a time. Each thread has "
             f"{layout.values} values, in {layout.values // vector} accesses of {vector * width // 8} bytes."]
    if cluster > 1:
        notes.append(f"A row belongs to a cluster of {cluster} blocks, each of which has {layout.cols} columns of it.")
    if layout.cols * cluster > kernel.N:
        notes.append(f"The row has {kernel.N} columns: accesses past its end (grey) are predicated off.")
    return TVPicture(
        title=f"{type(kernel).__name__}: a block's tile of {layout.rows} x {layout.cols}, N = {kernel.N}",
        columns=tuple(LEFT_OUT if a is None else _span("", a * vector, vector) for a in shown),
        rows=tuple(LEFT_OUT if r is None else f"row {r}" for r in shown_rows),
        cells=cells, notes=tuple(notes), layout=layout)


def _copy_bits(kernel) -> int:
    """As the kernel's own host function asks for its layout."""
    holder = kernel if hasattr(kernel, "vector") else getattr(kernel, "spec", None)
    vector = getattr(holder, "vector", None)
    return kernel.copy_bits if vector is None else vector * kernel.dtype.width


def _layout_of(kernel, bits):
    """(TVLayout, blocks of a cluster). Inside a trace."""
    kernel._set_cluster_n()
    (rows, cols), tv = kernel._get_tv_layout(bits)
    return TVLayout(int(rows), int(cols), plain(tv.shape), plain(tv.stride)), kernel.cluster_n


def _span(letter: str, first: int, n: int) -> str:
    return f"{letter}{first}" if n == 1 else f"{letter}{first}-{first + n - 1}"
