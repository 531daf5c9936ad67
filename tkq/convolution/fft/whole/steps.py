"""A sequence's transforms forth and back, tile by tile: products, and factors in fp16 between them."""
import cutlass
import cutlass.cute as cute
from cutlass import Float16, const_expr

import tkq.tile as tk
from tkq.convolution.fft.spec import COLS
from tkq.convolution.fft.whole import digits
from tkq.convolution.fft.whole.digits import DIGITS, TILES, TURNS, Factors, row_of
from tkq.tile.halves import complex_times, fill_words, narrow_words, store_matrices

QUARTERS = range(4)  # blocks of 8 digits b
HALVES = range(2)  # of a tile's columns, each with all digits b
ROW_BYTES, CHUNK = 2 * COLS, 16
MINE = TURNS  # tiles of each warpgroup


def real(words, half, u):
    """Of a tile whose rows are real and imaginary parts: (real, imaginary) words of a half of the columns."""
    at = 2 * (4 * half + u)
    return words[at], words[at + 1]


def across(words, half, u):
    """The same of a tile whose columns are 32 real and 32 imaginary parts; half: which row."""
    return words[2 * u + half], words[2 * (4 + u) + half]


def put_across(pairs):
    """Words of such a tile, of pairs[half][u]."""
    return [pairs[half][u][part] for part in range(2) for u in QUARTERS for half in HALVES]


def put_down(pairs):
    """Words of a tile whose rows are real and imaginary parts."""
    return [x for half in HALVES for u in QUARTERS for x in pairs[half][u]]


def of_thread(words, u):
    """Of a thread's words of such a spectrum those of block u of 8 kb: of its two rows (real, imaginary)."""
    return [word for half in HALVES for word in across(words, half, u)]


class Steps:
    """A warpgroup calls each function together. Tiles of u are in the first half of the tiles in shared memory; `forth`
    and `back` have what others' places are for in registers until all have met, and `scatter` puts it there."""

    def forth(self, tiles, f: Factors, i: int):
        """The transform over n1 of a warpgroup's i-th chunk of tokens, as (real, imaginary) words [half][u]."""
        chunk, acc = MINE * tk.warpgroup_id() + i, tk.rt(COLS)
        k = (0, DIGITS) if i % 2 == 0 else (DIGITS, COLS)
        tk.mm_AB(acc, f.first, tiles[chunk // 2], k=k)
        tk.mma_wait()
        words, k1 = narrow_words(acc), digits.digit_of(tk.first_row())[0]
        columns, found = digits.columns_of(f, k1), []
        for half in HALVES:
            by = digits.between(f, columns, k1, 2 * chunk + half)
            found.append([complex_times(real(words, half, u), by[u]) for u in QUARTERS])
        return found

    def scatter_frequencies(self, tiles, held, i: int):
        """Into tiles of two k1 each: digits a down, moved on by 0 to 3."""
        chunk, lane = MINE * tk.warpgroup_id() + i, tk.lane_id()
        k1 = tk.thread_in_warpgroup() // 32 * 8 + lane % 8
        for half in HALVES:
            a = (2 * chunk + half + k1 // 2 % TURNS) & (DIGITS - 1)
            self.scatter(tiles[k1 // 2], held[half], row_of(a, lane // 8 % 2), 4 * (k1 % 2) + lane // 16)

    def scatter_tokens(self, tiles, held, i: int):
        """Into tiles of two a each, a chunk of tokens: digits k1 down, moved on by 0 to 3."""
        t, lane = MINE * tk.warpgroup_id() + i, tk.lane_id()
        a = (tk.thread_in_warpgroup() // 32 * 8 + lane % 8 - i) & (DIGITS - 1)
        for half in HALVES:
            k1 = (2 * t + half + a // 2 % TURNS) & (DIGITS - 1)
            self.scatter(tiles[a // 2], held[half], row_of(k1, lane // 8 % 2), 4 * (a % 2) + lane // 16)

    def scatter(self, tile, pairs, row, chunk):
        """Half of a register tile, whose rows go to a row and a chunk of 8 elements each; of matrix lane // 8, its
        part is lane // 8 % 2 and its block of columns, of two at a time, lane // 16."""
        first = tile.tensor.iterator.toint() + row * ROW_BYTES
        for u in (0, 2):
            store_matrices(first + ((chunk + u) ^ (row & 7)) * CHUNK, *pairs[u], *pairs[u + 1])

    @cute.jit
    def middle(self, tile, f: Factors, factors, barrier, leave: cutlass.Constexpr = None):
        """The transforms over a and b of a tile, times the filter's spectrum, and back over kb; in the tile's place.
        factors: (the filter's, 4 x 4 words of a thread; w(1024)^(b ka)). leave: is given the spectrum's words."""
        (filters, columns), acc, narrow = factors, tk.rt(COLS), tk.rt(COLS, Float16)
        by = self.spectrum(acc, narrow, tile, f, columns)
        tk.sync(barrier, tk.WARPGROUP)  # all have read the tile
        tk.mma_wait()
        words = narrow_words(acc)
        if const_expr(leave is not None):
            leave(words)
        of = lambda h, u: (filters[2 * h, u], filters[2 * h + 1, u])
        fill_words(narrow, put_across([[complex_times(across(words, h, u), of(h, u)) for u in QUARTERS]
                                       for h in HALVES]))
        tk.mm_ABt(acc, narrow, f.columns)
        tk.mma_wait()
        words = narrow_words(acc)
        fill_words(narrow, put_down([[complex_times(across(words, h, u), by[u], True) for u in QUARTERS]
                                     for h in HALVES]))
        tk.store(tile, narrow)

    def spectrum(self, acc, narrow, tile, f: Factors, columns: cute.Tensor):
        """acc = the transforms over a and b of a tile, there after ``mma_wait``; narrow: registers in between. Returns
        the factors between the two."""
        tk.mm_AB(acc, f.rows, tile)
        tk.mma_wait()
        by, words = [(columns[0, u], columns[1, u]) for u in QUARTERS], narrow_words(acc)
        fill_words(narrow, put_across([[complex_times(real(words, h, u), by[u]) for u in QUARTERS] for h in HALVES]))
        tk.mm_AB(acc, narrow, f.columns)
        return by

    def back(self, tiles, f: Factors, i: int):
        """The transform back over ka of a warpgroup's i-th tile, as `forth`."""
        t, acc = MINE * tk.warpgroup_id() + i, tk.rt(COLS)
        tk.mm_AtB(acc, f.rows, tiles[t])
        tk.mma_wait()
        a = (digits.digit_of(tk.first_row())[0] - i) & (DIGITS - 1)  # tile t is moved on by t % TURNS, i
        words, found = narrow_words(acc), []
        for half in HALVES:
            by = digits.between(f, digits.columns_of(f, 2 * t + half), 2 * t + half, a)
            found.append([complex_times(real(words, half, u), by[u], True) for u in QUARTERS])
        return found

    def last(self, acc, tiles, f: Factors, i: int):
        """The transform back over k1 of a warpgroup's i-th chunk of tokens, in a thread's first row; it is there after
        ``mma_wait``."""
        tk.mm_AB(acc, f.last[i], tiles[MINE * tk.warpgroup_id() + i])


assert TILES == 4 * MINE
