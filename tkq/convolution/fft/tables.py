"""The factors of a transform, which a block makes for itself, and the filter's spectrum in their order.

With n = 64 n1 + n2 and k = k1 + R k2, of N = 64 R points, w(M) = exp(-2 pi i / M), r = k1, and causal r = k1 - 1/4:

    Z[k1 + R k2] = sum over n2 of w(64)^(n2 k2)  w(N)^(r n2)  sum over n1 of w(R)^(n1 r) z[64 n1 + n2]

so a tile with n1 down and n2 across becomes one with k1 down and k2 across, by a product from the left, factors element
by element, a product from the right. It comes back by the same, in the opposite order, of conjugates.

At frequencies k - 1/4 what is around the circle once comes back times i: of real sequences and a real filter the
result's real part is the causal convolution, and nothing has to be padded by zeros.
"""
import math

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32, Int64, const_expr

import tkq.tile as tk
from tkq.convolution.fft.spec import COLS, COLUMN_SCALE, ROWS, row_scale

EXPONENT, BIAS = 23, 127  # where it begins in an fp32, and what it has of 1
INFINITE = 0x7F800000  # and above: NaN


def token_of(col):
    """The token of a row, 0 to 63, that is in a column of a tile of `tokens.Tokens`."""
    at = col % 32
    return col - at + at // 2 % 4 * 8 + at // 8 * 2 + at % 2


def halved_row(row, rows: int):
    """(transform, place in it, which half) of a row of tiles whose rows are halved: warp w of four has, in rows g and
    8 + g of its 16, both halves of place 8 w + g. row: also at run time.

    Of tiles that go in and come out places are rows 64 tokens apart, n1, and the halves are n1 and n1 + rows / 2. Of a
    spectrum they are pairs of frequencies, k1 = 2 place + half. In between a tile has but one half (of frequencies the
    even ones or the odd ones, of tokens sums or differences), real parts in rows g, imaginary ones in rows 8 + g: a
    complex product is one real product, and a thread has both parts."""
    place, half = row // 16 * 8 + row % 8, row // 8 % 2
    return place // (rows // 2), place % (rows // 2), half


