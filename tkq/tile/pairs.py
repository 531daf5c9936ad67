"""Complex register tiles, as pairs of real ones: products with a complex matrix on the tensor cores, products element
by element with factors in shared memory, sums of such products.

A pair is two register tiles of the same shape, the real and the imaginary parts. As everywhere a warpgroup has it, what
is written is named first, and wgmma's results are there after ``mma_wait``. No operation transposes a pair: products
take shared tiles transposed (``mm_AtB``, ``mm_ABt``), and parts are tiles that ``store_T`` and ``load_T`` take.

Where 16 bits of an operand are not enough, it is the sum of two: a split pair has a high part, the rounded number, and
a low part, what rounding left off, rounded. A product of two such operands is three of their parts; low ones are not
multiplied by each other. fp16 parts keep 22 bits.
"""
from dataclasses import dataclass

import cutlass.cute as cute
from cutlass import Float16, Float32, Int32

from .block import thread_in_warpgroup
from .dtypes import HALF
from .maps import _cvt2, copy, element
from .mma import mm_AB, mma_AB
from .register import RegTile, RowVec, first_col, first_row, rt
from .shared import SharedTile
from .sync import WARPGROUP


@dataclass(frozen=True)
class Pair:
    """A complex tile of 64 x cols in registers."""

    real: RegTile
    imag: RegTile

    @property
    def cols(self):
        """Columns of each part."""
        return self.real.cols

    @property
    def dtype(self):
        """Of each part."""
        return self.real.dtype

    def __str__(self):
        return f"a pair of {self.real}"


@dataclass(frozen=True)
class SharedPair:
    """A complex matrix in shared memory. minus: its imaginary part times -1, where products need it."""

    real: SharedTile
    imag: SharedTile
    minus: SharedTile


@dataclass(frozen=True)
class SplitPair:
    """A complex tile in registers as the sum of two pairs of 16 bits."""

    high: Pair
    low: Pair

    @property
    def cols(self):
        """Columns of each part."""
        return self.high.cols

    @property
    def dtype(self):
        """Of each part."""
        return self.high.dtype

    def __str__(self):
        return f"a split pair of {self.high.real}"


@dataclass(frozen=True)
class SplitSharedPair:
    """A complex matrix in shared memory as the sum of two."""

    high: SharedPair
    low: SharedPair


def pair(cols, dtype=Float32) -> Pair:
    """A complex register tile, uninitialised: see ``rt`` for cols and dtype."""
    return Pair(rt(cols, dtype), rt(cols, dtype))


def split_pair(cols, dtype=Float16) -> SplitPair:
    """A complex register tile of two parts of bf16 or fp16, uninitialised."""
    return SplitPair(pair(cols, dtype), pair(cols, dtype))


def _pair(what, name, x, *dtypes):
    allowed = (Pair, SplitPair) if dtypes == HALF else Pair
    if not isinstance(x, allowed) or x.dtype not in dtypes:
        names = ", ".join(str(t.__name__) for t in dtypes)
        raise TypeError(f"{what}: operand {name} is {x}, allowed is a pair of register tiles of {names}")


def complex_mm_AB(d: Pair, a: Pair, b: SharedPair):
    """d = a @ b, complex; d: fp32; a: a pair of bf16 or fp16; b: of the same type, (a.cols, d.cols). Or both split.

    Four real products, of split operands twelve. A warpgroup together; d is there after ``mma_wait``."""
    _pair("complex_mm_AB", "d", d, Float32)
    _pair("complex_mm_AB", "a", a, *HALF)
    wanted = SplitSharedPair if isinstance(a, SplitPair) else SharedPair
    if not isinstance(b, wanted):
        raise TypeError(f"complex_mm_AB: operand b is {b}, allowed is a {wanted.__name__}")
    for n, (x, y) in enumerate(_terms(a, b)):
        product = mma_AB if n else mm_AB
        product(d.real, x.real, y.real)
        product(d.imag, x.real, y.imag)
        mma_AB(d.real, x.imag, y.minus)
        mma_AB(d.imag, x.imag, y.real)


def _terms(a, b):
    """The products that make one, small ones first: sums are rounded to the size that they have so far."""
    return [(a.low, b.high), (a.high, b.low), (a.high, b.high)] if isinstance(a, SplitPair) else [(a, b)]


def _put(dst, i, found):
    """Two neighbours, (real, imaginary part) each, are dst's i-th two, rounded."""
    parts = [[x[of] for x in found] for of in range(2)]
    if not isinstance(dst, SplitPair):
        for to, (x, y) in zip((dst.real, dst.imag), parts):
            cute.recast_tensor(to.tensor, Int32)[i] = _cvt2(x, y, dst.dtype)
        return
    for high, low, (x, y) in zip((dst.high.real, dst.high.imag), (dst.low.real, dst.low.imag), parts):
        cute.recast_tensor(high.tensor, Int32)[i] = _cvt2(x, y, dst.dtype)
        left = x - element(high, 2 * i), y - element(high, 2 * i + 1)
        cute.recast_tensor(low.tensor, Int32)[i] = _cvt2(*left, dst.dtype)


