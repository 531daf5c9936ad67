"""Decoding in the direct form: which numbers of K, V and q a warp's lanes have, and what becomes of its scores. All 32
lanes of a warp are NumPy arrays in the place of one lane's registers."""
import itertools
import math
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from tests.helpers.emulation.written import as_written

pytest.importorskip("cutlass")

from tkq.attention.decode import copies, scaling
from tkq.attention.decode.config import DecodeConfig, DirectConfig
from tkq.attention.decode.direct import output as direct_output
from tkq.attention.decode.direct import rows as direct_rows
from tkq.attention.decode.direct import warps as direct
from tkq.attention.decode.spec import DecodeSpec

LANES = np.arange(32)
G, T = LANES // 4, LANES % 4
PITCH, OF_V = 1 << 12, 1 << 11  # bytes from a row of the cache to the next one; from K's to V's


def halves(words):
    """(32, 2) of the two fp16 in each lane's word."""
    return np.ascontiguousarray(words.astype(np.uint32)).view(np.float16).reshape(32, 2).astype(np.float64)


def word(low, high):
    return np.stack([low, high], 1).astype(np.float16).view(np.uint32)[:, 0]


def byte(words, i):
    return (words.astype(np.uint32) >> np.uint32(8 * i)) & np.uint32(0xFF)


def e4m3(bytes_):
    return torch.from_numpy(bytes_.astype(np.uint8)).view(torch.float8_e4m3fn).double().numpy()


def widen4(words):
    x = [e4m3(byte(words, i)) for i in range(4)]
    return word(x[0], x[1]), word(x[2], x[3])