def halved_place(transform, place, half, rows: int):
    """The row that `halved_row` is said of."""
    at = transform * (rows // 2) + place
    return at // 8 * 16 + half * 8 + at % 8


def root(i, n: int):
    """(cos, sin) of 2 pi i / n, i an int at run time; n a power of 2."""
    i = i & (n - 1)
    angle = Float32(Int32(cutlass.select_(i < n // 2, i, i - n))) * Float32(2.0 * math.pi / n)
    return cute.math.cos(angle, fastmath=True), cute.math.sin(angle, fastmath=True)


def exact_root(i, n):
    """As `root`, to fp32's own rounding where that has the error of fast sines, 2^-21: of an angle of up to an eighth
    of a turn, turned by quarters. n: also at run time, up to 2^24."""
    i = (i & (n - 1)) * 8
    quarter = (i + n) >> (log2(n) + 1)
    angle = Float32(i - quarter * (2 * n)) * one_over(n) * Float32(math.pi / 4)
    c, s = series(angle)
    odd, negative = (quarter & 1) == 1, (Int32(1) + quarter) & 2
    c, s = cutlass.select_(odd, s, c), cutlass.select_(odd, c, s)
    return cutlass.select_(negative == 2, -c, c), cutlass.select_((quarter & 2) == 2, -s, s)


def log2(n):
    """Of a power of 2, at run time an Int32."""
    return n.bit_length() - 1 if isinstance(n, int) else (Float32(n).bitcast(Int32) >> EXPONENT) - 127


def one_over(n):
    """Of a power of 2, exact; at run time an Int32."""
    return Float32(1.0 / n) if isinstance(n, int) else ((127 - log2(n)) << EXPONENT).bitcast(Float32)


def series(x):
    """(cos, sin) of x up to pi / 4: what Taylor's series leave off is below 2^-28."""
    square = x * x
    c, s = 1.0 / math.factorial(10), 1.0 / math.factorial(9)
    c = square * -c + 1.0 / math.factorial(8)
    for n in (6, 4, 2, 0):
        c = c * square + (-1.0) ** (n // 2) / math.factorial(n)
    for n in (7, 5, 3):
        s = s * square + (-1.0) ** (n // 2) / math.factorial(n)
    return c, x + x * square * s


class Tables:
    """Of a spec; `me` of `threads` threads call each function together. halves: are spectra those of `Halves`?"""

    def __init__(self, spec, threads: int, halves: bool = False):
        self.spec, self.threads, self.halves = spec, threads, halves
        self.root = exact_root if spec.split else root

    def frequency(self, col):
        """k2 of a column: of two halves the even ones are first."""
        return col if not self.halves else cutlass.select_(col < COLS // 2, 2 * col, 2 * col - COLS + 1)

    def row_frequency(self, row):
        """k1 of a row."""
        if not (self.halves and self.spec.halved_rows):
            return row % self.spec.rows
        _, place, half = halved_row(row, self.spec.rows)
        return 2 * place + half

    def shifted(self, k1):
        """(4 r, 4), or (r, 1): the row's frequency r as a fraction."""
        return (4 * k1 - 1, 4) if self.spec.causal else (k1, 1)

    @cute.jit
    def fill_rows(self, to, me, size: cutlass.Constexpr = ROWS):
        """Factors from the left. to: tiles (P, Q) for each input tile X of a step: the sum of P X is the result's real
        part, of Q X its imaginary part; and back, the outputs are P' B + Q' C, B + iC the conjugate of what is
        transformed. Split, the low parts of all follow. size: only the first so many rows and columns."""
        spec, R = self.spec, self.spec.rows
        scale, dtype = Float32(row_scale(R)), to.type.dtype
        for at in cutlass.range(me, size * size, self.threads, unroll=1):
            m, k = at // size, at % size
            r, parts = self.shifted(m % R)
            c, s = self.root(r * (k % R), parts * R)
            here = m // R == k // R
            c, s = (cutlass.select_(here, x * scale, Float32(0.0)) for x in (c, s))
            for tile in cutlass.range_constexpr(spec.tiles):
                p, q = (s, c) if tile else (c, -s)
                to[2 * tile].tensor[m, k], to[2 * tile + 1].tensor[m, k] = dtype(p), dtype(q)
                if const_expr(spec.split):
                    low = 2 * spec.tiles + 2 * tile
                    to[low].tensor[m, k], to[low + 1].tensor[m, k] = rest(p, dtype), rest(q, dtype)

    @cute.jit
    def fill_halved_rows(self, to, me, size: cutlass.Constexpr = ROWS):
        """Factors from the left of `halved_row`: of sums to even frequencies, of differences to odd ones, each a matrix
        of real numbers, transposed that of the way back. to: two tiles. size: only the first so many rows and columns.
        """
        R, dtype = self.spec.rows, to.type.dtype
        for at in cutlass.range(me, size * size, self.threads, unroll=1):
            (of, k1, imag), (by, n1, by_imag) = halved_row(at // size, R), halved_row(at % size, R)
            for odd in cutlass.range_constexpr(2):
                c, s = self.root(n1 * (2 * k1 + odd), R)
                found = cutlass.select_(imag == by_imag, c, cutlass.select_(imag == 0, s, -s))
                found = cutlass.select_(of == by, found * Float32(row_scale(R)), Float32(0.0))
                to[odd].tensor[at // size, at % size] = dtype(found)

    @cute.jit
    def fill_columns(self, columns, me):
        """Factors from the right, of 64 points: a `tkq.tile.SharedPair`, or split."""
        to = columns.high if const_expr(self.spec.split) else columns
        dtype = to.real.type.dtype
        for at in cutlass.range(me, COLS * COLS, self.threads, unroll=1):
            m, k = at // COLS, at % COLS
            c, s = self.root(m * k, COLS)
            c, s = c * Float32(COLUMN_SCALE), s * Float32(COLUMN_SCALE)
            to.real.tensor[m, k], to.imag.tensor[m, k], to.minus.tensor[m, k] = dtype(c), dtype(-s), dtype(s)
            if const_expr(self.spec.split):
                low = columns.low
                low.real.tensor[m, k] = rest(c, dtype)
                low.imag.tensor[m, k], low.minus.tensor[m, k] = rest(-s, dtype), rest(s, dtype)

    @cute.jit
    def fill_halves(self, to, me):
        """Factors from the right of `Halves`: of even frequencies w(32)^(n k), of odd ones w(64)^(n (2 k + 1)), each a
        matrix of real numbers; points n in the order of `token_of`. to: two tiles."""
        half, dtype = COLS // 2, to.type.dtype
        for at in cutlass.range(me, COLS * COLS, self.threads, unroll=1):
            m, k = at // COLS, at % COLS
            for odd in cutlass.range_constexpr(2):
                c, s = self.root(token_of(m % half) * (2 * (k % half) + odd), COLS)
                other = cutlass.select_(m < half, -s, s)
                here = cutlass.select_((m < half) == (k < half), c, other)
                to[odd].tensor[m, k] = dtype(here * Float32(COLUMN_SCALE))

    @property
    def each(self):
        """How many of a table's elements a warpgroup's thread fills."""
        return -(-COLS // 4 // (self.threads // tk.WARPGROUP))

    def _mine(self, j):
        """The j-th of them; the last one again, which gets the same numbers, where they do not divide."""
        return cutlass.min(j * (self.threads // tk.WARPGROUP) + tk.warpgroup_id(), COLS // 4 - 1)

    @cute.jit
    def fill_twiddles(self, to: cute.Tensor):
        """w(N)^(r n2). to: of the layout `powers`."""
        def factor(row, col):
            r, parts = self.shifted(row % self.spec.rows)
            c, s = self.root(r * col, parts * self.spec.points)
            return c, -s

        if tk.warpgroup_id() == 0:
            tk.fill_powers(to, factor)

    @cute.jit
    def fill_all_twiddles(self, to: cute.Tensor):
        """The same of each element, columns in the order of `token_of`. to: fp16 or fp32, of the layout
        `tkq.tile.woven.woven_factors`."""
        for j in cutlass.range(self.each, unroll=1):
            i = self._mine(j)
            row, col = tk.factor_place(i)
            r, parts = self.shifted(self.row_frequency(row))
            roots = [self.root(r * token_of(col + e), parts * self.spec.points) for e in range(2)]
            self.leave(to[None, tk.thread_in_warpgroup(), i], [roots[0][0], -roots[0][1], roots[1][0], -roots[1][1]])

    def leave(self, to: cute.Tensor, four):
        """Real and imaginary parts of two neighbours in a table."""
        if to.element_type is not Float32:
            cute.autovec_copy(tk.narrow_four(four, to.element_type), to)
            return
        held = cute.make_rmem_tensor((4,), Float32)
        for e in range(4):
            held[e] = four[e]
        cute.autovec_copy(held, to)

    @cute.jit
    def fill_spectra(self, to: cute.Tensor, spectra: cute.Tensor, largest: cute.Tensor):
        """The filter's, of each of its parts, divided by a power of 2 near the largest number of all. to: of the layout
        `factors`, and parts. spectra: (parts, points, 2) fp32. largest: an int for each warp.

        Returns the power of 2, what products are multiplied by. The block's threads meet in between; they have met
        before (the tables before are of no use), and meet behind."""
        most, four = Int32(0), cute.make_rmem_tensor((4,), Float32)
        parts, narrow = cute.size(to, mode=[3]), to.element_type is not Float32
        for part in cutlass.range(parts, unroll=1):
            for j in cutlass.range_constexpr(self.each):
                self.gather(four, spectra[part, None, None], self._mine(j))
                for e in cutlass.range_constexpr(4):
                    most = cutlass.max(most, magnitude(four[e]))
        down, up = power(self.largest_of_block(most, largest), 0)
        for part in cutlass.range(parts, unroll=1):
            for j in cutlass.range_constexpr(self.each):
                self.gather(four, spectra[part, None, None], self._mine(j))
                for e in cutlass.range_constexpr(4):
                    four[e] = four[e] * down
                there = to[None, tk.thread_in_warpgroup(), self._mine(j), part]
                if const_expr(narrow):
                    cute.autovec_copy(tk.narrow_four([four[e] for e in range(4)], to.element_type), there)
                else:
                    cute.autovec_copy(four, there)
        return up

    @cute.jit
    def largest_of_block(self, most, largest: cute.Tensor):
        """The largest of what the block's threads have, by an int for each warp; they meet once."""
        most, warp = cute.arch.warp_redux_sync(most, "max"), tk.warp_id()  # which all lanes of a warp ask together
        if tk.lane_id() == 0:
            largest[warp] = most
        tk.sync_block()
        for w in cutlass.range_constexpr(self.threads // 32):
            most = cutlass.max(most, largest[w])
        return most

    @cute.jit
    def gather(self, four: cute.Tensor, spectrum: cute.Tensor, i):
        """A thread's i-th two numbers of a spectrum."""
        spec = self.spec
        row, col = tk.factor_place(i)
        for e in cutlass.range_constexpr(2):
            at = self.row_frequency(row) + spec.rows * self.frequency(col + e)
            imag = spectrum[at, 1]
            four[2 * e], four[2 * e + 1] = spectrum[at, 0], -imag if spec.conjugate else imag


def of_head(spectra: cute.Tensor, head):
    """A head's, (parts, points, 2): of many heads there are more than 2^31 numbers."""
    first, layout = spectra.stride[0], cute.select(spectra.layout, [1, 2, 3])
    return cute.make_tensor(spectra.iterator + cute.assume(Int64(head) * first, divby=first), layout)


def rest(x, dtype):
    """What rounding an fp32 leaves off, rounded."""
    return dtype(x - Float32(dtype(x)))


def magnitude(x):
    """An fp32's, as an int: of the same order, NaN above infinity."""
    return x.bitcast(Int32) & 0x7FFFFFFF


def power(largest, above: int):
    """(down, up): a power of 2 that brings numbers up to `largest`, a magnitude, below 2^(above + 1), and its inverse.
    Both are finite whatever largest is."""
    exponent = cutlass.min(cutlass.max(largest >> EXPONENT, above + 2), 253)
    down, up = 254 + above - exponent, exponent - above
    return (down << EXPONENT).bitcast(Float32), (up << EXPONENT).bitcast(Float32)


def power_of(exponent):
    """2 ** exponent, an int from -126 to 127; what is beyond counts as the nearer of the two."""
    return (cutlass.min(cutlass.max(exponent + 127, 1), 254) << EXPONENT).bitcast(Float32)


def power_of_two(exponent):
    """2 ** exponent, an int from -149 to 127, below -126 a denormal number: what is made of two factors may be that
    small where their products with sums are not. What is above counts as 127, what is below is 0."""
    exponent = cutlass.min(exponent, 127)
    return power_of(exponent >> 1) * power_of(exponent - (exponent >> 1))
