"""Decays of columns as factors of operands: the device's own code, thread by thread in Python numbers, gives every pair
of a chunk's tokens its decay, exactly once."""
import functools
import itertools
import math
from types import SimpleNamespace

import pytest
import torch

from tests.helpers.emulation.written import as_written
from tkq.linear_attention.channels import columns, whole
from tkq.linear_attention.channels.columns import HALVES, Columns, eights_of_level, of_level
from tkq.linear_attention.channels.whole import BLOCKS, EDGE, MOST, STEPS, WHOLE, Whole

CHUNK = 64


class Words(list):
    """A tile's memory: pairs of numbers."""


@pytest.fixture(autouse=True)
def in_python(monkeypatch):
    """These names in place of the DSL's."""
    now = SimpleNamespace(thread=0, votes=[])
    names = SimpleNamespace(thread_in_warpgroup=lambda: now.thread, lane_id=lambda: now.thread % 32,
                            warp_id=lambda: now.thread // 32, LOG2E=1.0)
    for module in (columns, whole):
        monkeypatch.setattr(module, "tk", names)
    monkeypatch.setattr(columns, "cutlass", SimpleNamespace(
        range_constexpr=range, select_=lambda c, a, b: a if c else b))
    monkeypatch.setattr(columns, "cute", SimpleNamespace(
        math=SimpleNamespace(exp2=lambda x, fastmath: 2.0**x), make_rmem_tensor=lambda *of: {},
        make_layout=lambda *of, **kw: None))
    for name in ("const_expr", "Float32", "Int32"):
        monkeypatch.setattr(columns, name, lambda x: x)
    for name in ("const_expr", "Float32", "Int32", "Boolean"):
        monkeypatch.setattr(whole, name, lambda x: x)
    monkeypatch.setattr(whole, "cutlass", columns.cutlass)
    arch = SimpleNamespace(vote_all_sync=lambda x: now.votes.append(x) or x, rcp_approx=lambda x: 1 / x)
    monkeypatch.setattr(whole, "cute", SimpleNamespace(
        math=SimpleNamespace(exp2=lambda x, fastmath: 2.0**x, absf=abs), arch=arch))
    monkeypatch.setattr(whole, "unpacked", lambda word, dtype: word)
    monkeypatch.setattr(whole, "_cvt2", lambda x, y, dtype: (x, y))
    monkeypatch.setattr(columns, "scaled", lambda word, f, dtype: (word[0] * f[0], word[1] * f[1]))
    return now


def swizzled(row, col, swizzle):
    """Where TMA and wgmma have an element of 16 bits, in words."""
    panel, byte = divmod(2 * col, swizzle)
    at = panel * CHUNK * swizzle + row * swizzle + byte
    return (at ^ (at >> 3 & swizzle - 16)) // 4


@functools.cache
def places(at, swizzle):
    return [swizzled(t, 2 * pair, swizzle) for t in range(CHUNK) for pair in range(at // 2)]


def device(now, K):
    swizzle = next(s for s in (128, 64, 32) if 2 * K % s == 0)
    tile = Columns(SimpleNamespace(cols=K, dtype=None, swizzle=swizzle))
    def words(x=None):
        to = Words([(float("nan"),) * 2] * (CHUNK * K // 2))
        for (t, pair), at in zip([(t, p) for t in range(CHUNK) for p in range(K // 2)], places(K, swizzle)):
            if x is not None:
                to[at] = tuple(x[t, 2 * pair:2 * pair + 2].tolist())
        return to
    def back(words):
        return torch.tensor([words[at] for at in places(K, swizzle)], dtype=torch.float64).view(CHUNK, K)
    def mine(thread, a):
        m = tile.begin()
        for i in range(tile.mine):
            for e in range(2):
                there = 2 * tile.pair < K
                m.a[i, e] = a[tile.mine * tile.part + i][2 * tile.pair + e] if there else 1.0
        return m
    return tile, words, back, mine


def each_thread(now, make, a, f):
    a = a.tolist()
    for now.thread in range(128):
        f(make(now.thread, a))


def bits(now, half, upper):
    """Which columns of its eight a lane's row has, of a level."""
    f = as_written(columns._words_of_level)
    found = torch.zeros(8, 8, dtype=torch.bool)
    for now.thread in range(32):
        word = f(half, upper) & 0xffffffff
        assert word in (0, 0xffff, 0xffff0000, 0xffffffff)
        for e in range(2):
            found[now.thread // 4, now.thread % 4 * 2 + e] = bool(word >> 16 * e & 1)
    return found


def mask(now, half, upper):
    """(64, 64): what the gathers take of a level's products."""
    found = torch.zeros(CHUNK, CHUNK, dtype=torch.bool)
    for warp in range(4):
        for r, n in eights_of_level(warp, half, upper):
            rows, cols = slice(8 * (2 * warp + r), 8 * (2 * warp + r) + 8), slice(8 * n, 8 * n + 8)
            assert not found[rows, cols].any()
            found[rows, cols] = bits(now, half, upper)
    return found


@pytest.mark.parametrize("upper", [False, True])
def test_levels_have_each_pair_once(in_python, upper):
    masks = torch.stack([mask(in_python, half, upper) for half in (0, *HALVES)]).sum(0)
    exact = torch.ones(CHUNK, CHUNK)
    assert torch.equal(masks.float(), exact.triu() if upper else exact.tril())
    for half in HALVES:
        for parts in (1, 2, 4):
            cells = [eights_of_level(1, half, upper, range(n * 8 // parts, (n + 1) * 8 // parts)) for n in range(parts)]
            assert sorted(itertools.chain(*cells)) == sorted(eights_of_level(1, half, upper))
    assert of_level(5, 3, 2, False) is False and of_level(6, 5, 2, False) and of_level(5, 6, 2, True)


def level(now, tile, products, mine, half, tiles):
    """A level's rows of keys, and of queries."""
    rows, others, keys, queries = tiles
    early, late = as_written(Columns.early), as_written(Columns.late)
    for now.thread in range(128):
        puts = tile.rows((rows, keys)), tile.rows((rows, keys), (others, queries))
        early(tile, mine(now.thread), products, half, puts)
        late(tile, mine(now.thread), half, puts)
    return rows, others


@pytest.mark.parametrize("K", [128, 64, 48, 32, 96])
def test_scores(in_python, K):
    torch.manual_seed(0)
    tile, words, back, mine = device(in_python, K)
    early, late = (torch.randn(CHUNK, K, dtype=torch.float64) for _ in range(2))
    a = torch.rand(CHUNK, K, dtype=torch.float64)
    a[20], a[40, ::2] = 0.0, 0.0  # what forgets
    q, k, p = words(late), words(early), torch.zeros(CHUNK, CHUNK, dtype=torch.float64)
    products, listed = a.view(-1, tile.mine, K).prod(1).flatten().tolist(), a.tolist()
    lower = torch.zeros_like(p)
    for half in (0, *HALVES):
        rows, others = early, late
        if half:
            rows, others = level(in_python, tile, products,
                                 lambda thread: mine(thread, listed), half, (words(), words(), k, q))
            rows, others = back(rows), back(others).nan_to_num(7.0)
            assert rows.isfinite().all()
        take = mask(in_python, half, False)
        p[take] = (others @ rows.T)[take]
        lower[take] = (rows @ rows.T)[take]
    decay = torch.stack([torch.stack([a[j + 1:i + 1].prod(0) for j in range(CHUNK)]) for i in range(CHUNK)])
    torch.testing.assert_close(p, torch.einsum("ic,jc,ijc->ij", late, early, decay).tril())
    torch.testing.assert_close(lower.tril(-1), torch.einsum("ic,jc,ijc->ij", early, early, decay).tril(-1))


@pytest.mark.parametrize("K", [128, 48])
def test_operands_that_meet_the_state(in_python, K):
    torch.manual_seed(0)
    tile, words, back, mine = device(in_python, K)
    x, y, logs = torch.randn(CHUNK, K), torch.randn(CHUNK, K), -torch.rand(CHUNK, K, dtype=torch.float64)
    a = 2.0**logs
    keys, others, started = words(x), words(y), words()
    products, total, held = [None] * (4 * K), [None] * K, {}
    def decays(m):
        held[in_python.thread] = m
        as_written(Columns.decays)(tile, m, products)
    each_thread(in_python, mine, logs, decays)
    for in_python.thread in range(128):
        as_written(Columns.to_ends)(tile, held[in_python.thread], products, tile.rows((keys, keys)),
                                  tile.rows((others, others), (started, keys)), total)
    before = a.cumprod(0)
    behind = torch.stack([a[i + 1:].prod(0) for i in range(CHUNK)])
    torch.testing.assert_close(back(others), y * before)
    torch.testing.assert_close(back(started), x * before)
    torch.testing.assert_close(back(keys), x * behind)
    torch.testing.assert_close(torch.tensor(total, dtype=torch.float64), a.prod(0))


@pytest.mark.parametrize("reverse", [False, True])
@pytest.mark.parametrize("K", [128, 96, 64, 48])
@pytest.mark.sampled(when=lambda K, reverse: reverse == (K in (96, 64)))
def test_pairs_of_a_chunk_by_one_product(in_python, K, reverse):
    """One product has D[j+1..i] of all pairs, and the same rows meet the state as it is in the chunk's middle."""
    torch.manual_seed(0)
    tile, words, back, mine = device(in_python, K)
    x, y = (torch.randn(CHUNK, K, dtype=torch.float64) for _ in range(2))
    logs = 4.0 * torch.rand(CHUNK, K, dtype=torch.float64) - 3.0
    keys, others, started, sums, found = words(x), words(y), words(), {}, {}
    of, shared = Whole(SimpleNamespace(reverse=reverse), tile), whole.WholeShared({}, {})
    each_thread(in_python, mine, logs, lambda m: as_written(Whole.find)(of, m, sums, found))
    each_thread(in_python, mine, logs, lambda m: as_written(Whole.put)(
        of, m, sums, (keys, others, started), (words(), words()), False))
    each_thread(in_python, mine, logs, lambda m: as_written(Whole.put_ends)(of, sums, shared, 1, True))
    a = 2.0**logs
    decay = torch.stack([torch.stack([a[j + 1:i + 1].prod(0) for j in range(CHUNK)]) for i in range(CHUNK)])
    for rows, of_rows in ((back(others), y), (back(started), x)):
        torch.testing.assert_close((rows @ back(keys).T).tril(),
                                   torch.einsum("ic,jc,ijc->ij", of_rows, x, decay).tril())
    before, behind = steps_of(shared, K)[[0, STEPS - 1]]
    torch.testing.assert_close(before * behind, a.prod(0))
    of_start, to_end = (behind, before) if reverse else (before, behind)
    torch.testing.assert_close(back(others) * of_start, y * a.cumprod(0))
    torch.testing.assert_close(back(keys) * to_end, x * torch.stack([a[i + 1:].prod(0) for i in range(CHUNK)]))


def steps_of(shared, K):
    """What a column of the state is multiplied by, in the order in which blocks are visited; ones in between."""
    return torch.tensor([[shared.steps.get((n * K + c, 1), 1.0) for c in range(K)] for n in range(STEPS)],
                        dtype=torch.float64)


@pytest.mark.parametrize("reverse", [False, True])
@pytest.mark.parametrize("K", [128, 96, 64, 48])
@pytest.mark.sampled(when=lambda K, reverse: reverse == (K in (96, 64)))
def test_pairs_of_one_block(in_python, K, reverse):
    """One product has D[j+1..i] of all pairs of 16 tokens, and the same rows meet the state as it is in the middle of
    their block."""
    torch.manual_seed(0)
    tile, words, back, mine = device(in_python, K)
    x, y = (torch.randn(CHUNK, K, dtype=torch.float64) for _ in range(2))
    logs = -7.5 * torch.rand(CHUNK, K, dtype=torch.float64)
    keys, others, started, firsts = words(x), words(y), words(), {}
    of, shared = Whole(SimpleNamespace(reverse=reverse), tile), whole.WholeShared({}, {})
    each_thread(in_python, mine, logs, lambda m: as_written(Whole.put)(
        of, m, {}, (keys, others, started), (words(), words()), True))
    each_thread(in_python, mine, logs, lambda m: as_written(Whole.put_steps)(of, m, firsts, shared, 1))
    each_thread(in_python, mine, logs, lambda m: as_written(Whole.join_steps)(of, firsts, shared, 1))
    a = 2.0**logs
    decay = torch.stack([torch.stack([a[j + 1:i + 1].prod(0) for j in range(CHUNK)]) for i in range(CHUNK)])
    steps = steps_of(shared, K)
    steps = steps.flip(0) if reverse else steps
    for first in range(0, CHUNK, EDGE):
        block, n = slice(first, first + EDGE), first // EDGE
        for rows, of_rows in ((back(others), y), (back(started), x)):
            torch.testing.assert_close((rows[block] @ back(keys)[block].T).tril(),
                                       torch.einsum("ic,jc,ijc->ij", of_rows, x, decay)[block, block].tril())
        torch.testing.assert_close(back(others)[block] * steps[:n + 1].prod(0), (y * a.cumprod(0))[block])
        behind = torch.stack([a[i + 1:].prod(0) for i in range(CHUNK)])
        torch.testing.assert_close(back(keys)[block] * steps[n + 1:].prod(0), (x * behind)[block])


def test_what_rounding_leaves(in_python, monkeypatch):
    """Rows and their second part are the exact rows within 2^-16, each where it belongs."""
    torch.manual_seed(0)
    tile, words, back, mine = device(in_python, 128)
    monkeypatch.setattr(whole, "_cvt2", lambda x, y, dtype: tuple(torch.tensor([x, y]).bfloat16().tolist()))
    x, y = (torch.randn(CHUNK, 128, dtype=torch.float64) for _ in range(2))
    logs, sums = -torch.rand(CHUNK, 128, dtype=torch.float64), {}
    keys, others, started, rest = words(x), words(y), words(), (words(), words())
    of = Whole(SimpleNamespace(reverse=False), tile)
    each_thread(in_python, mine, logs, lambda m: as_written(Whole.find)(of, m, sums, {}))
    each_thread(in_python, mine, logs, lambda m: as_written(Whole.put)(of, m, sums, (keys, others, started), rest,
                                                                       False))
    f = 2.0**(logs.cumsum(0) - logs.cumsum(0)[31])
    for rounded, left, exact in ((keys, rest[0], x / f), (others, rest[1], y * f)):
        assert ((back(rounded) + back(left) - exact).abs() <= 2.0**-16 * exact.abs()).all()
        assert (back(rounded) - exact).abs().max() > 2.0**-11 * exact.abs().max()


@pytest.mark.parametrize("K", [128, 64])
@pytest.mark.sampled(when=lambda K: K == 64)  # each column has its own numbers, and what is rounded is alike
def test_a_chunk_by_one_product_is_near(in_python, K):
    """Not where a half's decays are more than MOST together, in either direction, nor where one is NaN or infinite."""
    tile, _, _, mine = device(in_python, K)
    of = Whole(SimpleNamespace(reverse=False), tile)
    def near(logs):
        in_python.votes.clear()
        each_thread(in_python, mine, logs, lambda m: as_written(Whole.find)(of, m, {}, {}))
        return all(in_python.votes[::2])  # of threads of 32, each a vote here
    for sign in (1.0, -1.0):
        logs = torch.full((CHUNK, K), sign * MOST / 33)
        assert near(logs)
        for at in range(0, CHUNK, 9):
            for wrong in (sign * MOST, -sign * MOST, math.inf, -math.inf, math.nan):
                far = logs.clone()
                far[at, K - 1] = wrong
                assert not near(far)
    alternating = MOST / 16 * (-1.0)**torch.arange(CHUNK)
    assert not near(alternating[:, None].expand(CHUNK, K))


@pytest.mark.parametrize("K", [128, 64])
@pytest.mark.sampled(when=lambda K: K == 64)  # each column has its own numbers, and what is rounded is alike
def test_a_block_by_one_product_is_near(in_python, K):
    """Not where the decays of 8 tokens that are neighbours in a block's half are more than MOST together; and which of
    the two a warp has found is in bits."""
    tile, _, _, mine = device(in_python, K)
    of, found = Whole(SimpleNamespace(reverse=False), tile), {}
    def near(logs):
        in_python.votes.clear()
        each_thread(in_python, mine, logs, lambda m: as_written(Whole.find)(of, m, {}, found))
        return all(in_python.votes[1::2])
    logs = torch.full((CHUNK, K), -MOST / 8.1)
    assert near(logs) and set(found.values()) == {BLOCKS}
    assert near(logs / 5) and set(found.values()) == {BLOCKS | WHOLE}
    for at in range(0, CHUNK, 9):
        for wrong in (MOST / 4, -MOST / 4, -math.inf, math.nan):
            far = logs.clone()
            far[at, K - 1] = wrong
            assert not near(far)
