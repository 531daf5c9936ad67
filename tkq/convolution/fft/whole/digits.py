"""The digits of a sequence of 32768 points, where they are in tiles, and the factors between their transforms.

Tokens are n = 1024 n1 + 32 a + b, frequencies k - 1/4 with k = k1 + 32 ka + 1024 kb, each digit from 0 to 31. With
w(M) = exp(-2 pi i / M), N = 32768 and r = k1 - 1/4:

    Z[k] = sum over b of w(32)^(b kb)  w(1024)^(b ka)
           sum over a of w(32)^(a ka)  w(N)^((32 a + b) r)
           sum over n1 of w(32)^(n1 r) z[n]

A complex product of 32 points is a real one of 64, of real and imaginary parts. Where a digit goes down a tile,
`row_of` says in which rows they are: a thread has both. Digits b go across in the order of `tables.token_of`.
"""
from typing import NamedTuple, Optional

import cutlass
import cutlass.cute as cute
from cutlass import Float16, Float32, Int32, const_expr

import tkq.tile as tk
from tkq.convolution.fft.spec import COLS, ROWS
from tkq.convolution.fft.tables import root, token_of
from tkq.convolution.fft.transform import TILE
from tkq.tile.halves import complex_times

DIGITS = 32
POINTS = DIGITS**3
TILES = POINTS // (ROWS * COLS // 2)  # of complex numbers, and chunks of 64 tokens of each n1
TURNS = 4  # a digit that goes down is moved on by so many, fewer one: what lanes store together has banks of its own
SCALES = 0.25, 0.125, 0.125  # of the factors of n1, a, b: powers of 2 near 1 / sqrt(32)
PADDED = DIGITS + 1


def row_of(digit, part):
    """The row, or the column, of a digit's real (part 0) or imaginary parts."""
    return digit // 8 * 16 + 8 * part + digit % 8


def digit_of(row):
    return row // 16 * 8 + row % 8, row // 8 % 2


class Factors(NamedTuple):
    """A block's, in shared memory. Tiles: of n1 from the left, twice side by side; back, of digits k1 moved on by 0 to
    3, only real parts; of a from the left, of b from the right. Between products: w(N)^(32 a r), each twice, (4, a, k1)
    and w(N)^(b r) (8, a quad's lane, 2, k1), of the 8 digits b that it has in 4 pairs (real parts, imaginary parts)."""

    first: tk.SharedTile
    last: Optional[tk.SharedTile]
    rows: tk.SharedTile
    columns: tk.SharedTile
    by_row: cute.Tensor
    by_column: cute.Tensor


def allocate(al, back: bool) -> Factors:
    """Not filled. back: those of the way back, too."""
    return Factors(al.tile(TILE, 1)[0], al.tile(TILE, TURNS) if back else None, al.tile(TILE, 1)[0],
                   al.tile(TILE, 1)[0],
                   al.allocate_tensor(Float16, cute.make_layout((4, DIGITS, DIGITS), stride=(1, 4, 4 * PADDED)), 16),
                   al.allocate_tensor(Float16, cute.make_layout((8, 4, 2, DIGITS), stride=(1, 8, 32, 96)), 16))


def of_parts(here, there, c, s):
    """The factor from part `there` of a number to part `here` of its product with c - is."""
    other = cutlass.select_(here == 0, s, -s)
    return cutlass.select_(here == there, c, other)


@cute.jit
def fill(f: Factors, me, threads: cutlass.Constexpr):
    """A block's threads together; tiles are there after they have published and met."""
    for at in cutlass.range(me, ROWS * COLS, threads, unroll=1):
        m, k = at // COLS, at % COLS
        (down, here), (across, there) = digit_of(m), digit_of(k)
        c, s = root((4 * down - 1) * (k % DIGITS), 4 * DIGITS)
        f.first.tensor[m, k] = Float16(of_parts(here, Int32(0), c, s) * Float32(SCALES[0]))
        if const_expr(f.last is not None):
            fill_last(f, m, k)
        c, s = root(down * across, DIGITS)
        f.rows.tensor[m, k] = Float16(of_parts(here, there, c, s) * Float32(SCALES[1]))
        c, s = root(token_of(m % DIGITS) * (k % DIGITS), DIGITS)
        f.columns.tensor[m, k] = Float16(of_parts(k // DIGITS, m // DIGITS, c, s) * Float32(SCALES[2]))
    for at in cutlass.range(me, DIGITS * DIGITS, threads, unroll=1):
        fill_between(f, at // DIGITS, at % DIGITS)


def fill_last(f: Factors, m, k):
    """An element of the way back over k1."""
    (down, here), (across, there) = digit_of(m), digit_of(k)
    for turn in range(TURNS):
        c, s = root((4 * ((across - turn) & (DIGITS - 1)) - 1) * down, 4 * DIGITS)
        x = cutlass.select_(there == 0, c, -s) * Float32(SCALES[0])
        f.last[turn].tensor[m, k] = Float16(cutlass.select_(here == 0, x, Float32(0.0)))


def fill_between(f: Factors, k1, n):
    """Of a k1 those of a digit a and of one b, n."""
    c, s = root((4 * k1 - 1) * DIGITS * n, 4 * POINTS)
    for e in range(2):
        f.by_row[e, n, k1], f.by_row[2 + e, n, k1] = Float16(c), Float16(-s)
    c, s = root((4 * k1 - 1) * token_of(n), 4 * POINTS)
    first, lane, part = n // 8 % 2 * 4 + n % 2, n % 8 // 2, n // 16
    f.by_column[first, lane, part, k1], f.by_column[first + 2, lane, part, k1] = Float16(c), Float16(-s)


def of_columns():
    """w(1024)^(b ka) of a thread's ka and its digits b: 4 pairs of words, (2, 4)."""
    found = cute.make_rmem_tensor((2, 4), Int32)
    numbers = cute.recast_tensor(found, Float16)
    for u in range(4):
        for e in range(2):
            c, s = root(digit_of(tk.first_row())[0] * token_of(8 * u + tk.first_col() + e), DIGITS * DIGITS)
            numbers[4 * u + e], numbers[4 * u + 2 + e] = Float16(c), Float16(-s)
    return found


def columns_of(f: Factors, k1):
    """w(N)^(b r) of a thread's digits b: 4 pairs of words."""
    held = cute.make_rmem_tensor((8,), Int32)
    for part in range(2):
        eight = f.by_column[None, tk.first_col() // 2, part, k1]
        cute.autovec_copy(cute.recast_tensor(eight, Int32), cute.local_tile(held, (4,), (part,)))
    return [(held[2 * u], held[2 * u + 1]) for u in range(4)]


def between(f: Factors, columns, k1, a):
    """w(N)^((32 a + b) r) of a thread's digits b; columns: of k1."""
    held = cute.make_rmem_tensor((2,), Int32)
    cute.autovec_copy(cute.recast_tensor(f.by_row[None, a, k1], Int32), held)
    return [complex_times(of_b, (held[0], held[1])) for of_b in columns]
