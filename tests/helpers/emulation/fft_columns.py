"""The columns' kernels of `tkq.fft_conv` whose radix comes first, on a CPU: their own code for all threads of a
warpgroup at once, whose numbers are arrays of 128, with these names in place of the DSL's and of tiles. Operands are
rounded to fp16 as there; sums are float64."""
import functools
import math
from types import SimpleNamespace

import numpy

from tests.helpers.emulation.written import as_written
from tkq.convolution.fft import transform
from tkq.convolution.fft.long import radix_first, radix_first_back, steps
from tkq.convolution.fft.long.config import LongConfig
from tkq.convolution.fft.spec import COLUMN_SCALE, ROWS

THREADS = numpy.arange(128)
ROW, COL = THREADS // 32 * 16 + THREADS % 32 // 4, THREADS % 4 * 2


def half(x):
    return numpy.asarray(x, dtype=numpy.float64).astype(numpy.float16).astype(numpy.float64)


class Registers:
    """A number of each thread at each place; None in an index is all of a mode."""

    def __init__(self, shape):
        self.held = numpy.full((*shape, len(THREADS)), numpy.nan)

    def __getitem__(self, at):
        at = at if isinstance(at, tuple) else (at,)
        return self.held[tuple(slice(None) if i is None else i for i in at)]

    def __setitem__(self, at, value):
        self.held[at] = value