def pairs(low, high, selector):
    taken = [(low, high)[c // 4] for c in range(8)]
    chosen = [selector >> 4 * i & 15 for i in range(4)]
    return sum(byte(taken[c], c % 4) << np.uint32(8 * i) for i, c in enumerate(chosen))


def mma(c, a, b):
    """As PTX defines the fragments of mma.m16n8k16."""
    A, B, C = np.zeros((16, 16)), np.zeros((16, 8)), np.zeros((16, 8))
    for r in range(4):
        A[G + r % 2 * 8, 2 * T + r // 2 * 8], A[G + r % 2 * 8, 2 * T + r // 2 * 8 + 1] = halves(a[r]).T
        C[G + r // 2 * 8, 2 * T + r % 2] = c[r]
    for r in range(2):
        B[2 * T + 8 * r, G], B[2 * T + 8 * r + 1, G] = halves(b[r]).T
    C = C + A @ B
    return [C[G + r // 2 * 8, 2 * T + r % 2] for r in range(4)]


def transposed(words):
    tile = np.zeros((8, 8))
    tile[G, 2 * T], tile[G, 2 * T + 1] = halves(words).T
    return word(tile.T[G, 2 * T], tile.T[G, 2 * T + 1])


class Registers(list):
    def fill(self, x):
        self[:] = [np.full(32, x)] * len(self)


@pytest.fixture
def lanes(monkeypatch):
    """Both caches' memory, which a test fills: rows of bytes."""
    memory = np.full(64 * PITCH, 0x7F, np.uint8)

    def load_words(src, offset, there, held):
        found = []
        for i, old in enumerate(held):
            at = np.where(there != 0, src, 0) + offset + 4 * i
            new = sum(memory[at + b].astype(np.uint32) << np.uint32(8 * b) for b in range(4))
            found.append(np.where(there != 0, new, old))
        return found

    wide = lambda x: np.asarray(x, np.int64)
    for module in (direct, direct_rows, direct_output, copies):
        for name, what in dict(Int32=wide, Int64=wide, Float32=np.float64).items():
            monkeypatch.setattr(module, name, what, raising=False)
    monkeypatch.setattr(direct.tk, "lane_id", lambda: LANES)
    for name, what in dict(mma=mma, widen4=widen4, pairs=pairs, transposed=transposed, pack_f16x2=word).items():
        monkeypatch.setattr(direct, name, what)
    monkeypatch.setattr(direct_rows, "load_words", load_words)
    monkeypatch.setattr(direct_rows.cute.arch, "shuffle_sync", lambda x, lane: x[lane])
    return memory


def cached(memory, columns, step):
    """K and V of a step, random, with rows of both in memory: what their numbers mean."""
    found, rng = [], np.random.default_rng(0)
    for first, d in zip((0, OF_V), columns):
        low = rng.integers(0, 0x50, (step, d)) | rng.integers(0, 2, (step, d)) << 7
        for i in range(step):
            memory[(i + 1) * PITCH + first:][:d] = low[i]
        found.append(e4m3(low))
    return found


def state(kernel, q, step):
    """Registers of all lanes, and q in them."""
    floats, words = (lambda n, x=x: Registers([x] * n) for x in (np.zeros(32), np.zeros(32, np.uint32)))
    D, Dv = kernel.spec.head_dim, kernel.spec.head_dim_v
    regs = SimpleNamespace(q=words(D // 8), k=words(step * D // 128), v=words(step * Dv // 128), s=floats(step // 4),
                           o=floats(Dv // 4))
    for piece in kernel.rows.k_pieces:
        for j in range(piece.bytes // 2):
            at = piece.first + piece.bytes * T + 2 * j
            regs.q[2 * piece.word + j] = word(q[G, at], q[G, at + 1])
    return regs


def output(regs, columns):
    """(8, columns), as `DirectOutput.give_o` writes it."""
    found = np.full((8, columns), np.nan)
    for piece in direct_rows.pieces(columns, 8):
        for w, c, e in itertools.product(range(piece.bytes // 4), range(4), range(2)):
            column = piece.first + piece.bytes * G + 4 * w + c
            found[2 * T + e, column] = regs.o[8 * (piece.word + w) + 2 * c + e]
    return found


@pytest.mark.parametrize("dims, step", [((128, 128), 32), ((128, 128), 16), ((64, 64), 32), ((96, 96), 32),
                                        ((192, 128), 16), ((256, 256), 16)])
def test_products_of_a_step(lanes, dims, step):
    """Scores and O of a step, one key of which is not there: its words of V stay what they were, 0 here."""
    k, v = cached(lanes, dims, step)
    rng, missing = np.random.default_rng(1), 5
    kernel = direct.Direct(DecodeSpec("bf16", *dims, cache="e4m3", few=True), DirectConfig(step))
    here, there = LANES % step != missing, np.arange(step) != missing
    at = (LANES % step + 1) * PITCH
    rows = SimpleNamespace(k=np.where(here, at, 0), v=np.where(here, at + OF_V, 0),
                           there=np.int64(sum(1 << i for i in range(32) if here[i])))
    q = rng.integers(-4, 5, (8, dims[0])) / 4
    regs = state(kernel, q, step)
    kernel.rows.load_k(regs.k, rows)
    kernel.rows.load_v(regs.v, rows)
    kernel.scores(regs)
    key, query, scores = (lambda j: j // 2 * 8 + G), (lambda j: 2 * T + j % 2), k @ q.T
    for j, got in enumerate(regs.s):
        seen = there[key(j)]
        assert np.allclose(got[seen], scores[key(j), query(j)][seen], rtol=1e-12)
    weights = rng.integers(0, 9, (step, 8)) / 8 * there[:, None]
    regs.s[:] = [weights[key(j), query(j)] for j in range(len(regs.s))]
    kernel.values(regs)
    assert np.allclose(output(regs, dims[1]), weights.T @ (v * there[:, None]), rtol=1e-12)


@pytest.mark.parametrize("size", [1.0, 1e4, *(float(2**n) for n in range(20, 30)), 1e8, 1e37])
def test_the_largest_score_has_a_weight_that_fp16_has(lanes, monkeypatch, size):
    """2^15, and never more, however large scores are: their products with the scale are rounded, and the largest is one
    of them; so is what is taken from them, where 15 less than the largest is no number."""
    fp32, arch = np.float32, direct.cute.arch
    fakes = dict(vote_any_sync=np.any, fmax=np.fmax, shuffle_sync_bfly=lambda x, offset: x[LANES ^ offset])
    for name, what in fakes.items():
        monkeypatch.setattr(arch, name, what)
    monkeypatch.setattr(direct.cute.math, "exp2", lambda x, fastmath: np.exp2(x))
    monkeypatch.setattr(direct.cute.math, "fma", lambda a, b, c: fp32(a.astype(np.float64) * b + c))
    monkeypatch.setattr(direct.cutlass, "select_", np.where)
    monkeypatch.setattr(direct.cutlass, "range_constexpr", range)
    monkeypatch.setattr(direct, "Float32", fp32)
    kernel, rng = direct.Direct(DecodeSpec("bf16", 64, 64, cache="e4m3", few=True), DirectConfig(32)), (
        np.random.default_rng(2))
    kernel.mask, kernel.raise_max = lambda *_: None, lambda *given: as_written(direct.Direct.raise_max)(kernel, *given)
    scores, scale = rng.standard_normal((8, 32)).astype(fp32) * fp32(1000.0), fp32(size / 1234.5)
    filled = lambda x, n: [np.full(32, x, fp32) for _ in range(n)]
    regs = SimpleNamespace(s=list(scores), max=filled(-np.inf, 2), norm=filled(0.0, 2), o=filled(0.0, 16),
                           scale=SimpleNamespace(tensor=filled(scale, 2)))
    with np.errstate(all="ignore"):
        as_written(direct.Direct.softmax)(kernel, None, regs, 0, -1)
    found, products = np.stack(regs.s), scores * scale
    for query in range(8):
        e, of = query % 2, query // 2 == T
        own, base = found[e::2, of], regs.max[e][of][0]
        assert (regs.max[e][of] == base).all() and 1.0 <= own.max() <= 2.0**15
        assert own.max() > 2.0**14.9 or size > 1e5
        assert np.array_equal(own, np.exp2(products[e::2, of] - base))
        assert np.allclose(sum(regs.norm[e][of]), own.sum())


def test_scales_of_a_sequence_of_no_key(monkeypatch):
    """Mean nothing: they may be NaN, and its result is 0."""
    fp32 = np.float32
    for name, what in dict(Float32=fp32, const_expr=lambda x: x).items():
        monkeypatch.setattr(scaling, name, what)
    monkeypatch.setattr(scaling.cutlass, "select_", lambda condition, a, b: a if condition else b)
    monkeypatch.setattr(scaling.cutlass, "range_constexpr", range)
    monkeypatch.setattr(scaling.cute.arch, "fmax", lambda a, b, nan: np.maximum(a, b))
    kernel = scaling.Scaling(DecodeSpec("bf16", 64, 64, cache="e4m3", scales="sequence", few=True), DirectConfig())
    scales = np.array([[2.0, 3.0], [math.nan, math.nan]], fp32)
    g = SimpleNamespace(scale=fp32(0.5), k_descale=scales, v_descale=scales)
    for source, length, of_v in ((0, 5, 3.0), (1, 0, 1.0), (1, 5, math.nan)):
        regs = SimpleNamespace(of_v=[None], scale=SimpleNamespace(tensor=[fp32(4.0)] * 2))
        as_written(scaling.Scaling.begin)(kernel, g, regs, SimpleNamespace(source=source, head=1, length=length))
        assert np.array_equal([regs.of_v[0], *regs.scale.tensor], [of_v, 2 * of_v, 2 * of_v], equal_nan=True)


@pytest.mark.parametrize("largest, grows", [(0.3, True), (0.1, False), (1e-3, False)])
def test_o_keeps_its_unit_where_no_scale_grows(monkeypatch, largest, grows):
    """Exactly: a row may be multiplied since another one's maximum moved."""
    fp32, products = np.float32, []
    monkeypatch.setattr(scaling, "Float32", fp32)
    monkeypatch.setattr(scaling.cutlass, "select_", lambda condition, a, b: a if condition else b)
    monkeypatch.setattr(scaling.cute.arch, "fmax", max)
    monkeypatch.setattr(scaling.cute.arch, "rcp_approx", lambda x: np.nextafter(fp32(1) / x, fp32(9)))
    monkeypatch.setattr(scaling.tk, "mul", lambda to, x, by: products.append(by))
    kernel = scaling.Scaling(DecodeSpec("bf16", 64, 64, cache="e4m3", scales="token"), DecodeConfig(keys=128))
    kernel.columns = lambda *given: None
    regs = SimpleNamespace(of_v=[fp32(0.1)], correct=None, s=None)
    scales = np.full((260, 1), fp32(largest))
    assert kernel.values(SimpleNamespace(scales=scales), regs, 0) == grows
    (by,) = products
    assert abs(by - 1 / 3) < 1e-6 if grows else by == 1.0


def test_pieces_of_rows():
    for columns, n in itertools.product((64, 96, 128, 192, 256), (4, 8)):
        seen = [p.first + p.bytes * lane + b for p in direct_rows.pieces(columns, n) for lane in range(n)
                for b in range(p.bytes)]
        assert sorted(seen) == list(range(columns))
