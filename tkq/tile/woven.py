"""Complex register tiles of 64 columns whose transforms along a row are two of 32 points, and factors between them.

Of a pair of 64 columns the sums and the differences of columns 32 apart are transformed each by itself: even
frequencies are the transform of the sums, odd ones that of the differences, with the factors that these need in the
matrix. A complex product of 32 points is one real product of 64: the real and the imaginary parts side by side, by a
matrix of four blocks, ((c, s), (-s, c)). A pair in that order is *woven*: `real` has the sums or even frequencies,
`imag` the differences or odd ones, columns 0 to 31 of each the real parts, 32 to 63 the imaginary ones.

Factors of tables are fp16, and so is all that is reckoned with them, two numbers an instruction; or both are fp32, and
results are rounded once. Each thread, its own elements, throughout.
"""
import cutlass.cute as cute
from cutlass import Float16, Float32, Int32
from cutlass.cutlass_dsl import T, dsl_user_op

from .assembly import ptx
from .block import thread_in_warpgroup
from .maps import _cvt2
from .pairs import Pair, factors
from .register import RowVec
from .sync import WARPGROUP

COLS = 64
WORDS = COLS // 4  # of two neighbours, that a thread has of a tile
FAR = WORDS // 2  # from a word to that of 32 columns on


def woven_factors(dtype, *leading):
    """The layout of a table of complex factors, one for each element of a pair of 64 columns, of a warpgroup's threads.
    fp32: as ``factors``. fp16: four numbers (two neighbours' real parts, their imaginary parts) by thread by two
    elements, in the order of ``factor_place``; what a thread has of its two rows is 16 bytes."""
    if dtype is Float32:
        return factors(WARPGROUP, COLS, *leading)
    strides, size = [], WARPGROUP * COLS
    for n in leading:
        strides.append(size)
        size *= n
    return cute.make_layout((4, WARPGROUP, (2, WORDS // 2), *leading), stride=(1, 8, (4, 8 * WARPGROUP), *strides))


@dsl_user_op
def _half2(text, *words, loc=None, ip=None):
    """A word of two fp16 numbers, of others: `text` in PTX."""
    return Int32(ptx([Int32(w) for w in words], text, ",".join(["=r", *["r"] * len(words)]), loc, ip, T.i32(),
                     pure=True))


class _Fp16:
    """Two numbers in a word."""

    @staticmethod
    def read(tile, i):
        return _cvt2(tile.tensor[2 * i], tile.tensor[2 * i + 1], Float16)

    @staticmethod
    def factors(table, i):
        """(c, s) of a thread's two neighbours i of the first row, and i + 1 of the second."""
        held = cute.make_rmem_tensor((4,), Int32)
        there = cute.make_tensor(table[None, thread_in_warpgroup(), i].iterator, cute.make_layout(8))
        cute.autovec_copy(cute.recast_tensor(there, Int32), held)
        return (held[0], held[1]), (held[2], held[3])

    @staticmethod
    def add(x, y):
        return _half2("add.rn.f16x2 $0, $1, $2;", x, y)

    @staticmethod
    def sub(x, y):
        return _half2("sub.rn.f16x2 $0, $1, $2;", x, y)

    @staticmethod
    def leave(table, i, found):
        """Two rows' neighbours in a table."""
        held = cute.make_rmem_tensor((4,), Int32)
        held[0], held[1], held[2], held[3] = *found[0], *found[1]
        there = cute.make_tensor(table[None, thread_in_warpgroup(), i].iterator, cute.make_layout(8))
        cute.autovec_copy(held, cute.recast_tensor(there, Int32))

    @staticmethod
    def times(x, y, c, s, conjugate, added=None):
        """(x + iy) (c + is), or by c - is; and what is added."""
        mul = lambda a, b: _half2("mul.rn.f16x2 $0, $1, $2;", a, b)
        plus = lambda a, b, z: _half2("fma.rn.f16x2 $0, $1, $2, $3;", a, b, z)
        minus = lambda a, b, z: _half2("{ .reg .b32 t; neg.f16x2 t, $3; fma.rn.f16x2 $0, $1, $2, t; }", a, b, z)
        if added is not None:
            return minus(x, c, minus(y, s, added[0])), plus(x, s, plus(y, c, added[1]))
        if conjugate:
            return plus(x, c, mul(y, s)), minus(y, c, mul(x, s))
        return minus(x, c, mul(y, s)), plus(x, s, mul(y, c))

    @staticmethod
    def word(x):
        return x


class _Fp32:
    """Two numbers, each by itself."""

    @staticmethod
    def read(tile, i):
        return tile.tensor[2 * i], tile.tensor[2 * i + 1]

    @staticmethod
    def factors(table, i):
        found = []
        for r in range(2):
            four = cute.make_rmem_tensor((4,), Float32)
            cute.autovec_copy(table[None, thread_in_warpgroup(), i + r], four)
            found.append(((four[0], four[2]), (four[1], four[3])))
        return found

    @staticmethod
    def add(x, y):
        return x[0] + y[0], x[1] + y[1]

    @staticmethod
    def sub(x, y):
        return x[0] - y[0], x[1] - y[1]

    @staticmethod
    def times(x, y, c, s, conjugate, added=None):
        if added is not None:
            raise NotImplementedError("woven: fp32 tables are multiplied, and not added up")
        real, imag = [], []
        for e in range(2):
            turn = -s[e] if conjugate else s[e]
            real.append(x[e] * c[e] - y[e] * turn)
            imag.append(x[e] * turn + y[e] * c[e])
        return real, imag

    @staticmethod
    def word(x):
        return _cvt2(x[0], x[1], Float16)


def _checked(what, dst, a, table):
    """How to reckon with a table's factors."""
    for name, x, dtype in (("dst", dst, Float16), ("a", a, Float32)):
        if not isinstance(x, Pair) or x.dtype is not dtype or x.cols != COLS:
            raise TypeError(f"{what}: operand {name} is {x}, allowed is a pair of register tiles of 64 x {COLS} "
                            f"{dtype.__name__}")
    if not isinstance(table, cute.Tensor) or table.element_type not in (Float16, Float32) or (
            cute.size(table) != WARPGROUP * COLS):
        raise ValueError(f"{what}: the table is {table}, allowed are fp16 and fp32 of the layout woven_factors")
    return _Fp16 if table.element_type is Float16 else _Fp32


def _words(tile):
    return cute.recast_tensor(tile.tensor, Int32)


def fold_rows(p: Pair):
    """Of two tiles of real numbers (of two sequences), of which a thread has rows r and r + 8, the sums of these rows
    and their differences, fp16: `real` has the sums, of the first tile in row r, of the second one in row r + 8; `imag`
    the differences. In place; each row of a tile is a thread's own."""
    if not isinstance(p, Pair) or p.dtype is not Float16 or p.cols != COLS:
        raise TypeError(f"fold_rows: the operand is {p}, allowed is a pair of register tiles of 64 x {COLS} fp16")
    real, imag = _words(p.real), _words(p.imag)
    for i in range(0, WORDS, 2):
        (a, b), (c, d) = ((of[i], of[i + 1]) for of in (real, imag))
        real[i], real[i + 1] = _Fp16.add(a, b), _Fp16.add(c, d)
        imag[i], imag[i + 1] = _Fp16.sub(a, b), _Fp16.sub(c, d)


def unfold_rows(p: Pair):
    """The way back of ``fold_rows``, fp32: twice the tiles that sums and differences of rows are of. In place."""
    if not isinstance(p, Pair) or p.dtype is not Float32 or p.cols != COLS:
        raise TypeError(f"unfold_rows: the operand is {p}, allowed is a pair of register tiles of 64 x {COLS} fp32")
    real, imag = p.real.tensor, p.imag.tensor
    for i, k in ((2 * word + e, 2 * word + 2 + e) for word in range(0, WORDS, 2) for e in range(2)):
        (a, c), (b, d) = ((of[i], of[k]) for of in (real, imag))
        real[i], real[k] = a + b, a - b
        imag[i], imag[k] = c + d, c - d


def _complex(p: Pair, k, folded):
    """((a tile, a word) of the real parts, the same of the imaginary ones) of a thread's k-th two neighbours. folded:
    of rows r `real` has both, in rows r and r + 8, of rows r + 8 `imag`."""
    if not folded:
        return (p.real, k), (p.imag, k)
    of = p.imag if k % 2 else p.real
    return (of, k - k % 2), (of, k - k % 2 + 1)


def weave(dst: Pair, a: Pair, table: cute.Tensor, folded=False):
    """dst = a * table, woven: sums and differences; in fp16. a: fp32; folded: as of ``_complex``."""
    m, real, imag = _checked("weave", dst, a, table), _words(dst.real), _words(dst.imag)
    for i in range(0, FAR, 2):
        near, far = m.factors(table, i), m.factors(table, i + FAR)
        for r in range(2):
            k = i + r
            x, y = m.times(*(m.read(*at) for at in _complex(a, k, folded)), *near[r], False)
            v, w = m.times(*(m.read(*at) for at in _complex(a, k + FAR, folded)), *far[r], False)
            real[k], real[k + FAR] = m.word(m.add(x, v)), m.word(m.add(y, w))
            imag[k], imag[k + FAR] = m.word(m.sub(x, v)), m.word(m.sub(y, w))


def _parts(d, part):
    """(0, its real tile) and (1, its imaginary one), or one of the two."""
    return [(n, (d.real, d.imag)[n]) for n in ((0, 1) if part is None else (part,))]


def woven_mul(dst: Pair, a: Pair, table: cute.Tensor, part=None, keep=None, more=()):
    """dst = a * table, all of them woven; dst: fp16, a: fp32. Of the table, columns 0 to 31 are `real`'s. part: 0, of
    `real` alone, or 1, of `imag`.

    With an fp16 table also: keep: a table, which becomes a. more: two tables, whose product is added."""
    m = _checked("woven_mul", dst, a, table)
    for (n, to), (_, of) in zip(_parts(dst, part), _parts(a, part)):
        words = _words(to)
        for i in range(0, FAR, 2):
            at = i + n * FAR
            by, found = m.factors(table, at), [(m.read(of, k), m.read(of, k + FAR)) for k in (i, i + 1)]
            if keep is not None:
                m.leave(keep, at, found)
            factors = [m.factors(t, at) for t in more]
            for r in range(2):
                added = m.times(*factors[0][r], *factors[1][r], False) if more else None
                x, y = m.times(*found[r], *by[r], False, added)
                words[i + r], words[i + r + FAR] = m.word(x), m.word(y)


def woven_keep(table: cute.Tensor, a: Pair, part=None):
    """table = a, woven, rounded; fp16 of the layout ``woven_factors``. part: as of ``woven_mul``."""
    for n, of in _parts(a, part):
        for i in range(0, FAR, 2):
            _Fp16.leave(table, i + n * FAR, [(_Fp16.read(of, k), _Fp16.read(of, k + FAR)) for k in (i, i + 1)])


def woven_fma_conj(d: Pair, table: cute.Tensor, b: Pair, v: RowVec, part=None):
    """d[i, j] += v[i] * conj(table[i, j]) * b[i, j]; d, b: fp32. table: fp16. b is woven, and d has its elements in the
    same columns, real parts in `real`. part: as of ``woven_mul``."""
    for at, of, k in ((n * FAR + i, of, i) for n, of in _parts(b, part) for i in range(0, FAR, 2)):
        for r, (x, y) in enumerate(_Fp16.factors(table, at)):
            x, y = _numbers(x), _numbers(y)
            for e in range(2):
                i, by = 2 * (at + r) + e, v.tensor[r]
                c, s = of.tensor[2 * (k + r) + e], of.tensor[2 * (k + r + FAR) + e]
                d.real.tensor[i] = d.real.tensor[i] + by * (x[e] * c + y[e] * s)
                d.imag.tensor[i] = d.imag.tensor[i] + by * (x[e] * s - y[e] * c)


def woven_fma_to(d: cute.Tensor, table: cute.Tensor, b: Pair, by):
    """d += by * table * conj(b), d: a table of fp32 of the layout ``factors``; others as of ``woven_fma_conj``."""
    for at in range(0, WORDS, 2):
        of, k = (b.real, at) if at < FAR else (b.imag, at - FAR)
        for r, (x, y) in enumerate(_Fp16.factors(table, at)):
            x, y = _numbers(x), _numbers(y)
            there, four = d[None, thread_in_warpgroup(), at + r], cute.make_rmem_tensor((4,), Float32)
            cute.autovec_copy(there, four)
            for e in range(2):
                c, s = of.tensor[2 * (k + r) + e], of.tensor[2 * (k + r + FAR) + e]
                four[2 * e] = four[2 * e] + by * (x[e] * c + y[e] * s)
                four[2 * e + 1] = four[2 * e + 1] + by * (y[e] * c - x[e] * s)
            cute.autovec_copy(four, there)


def _numbers(word):
    """The two of a word, fp32."""
    held = cute.make_rmem_tensor((2,), Float16)
    cute.recast_tensor(held, Int32)[0] = word
    return Float32(held[0]), Float32(held[1])


def unweave(dst: Pair, a: Pair, table: cute.Tensor, folded=False):
    """dst = what a, woven, is the halved sums and differences of, times the conjugate of table, in fp16. a: fp32;
    folded: of dst, as of ``_complex``."""
    m = _checked("unweave", dst, a, table)

    def leave(found, k):
        for x, (tile, at) in zip(found, _complex(dst, k, folded), strict=True):
            _words(tile)[at] = m.word(x)

    for i in range(0, FAR, 2):
        near, far = m.factors(table, i), m.factors(table, i + FAR)
        for r in range(2):
            k = i + r
            x, y, v, w = (m.read(t, k + by) for t in (a.real, a.imag) for by in (0, FAR))
            leave(m.times(m.add(x, v), m.add(y, w), *near[r], True), k)
            leave(m.times(m.sub(x, v), m.sub(y, w), *far[r], True), k + FAR)