class RegTile:
    def __init__(self, cols, dtype=None):
        self.cols, self.narrow, self.rows_view = cols, dtype is not None, Registers((2, cols // 4))

    def matrix(self):
        found = numpy.empty((ROWS, self.cols))
        for r, i in numpy.ndindex(2, self.cols // 4):
            found[ROW + 8 * r, COL + 8 * (i // 2) + i % 2] = self.rows_view[r, i]
        return found

    def fill(self, matrix):
        for r, i in numpy.ndindex(2, self.cols // 4):
            value = matrix[ROW + 8 * r, COL + 8 * (i // 2) + i % 2]
            self.rows_view[r, i] = half(value) if self.narrow else value


def pair(cols, dtype=None):
    return SimpleNamespace(real=RegTile(cols, dtype), imag=RegTile(cols, dtype))


def complex_copy(dst, src):
    for of in ("real", "imag"):
        matrix = getattr(src, of).matrix()
        getattr(getattr(dst, "high", dst), of).fill(matrix)
        if hasattr(dst, "low"):
            getattr(dst.low, of).fill(matrix - half(matrix))


def product(transposed, accumulate, d, a, b):
    found = (a.T if transposed else a) @ b
    d.fill(found + d.matrix() if accumulate else found)


def put(tile, values, row, col, rest=False):
    for e, x in enumerate(values):
        tile[row, col + e] = half(x - half(x)) if rest else half(x)


def turn(i, n):
    angle = 2 * math.pi * numpy.asarray(i, dtype=numpy.float64) / n
    return numpy.cos(angle), numpy.sin(angle)


def load_run(values, sequences, g, at):
    token = at[2]
    for e in range(len(values)):
        values[e] = numpy.where(token + e < len(g.x), g.x[numpy.minimum(token + e, len(g.x) - 1)], 0)


def autovec_copy(src, dst):
    dst[...] = src


TK = SimpleNamespace(
    thread_in_warpgroup=lambda: THREADS, first_row=lambda: ROW, first_col=lambda: COL, WARPGROUP=128, pair=pair,
    split_pair=lambda cols: SimpleNamespace(high=pair(cols, "fp16"), low=pair(cols, "fp16")), rt=RegTile,
    mma_wait=lambda: None, sync=lambda *barrier: None, complex_copy=complex_copy,
    store=lambda tile, x: tile.__setitem__(..., half(x.matrix())),
    **{f"{name}_{kind}": functools.partial(product, kind == "AtB", name == "mma")
       for name in ("mm", "mma") for kind in ("AB", "AtB")})
NAMES = dict(
    tk=TK, Float32=lambda x: x, load_run=load_run, put_run=put, put_rest=functools.partial(put, rest=True),
    cutlass=SimpleNamespace(range_constexpr=range, select_=numpy.where), turn=turn, exact_root=turn,
    power_of=lambda e: 2.0 ** numpy.asarray(e, dtype=numpy.float64),
    cute=SimpleNamespace(make_rmem_tensor=lambda shape, dtype: Registers(shape), autovec_copy=autovec_copy),
    vectors=SimpleNamespace(run_at=lambda x, at, n: numpy.stack([x[at[2], at[3] + e] for e in range(n)])))


def instead_of_the_dsl(monkeypatch):
    for module in (radix_first, radix_first_back, steps, transform):
        for name, value in NAMES.items():
            if hasattr(module, name):
                monkeypatch.setattr(module, name, value)


def left_factors(quarter, split):
    """Tiles as `Tables.fill_rows` fills them."""
    m, k = numpy.arange(ROWS)[:, None], numpy.arange(ROWS)
    c, s = (COLUMN_SCALE * x for x in turn((4 * m - quarter) * k, 4 * ROWS))
    tiles = [c, -s] if quarter else [c, -s, s, c]
    return [half(x) for x in tiles] + [half(x - half(x)) for x in tiles] * split


def steps_of(spec, points):
    r = 4 * numpy.arange(spec.rows) - 1
    one, eight = turn(r, 4 * points), turn(8 * r, 4 * points)
    found = Registers.__new__(Registers)
    found.held = numpy.stack([one[0], -one[1], eight[0], -eight[1]])
    return found


def columns(x, spec, points):
    """(planes, R, N2) as `RadixFirstColumns` leaves them, of a sequence that needs no scale."""
    kernel, across = radix_first.RadixFirstColumns(spec, LongConfig()), points // spec.rows
    g = SimpleNamespace(x=x, points=points)
    s = radix_first.Shared(left_factors(0, spec.split), steps_of(spec, points), None)
    found = numpy.empty((spec.planes, spec.rows, across))
    for col0 in range(0, across, spec.cols):
        tiles = [numpy.full((ROWS, spec.cols), numpy.nan) for _ in range(spec.planes * spec.radix)]
        for i in range(steps.parts_of(spec.cols, spec.each)):
            kernel.put(g, tiles, (0, 0, col0, 1.0, True), i)
        for q in range(spec.radix):
            of = tiles[spec.planes * q:spec.planes * (q + 1)]
            as_written(kernel.product)(kernel, g, s, of, (q, col0, 1))
            found[:, ROWS * q:ROWS * (q + 1), col0:col0 + spec.cols] = of
    return found


def back(x, exponents, spec, points):
    """(R, N2) as `RadixFirstBack` has them in accumulators, of planes x; not scaled but by 2^exponents."""
    kernel, across = radix_first_back.RadixFirstBack(spec, LongConfig()), points // spec.rows
    shape = SimpleNamespace(shape=(1, 1, spec.planes, points), flat=x.reshape(spec.planes, points))
    g = SimpleNamespace(x=Planes(shape), exponents=exponents[None])
    s = radix_first_back.Shared(left_factors(1, spec.split), steps_of(spec, points), None)
    found = numpy.empty((spec.rows, across))
    for col0 in range(0, across, spec.cols):
        tiles = [numpy.full((ROWS, spec.cols), numpy.nan) for _ in range(spec.planes * spec.radix)]
        for i in range(steps.parts_of(spec.cols, spec.each)):
            kernel.put(g, s, (0, 0, exponents.max(), col0, tiles), i)
        for a in range(spec.radix):
            result = RegTile(spec.cols)
            kernel.transform.left_back(result, s.rows, tiles[spec.planes * a:spec.planes * (a + 1)], 0)
            found[a::spec.radix, col0:col0 + spec.cols] = result.matrix()
    return found


class Planes:
    """x[plane, point], with the shape of the kernel's tensor."""

    def __init__(self, of):
        self.shape, self.flat = of.shape, of.flat

    def __getitem__(self, at):
        return self.flat[at]
