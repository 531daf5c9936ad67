"""The kernel of whole sequences of `tkq.fft_conv` on a CPU: its own steps for all threads of a warpgroup at once, whose
words are two arrays of 128 numbers, with these names in place of the DSL's and of tiles. What is fp16 there is rounded;
sums are float64. Shared memory is swizzled as there."""
import math
from types import SimpleNamespace

import numpy

from tests.helpers.emulation.fft_columns import COL, ROW, THREADS, half
from tests.helpers.emulation.written import as_written
from tkq.convolution.fft.sequences import Place
from tkq.convolution.fft.whole import digits, filters, gradient, steps, taps, tokens
from tkq.convolution.fft.whole.kernel import OUTER

ELEMENTS = 64 * 64  # of a tile
CURRENT = SimpleNamespace(warpgroup=0)


class Words:
    """Registers: words by number, or (one of two, which)."""

    def __init__(self, shape):
        self.held = numpy.full((math.prod(shape), 2, len(THREADS)), numpy.nan)
        self.first = shape[0]

    def at(self, i):
        return i[0] + self.first * i[1] if isinstance(i, tuple) else i

    def __getitem__(self, i):
        return self.held[self.at(i)]

    def __setitem__(self, i, word):
        self.held[self.at(i)] = word


class Numbers:
    """The same, number by number."""

    def __init__(self, held):
        self.held = held

    def __getitem__(self, i):
        return self.held[i // 2, i % 2]

    def __setitem__(self, i, x):
        self.held[i // 2, i % 2] = x


class Table:
    """Of shared memory: [None, ..] is what a thread has of its first mode, as numbers."""

    def __init__(self, *shape):
        self.held = numpy.full(shape, numpy.nan)

    def __setitem__(self, at, x):
        self.held[at] = x

    def __getitem__(self, at):
        return self.held[(slice(None), *numpy.broadcast_arrays(*at[1:], THREADS)[:-1])]


class RegTile:
    def __init__(self, cols, dtype=None):
        self.words = Words((cols // 4,))
        self.tensor = Numbers(self.words.held)

    def matrix(self):
        found = numpy.empty((64, 64))
        for j, r, e in numpy.ndindex(8, 2, 2):
            found[ROW + 8 * r, 8 * j + COL + e] = self.words[2 * j + r][e]
        return found

    def fill(self, matrix):
        for j, r, e in numpy.ndindex(8, 2, 2):
            self.words.held[2 * j + r, e] = matrix[ROW + 8 * r, 8 * j + COL + e]


class Tiles:
    """A ring in shared memory, by number, also each thread's own."""

    def __init__(self, n):
        self.memory = numpy.full(n * ELEMENTS, numpy.nan)

    def __getitem__(self, i):
        return Tile(self.memory, i * ELEMENTS)


class Tile:
    def __init__(self, memory, first):
        self.memory, self.first = memory, first
        self.tensor = self
        self.iterator = SimpleNamespace(toint=lambda: 2 * first)  # bytes

    def place(self, row, col):
        return self.first + row * 64 + ((col // 8) ^ (row % 8)) * 8 + col % 8

    def __setitem__(self, at, x):
        self.memory[self.place(*at)] = x

    def matrix(self):
        return self.memory[self.place(numpy.arange(64)[:, None], numpy.arange(64))]


def store_matrices(address, *words):
    """Row r of matrix m goes where lane 8 m + r says; lane 4 r + q has its columns 2 q, 2 q + 1."""
    memory = CURRENT.tiles.memory
    for t in THREADS:
        warp, (r, q) = t // 32 * 32, divmod(t % 32, 4)
        for m, word in enumerate(words):
            memory[address[warp + 8 * m + r] // 2 + 2 * q:][:2] = word[:, t]


def product(d, a, b, k=(0, 64), transposed=False, other=False):
    a, b = (x.T if turn else x for x, turn in ((a.matrix(), transposed), (b.matrix(), other)))
    d.fill(a[:, k[0]:k[1]] @ b[k[0]:k[1]])


def complex_times(x, by, conjugate=False):
    (re, im), (c, s) = x, by
    s = -s if conjugate else s
    return half(re * c - half(im * s)), half(re * s + half(im * c))


def recast(x, to):
    if isinstance(x, Words):
        return Numbers(x.held) if to is half else x
    return _words(x.held) if isinstance(x, Numbers) else x.reshape(-1, 2, len(THREADS))


def _words(held):
    found = Words((len(held),))
    found.held = held
    return found


def local_tile(x, size, at):
    part = slice(size[0] * at[0], size[0] * (at[0] + 1))
    return _words(x.held[part]) if isinstance(x, Words) else x[part]


def copy_words(src, dst):
    dst.held[:] = src.held if isinstance(src, Words) else src


def fill_words(dst, words):
    for i, word in enumerate(words):
        dst.words[i] = word


TK = SimpleNamespace(
    element_type=lambda name: name,
    warpgroup_id=lambda: CURRENT.warpgroup, thread_in_warpgroup=lambda: THREADS, lane_id=lambda: THREADS % 32,
    first_row=lambda: ROW, first_col=lambda: COL, WARPGROUP=128, rt=RegTile, mma_wait=lambda: None,
    sync=lambda *barrier: None, store=lambda tile, x: tile.__setitem__(
        (numpy.arange(64)[:, None], numpy.arange(64)), half(x.matrix())),
    mm_AB=product, mm_ABt=lambda d, a, b: product(d, a, b, other=True),
    mm_AtB=lambda d, a, b: product(d, a, b, transposed=True))
NAMES = dict(
    tk=TK, Float16=half, Float32=lambda x: x, Int32=lambda x: x, const_expr=bool,
    root=lambda i, n: (numpy.cos(2 * numpy.pi * i / n), numpy.sin(2 * numpy.pi * i / n)),
    cutlass=SimpleNamespace(range=lambda first, end, step, unroll: [numpy.arange(end)], range_constexpr=range,
                            select_=numpy.where),
    cute=SimpleNamespace(make_rmem_tensor=lambda shape, dtype: Words(shape), local_tile=local_tile,
                         autovec_copy=copy_words, recast_tensor=recast),
    complex_times=complex_times, store_matrices=store_matrices, fill_words=fill_words,
    numbers=lambda word: (word[0], word[1]), narrow_words=lambda acc: [half(word) for word in acc.words.held])


def instead_of_the_dsl(monkeypatch):
    for module in (digits, gradient, steps, tokens):
        for name, value in NAMES.items():
            if hasattr(module, name):
                monkeypatch.setattr(module, name, value)
    monkeypatch.setattr(tokens.WholeTokens, "eight", eight)
    monkeypatch.setattr(tokens, "vectors", SimpleNamespace(run_at=lambda y, at, n: SimpleNamespace(
        iterator=SimpleNamespace(toint=lambda: Address(y, at[2]))), packed=packed))
    monkeypatch.setattr(tokens, "store16", store16)


def eight(self, x, place, at):
    """Of a sequence of numbers, zeros behind its end."""
    token = at[1] + at[2]
    found = numpy.stack([numpy.where(token + e < len(x), x[numpy.minimum(token + e, len(x) - 1)], 0)
                         for e in range(8)])
    return found.reshape(4, 2, -1)


def packed(values, dtype):
    found = Words((4,))
    found.held[:] = numpy.stack(values).reshape(4, 2, -1)
    return found


class Address:
    def __init__(self, of, token):
        self.of, self.token = of, token

    def __add__(self, size):
        return Address(self.of, self.token + size // 2)


def store16(address, *rest):
    y, token, (*words, there) = address.of, address.token, rest
    for e, x in enumerate(numpy.concatenate(words)):
        assert numpy.isnan(y.values[token[there] + e]).all()
        y.values[token[there] + e] = x[there]


def spectra(taps, exponent, mirrored, monkeypatch):
    """(16, 4, 128, 8), by the filters' kernel, of 32768 taps divided by 2^(exponent - 127)."""

    def put_words(z, i, four):
        z[:, i] = half(numpy.stack(four))

    for name, value in dict(
            get=lambda z, i: z[:2, i], put=lambda z, i, x: z.__setitem__((slice(2), i), x), root=NAMES["root"],
            put_words=put_words, get_words=lambda z, i: (z[:2, i], z[2:, i]), power_of=lambda e: 2.0**e,
            cutlass=SimpleNamespace(range=lambda n, unroll: range(n), range_constexpr=range, min=min), Int32=None,
            cute=SimpleNamespace(make_rmem_tensor=lambda shape, dtype: [None] * 4, recast_tensor=lambda x, to: x,
                                 autovec_copy=lambda words, to: to[0].__setitem__(to[1], numpy.concatenate(words))),
            vectors=SimpleNamespace(run_at=lambda to, at, n: (to, (
                *at[1:4], at[4] + numpy.arange(n)[:, None])))).items():
        monkeypatch.setattr(filters, name, value)
    kernel, found = filters.FilterSpectra(mirrored), numpy.full((16, 4, 128, 8), numpy.nan)
    kernel.tap = lambda of, n: taps[n]
    z, me = numpy.full((4, 2 * filters.EACH * filters.OF_ONE), numpy.nan), numpy.arange(filters.THREADS)
    for part in range(filters.PASSES):
        as_written(kernel.over_n1)(kernel, z, None, part, me, exponent)
        as_written(kernel.over_a)(kernel, z, me)
        as_written(kernel.over_b)(kernel, z, me)
        as_written(kernel.leave)(kernel, SimpleNamespace(spectra=found), z, (0, part), me)
    return found


def taps_of(sums, monkeypatch):
    """(32768,), by the kernel of gradients, of sums (16, 8, 128, 4)."""
    for name, value in dict(
            get=lambda z, i: z[:, i], put=lambda z, i, x: z.__setitem__((slice(None), i), x),
            cutlass=SimpleNamespace(range=lambda n, unroll: range(n), range_constexpr=range), Float32=float,
            cute=SimpleNamespace(make_rmem_tensor=lambda shape, dtype: numpy.empty((*shape, filters.THREADS)),
                                 autovec_copy=lambda x, four: four.__setitem__(slice(None), x)),
            vectors=SimpleNamespace(run_at=lambda of, at, n: of[(*at[1:4], at[4] + numpy.arange(n)[:, None])])).items():
        monkeypatch.setattr(taps, name, value)
    monkeypatch.setattr(filters, "root", NAMES["root"])
    kernel, found = taps.FilterTaps(), numpy.zeros(digits.POINTS)

    def add(of, column, total):
        for n1, x in enumerate(total):
            found[filters.COLUMNS * n1 + column] += x

    kernel.add = add
    z, me = numpy.full((2, 2 * filters.EACH * filters.OF_ONE), numpy.nan), numpy.arange(filters.THREADS)
    for part in range(filters.PASSES):
        as_written(kernel.over_kb)(kernel, SimpleNamespace(sums=sums), z, (0, part), me)
        as_written(kernel.over_ka)(kernel, z, me)
        as_written(kernel.over_k1)(kernel, z, (None, 0, part), me)
    return found


def filled():
    """The factors, as a block fills them."""
    first, rows, columns = (Tiles(1)[0] for _ in range(3))
    f = digits.Factors(first, Tiles(4), rows, columns, Table(4, 32, 32), Table(8, 4, 2, 32))
    as_written(digits.fill)(f, 0, 1)
    return f


class Block:
    """Of four warpgroups, with factors and the tiles of a sequence."""

    def __init__(self, spec):
        self.of, self.kernel, self.f = tokens.WholeTokens(spec, None), steps.Steps(), filled()
        self.tiles = CURRENT.tiles = Tiles(digits.TILES)

    def each(self, step):
        """What that gives of each tile, in their order."""
        found = []
        for CURRENT.warpgroup in range(4):
            found += [step(i) for i in range(steps.MINE)]
        return found

    def scatter(self, step, held):
        self.tiles.memory[:] = numpy.nan
        self.each(lambda i: step(self.tiles, held[steps.MINE * CURRENT.warpgroup + i], i))
        assert numpy.isfinite(self.tiles.memory).all()

    def forth(self, x):
        """A sequence that needs no scale, transformed over n1."""
        for CURRENT.warpgroup in range(4):
            asked = [tokens.Asked(RegTile(64), None) for _ in range(tokens.MINE)]
            as_written(self.of.ask)(self.of, asked, x, None, Place(0, 0, 0))
            for i, of in enumerate(asked):
                TK.store(self.tiles[tokens.MINE * CURRENT.warpgroup + i], of.u)
        self.scatter(self.kernel.scatter_frequencies, self.each(lambda i: self.kernel.forth(self.tiles, self.f, i)))


def convolved(u, spectrum, spec):
    """The causal convolution of a sequence that needs no scale with a filter's spectrum (16, 4, 128, 8) of `spectra`,
    not multiplied by what that was divided by; and the sequence's own spectrum, tile by tile its words."""
    block, kept = Block(spec), []
    kernel, f, tiles = block.kernel, block.f, block.tiles
    block.forth(u)

    def middle(i):
        t, filters = steps.MINE * CURRENT.warpgroup + i, Words((4, 4))
        filters.held[:] = spectrum[t].transpose(0, 2, 1).reshape(16, 2, 128)
        as_written(kernel.middle)(kernel, tiles[t], f, (filters, digits.of_columns()), 0, kept.append)

    block.each(middle)
    block.scatter(kernel.scatter_tokens, block.each(lambda i: kernel.back(tiles, f, i)))
    y = Outputs(len(u))

    def last(i):
        acc = RegTile(64)
        kernel.last(acc, tiles, f, i)
        chunk = steps.MINE * CURRENT.warpgroup + i
        as_written(block.of.store)(block.of, y, None, acc, (2.0**-OUTER, 0), Place(0, 0, 0), chunk)

    block.each(last)
    return y.values, kept


def own_spectrum(x, spec):
    """The words of a sequence's spectrum, tile by tile, as `WholeSpectra` leaves them."""
    block = Block(spec)
    block.forth(x)

    def spectrum(i):
        acc = RegTile(64)
        block.kernel.spectrum(acc, RegTile(64), block.tiles[steps.MINE * CURRENT.warpgroup + i], block.f,
                              digits.of_columns())
        return NAMES["narrow_words"](acc)

    return block.each(spectrum)


def product_sums(pairs, spec):
    """(16, 8, 128, 4): the sum of conj(V) W of pairs of spectra's words, without their scale."""
    kernel, found = gradient.WholeFilterGradient(spec), numpy.empty((16, 8, 128, 4))
    for t, u in numpy.ndindex(16, 4):
        sums = numpy.zeros((4, 2, 128))
        for pair in pairs:
            kernel.add(sums, *(steps.of_thread(x[t], u) for x in pair), 1.0)
        found[t, 2 * u:2 * u + 2] = sums.transpose(1, 2, 0)
    return found


class Outputs:
    """y, of as many tokens; each is written once."""

    def __init__(self, n):
        self.shape, self.values = (1, 1, n), numpy.full(n, numpy.nan)