def factors(threads, cols, *leading):
    """The layout of a table of complex factors for pairs of ``cols`` columns, one for each element: four fp32 (two
    neighbours' real and imaginary parts) by thread of a warpgroup by two elements. 16 bytes a thread, which neither
    conflict nor straddle. See ``factor_place``."""
    return cute.make_layout((4, threads, cols // 4, *leading))


def factor_place(i):
    """(row, column) of the first of a thread's two elements ``i``, of which a table has ``cols // 4``."""
    return first_row() + 8 * (i % 2), first_col() + 8 * (i // 2)


def _table(what, table, cols, *dtypes):
    if not isinstance(table, cute.Tensor) or table.element_type not in dtypes or (
            tuple(table.shape) != (4, WARPGROUP, cols // 4)):
        names = ", ".join(t.__name__ for t in dtypes)
        raise ValueError(f"{what}: the table is {table}, allowed are {names} of shape {(4, WARPGROUP, cols // 4)}")


def _four(table, i):
    """(real, imaginary part) of two neighbours, fp32. A table of 16 bits has the real parts first."""
    four = cute.make_rmem_tensor((4,), table.element_type)
    cute.autovec_copy(table[None, thread_in_warpgroup(), i], four)
    order = (0, 1, 2, 3) if table.element_type is Float32 else (0, 2, 1, 3)
    return [Float32(four[j]) for j in order]


def narrow_four(four, dtype):
    """Real and imaginary parts of two neighbours, fp32, as a table of 16 bits has them."""
    narrow = cute.make_rmem_tensor((4,), dtype)
    words = cute.recast_tensor(narrow, Int32)
    words[0], words[1] = _cvt2(four[0], four[2], dtype), _cvt2(four[1], four[3], dtype)
    return narrow


def complex_mul_narrow(dst: Pair, a: Pair, table: cute.Tensor, conjugate=False):
    """dst = a * table, element by element, rounded to dst's bf16 or fp16, or split; conjugate: the product's conjugate.

    a: fp32, as wide as dst. table: fp32 of the layout ``factors``. Each thread, its own elements."""
    _pair("complex_mul_narrow", "dst", dst, *HALF)
    _pair("complex_mul_narrow", "a", a, Float32)
    if a.cols != dst.cols:
        raise ValueError(f"complex_mul_narrow: operand a is {a}, dst is {dst}")
    _table("complex_mul_narrow", table, a.cols, Float32)
    for i in range(a.cols // 4):
        four, found = _four(table, i), []
        for e in range(2):
            x, y = element(a.real, 2 * i + e), element(a.imag, 2 * i + e)
            found.append(_times(x, y, four[2 * e], four[2 * e + 1], conjugate))
        _put(dst, i, found)


def _times(x, y, c, s, conjugate):
    """(x + iy) (c + is), or its conjugate."""
    real, imag = x * c - y * s, x * s + y * c
    return real, -imag if conjugate else imag


def powers(threads):
    """The layout of factors z(i)^j of element (i, j) of a pair, z(i) complex numbers of length 1, three times four fp32
    by thread of a warpgroup: the first ones, of two rows and two columns, and the steps from 8 columns to the next. In
    shared memory, from where they are read for each product: in registers the compiler makes all powers of them, once
    and for all, and has no room for those."""
    return cute.make_layout((4, threads, 3))


def fill_powers(table: cute.Tensor, root):
    """root(i, j): (real, imaginary part) of z(i)^j, for a row and a column at run time. A warpgroup together; others
    see them after a barrier."""
    for n in range(3):
        four = cute.make_rmem_tensor((4,), Float32)
        for e in range(2):
            at = (first_row() + 8 * n, first_col() + e) if n < 2 else (first_row() + 8 * e, 8)
            four[2 * e], four[2 * e + 1] = root(*at)
        cute.autovec_copy(four, table[None, thread_in_warpgroup(), n])


def complex_mul_powers(dst: Pair, a: Pair, table: cute.Tensor, conjugate=False):
    """dst = a * factors, element by element, rounded to dst's bf16 or fp16, or split; conjugate: the conjugate of the
    product.

    a: fp32, as wide as dst. table: as ``powers`` lays it out. Four products more for each element than of a table of
    all factors. Eight columns on a factor is the last one times the step: errors of fp32 grow with their number. Each
    thread, its own elements."""
    _pair("complex_mul_powers", "dst", dst, *HALF)
    _pair("complex_mul_powers", "a", a, Float32)
    if not isinstance(table, cute.Tensor) or tuple(table.shape) != (4, WARPGROUP, 3):
        raise ValueError(f"complex_mul_powers: the table is {table}, allowed is fp32 of shape {(4, WARPGROUP, 3)}")
    if a.cols != dst.cols:
        raise ValueError(f"complex_mul_powers: operand a is {a}, dst is {dst}")
    fours = [_four(table, n) for n in range(3)]
    here, step = ([[(four[0], four[1]), (four[2], four[3])] for four in part] for part in (fours[:2], fours[2:]))
    for i in range(a.cols // 4):
        r, found = i % 2, []
        for e in range(2):
            x, y = element(a.real, 2 * i + e), element(a.imag, 2 * i + e)
            found.append(_times(x, y, *here[r][e], conjugate))
            here[r][e] = _times(*here[r][e], *step[0][r], False)
        _put(dst, i, found)


def complex_fma_conj(d: Pair, a, b: Pair, v: RowVec):
    """d[i, j] += v[i] * conj(a[i, j]) * b[i, j], fp32; a: a pair, also of bf16 or fp16, or a table of the layout
    ``factors``. Each thread, its own elements."""
    _pair("complex_fma_conj", "d", d, Float32)
    from_table = isinstance(a, cute.Tensor)
    if from_table:
        _table("complex_fma_conj", a, d.cols, Float32, *HALF)
    else:
        _pair("complex_fma_conj", "a", a, Float32, *HALF)
    _pair("complex_fma_conj", "b", b, Float32)
    if not isinstance(v, RowVec):
        raise TypeError(f"complex_fma_conj: operand v is {v}, allowed is a row vector (rv)")
    if b.cols != d.cols or (not from_table and a.cols != d.cols):
        raise ValueError(f"complex_fma_conj: operand a is {a}, b is {b}, d is {d}")
    four = None
    for i in range(d.cols // 2):
        if from_table:
            four = four if i % 2 else _four(a, i // 2)
            x, y = four[2 * (i % 2):2 * (i % 2) + 2]
            c, s = element(b.real, i), element(b.imag, i)
        else:
            x, y, c, s = (element(t, i) for t in (a.real, a.imag, b.real, b.imag))
        by = element(v, i)
        d.real.tensor[i] = d.real.tensor[i] + by * (x * c + y * s)
        d.imag.tensor[i] = d.imag.tensor[i] + by * (x * s - y * c)


def complex_to_table(table: cute.Tensor, a: Pair, accumulate=False):
    """table = a, or += a: fp32 or, rounded, bf16 or fp16 of the layout ``factors``. Each thread, its own elements."""
    _pair("complex_to_table", "a", a, Float32)
    _table("complex_to_table", table, a.cols, Float32, *HALF)
    for i in range(a.cols // 4):
        four = [element(x, 2 * i + e) for e in range(2) for x in (a.real, a.imag)]
        if accumulate:
            four = [x + y for x, y in zip(four, _four(table, i), strict=True)]
        if table.element_type is Float32:
            held = cute.make_rmem_tensor((4,), Float32)
            for e in range(4):
                held[e] = four[e]
        else:
            held = narrow_four(four, table.element_type)
        cute.autovec_copy(held, table[None, thread_in_warpgroup(), i])


def complex_mul_table(d: Pair, a, table: cute.Tensor, accumulate=False):
    """d = a * table, or d += a * table, element by element, fp32.

    a: a pair, d itself too, or a table. Tables: fp32, bf16 or fp16 of the layout ``factors``. Each thread, its own
    elements."""
    _pair("complex_mul_table", "d", d, Float32)
    _table("complex_mul_table", table, d.cols, Float32, *HALF)
    if not isinstance(a, Pair):
        _table("complex_mul_table", a, d.cols, Float32, *HALF)
    elif a.cols != d.cols:
        raise ValueError(f"complex_mul_table: operand a is {a}, d is {d}")
    for i in range(d.cols // 4):
        by, from_table = _four(table, i), None if isinstance(a, Pair) else _four(a, i)
        for e in range(2):
            at = 2 * i + e
            x, y = (element(a.real, at), element(a.imag, at)) if from_table is None else from_table[2 * e:2 * e + 2]
            real, imag = _times(x, y, *by[2 * e:2 * e + 2], False)
            d.real.tensor[at] = d.real.tensor[at] + real if accumulate else real
            d.imag.tensor[at] = d.imag.tensor[at] + imag if accumulate else imag


def complex_copy(dst: Pair, src: Pair, conjugate=False):
    """dst = src, or its conjugate; of the same type, or from fp32 to bf16 or fp16, or split. Each thread, its own
    elements."""
    if isinstance(dst, SplitPair):
        _pair("complex_copy", "src", src, Float32)
        for i in range(dst.cols // 4):
            two = [(element(src.real, 2 * i + e), element(src.imag, 2 * i + e)) for e in range(2)]
            _put(dst, i, [(x, -y if conjugate else y) for x, y in two])
        return
    copy(dst.real, src.real)
    if not conjugate:
        copy(dst.imag, src.imag)
        return
    _pair("complex_copy", "dst", dst, *HALF)
    words = cute.recast_tensor(dst.imag.tensor, Int32)
    for i in range(dst.cols // 4):
        words[i] = _cvt2(-element(src.imag, 2 * i), -element(src.imag, 2 * i + 1), dst.dtype)
