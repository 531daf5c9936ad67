"""Blocks of 16 tokens, of a warp each: the device's own code, lane by lane in Python numbers, gives rows, steps and
scores their places and factors."""
import itertools
import math
from types import SimpleNamespace

import numpy
import pytest
import torch

from tests.cpu.linear_attention.channels.test_channel_columns import swizzled
from tests.helpers.emulation import warp as warp_emulation
from tests.helpers.emulation.written import as_written
from tkq.linear_attention.blocks import pairs, qk_tiles, scores
from tkq.linear_attention.blocks.pairs import BlockInverse
from tkq.linear_attention.blocks.plan import by_blocks
from tkq.linear_attention.blocks.scores import BlockScores, Factors
from tkq.linear_attention.channels.bounded import blocks, config
from tkq.linear_attention.channels.bounded.blocks import Blocks
from tkq.linear_attention.channels.bounded.config import LOWEST
from tkq.linear_attention.channels.bounded.launch import supported
from tkq.linear_attention.channels.spec import ChannelSpec
from tkq.linear_attention.channels.whole import MOST
from tkq.linear_attention.engine.inverse import PITCH
from tkq.linear_attention.spec import LinearSpec

CHUNK, K, EDGE = 64, 128, 16


class Memory(list):
    """Numbers, or words of two of them; `iterator` as of a tensor."""

    iterator = property(lambda self: At(self, 0))

    def of(self, index):
        return index[0] if isinstance(index, tuple) else index

    def __getitem__(self, index):
        return self if index == (None, 0) else super().__getitem__(self.of(index))

    def __setitem__(self, index, value):
        super().__setitem__(self.of(index), value)


class At:
    """Some of a memory."""

    def __init__(self, memory, first):
        self.memory, self.first = memory, first

    def __add__(self, n):
        return At(self.memory, self.first + n)

    def __getitem__(self, i):
        return self.memory[self.first + i]

    def __setitem__(self, i, value):
        self.memory[self.first + i] = value


class Rows(At):
    def __init__(self, at, shape):
        super().__init__(at.memory, at.first)
        self.width = shape[0] if isinstance(shape, tuple) else 0

    def __getitem__(self, index):
        return self + self.width * index[1] if isinstance(index, tuple) else super().__getitem__(index)


def in_place(monkeypatch, names):
    """These names, and functions as they are written."""
    for module, (name, value) in itertools.product((blocks, pairs, scores), names.items()):
        if hasattr(module, name):
            monkeypatch.setattr(module, name, value)
    for kind in (Blocks, BlockInverse, BlockScores):
        for name, f in list(vars(kind).items()):
            if hasattr(f, "__wrapped__"):
                monkeypatch.setattr(kind, name, as_written(f))


@pytest.fixture(autouse=True)
def now(monkeypatch):
    """A thread, and names in place of the DSL's."""
    now = SimpleNamespace(thread=0, stop=False)

    def sync_warp():
        if now.stop:
            raise StopIteration

    def copy(of, to):
        for e in range(4 if len(of) == 4 else 2) if isinstance(of, list) else range(len(to)):
            to[e] = of[e]

    tk = SimpleNamespace(
        lane_id=lambda: now.thread % 32, warp_id=lambda: now.thread // 32, thread_in_warpgroup=lambda: now.thread,
        first_row=lambda: now.thread // 32 * 16 + now.thread % 32 // 4, LOG2E=math.log2(math.e), SharedTile=None)
    arch = SimpleNamespace(rcp_approx=lambda x: 1 / x, sync_warp=sync_warp)
    cute = SimpleNamespace(
        arch=arch, math=SimpleNamespace(exp2=lambda x, fastmath: 2.0**x, fma=lambda a, b, c: a * b + c),
        make_rmem_tensor=lambda shape, kind: [None] * shape[0], make_layout=lambda shape: shape,
        make_tensor=Rows, autovec_copy=copy, size=len)
    in_place(monkeypatch, dict(
        tk=tk, cute=cute, const_expr=lambda x: x, Float32=lambda x: x, Int32=lambda x: x, words=lambda tile: tile,
        unpacked=lambda word, dtype: word, _cvt2=lambda x, y, dtype: (x, y),
        cutlass=SimpleNamespace(range_constexpr=range, select_=lambda c, a, b: a if c else b)))
    return now


def tile(x):
    """(64, n) as TMA writes it: words of two neighbours."""
    found = Memory([None] * (x.numel() // 2))
    for t in range(CHUNK):
        for pair in range(x.shape[1] // 2):
            found[swizzled(t, 2 * pair, 128)] = tuple(x[t, 2 * pair:2 * pair + 2].tolist())
    return found


def back(words, cols=K):
    return torch.tensor([words[swizzled(t, 2 * pair, 128)] for t in range(CHUNK) for pair in range(cols // 2)],
                        dtype=torch.float64).view(CHUNK, cols)


def of_columns(panels):
    of = qk_tiles.QkTiles.__new__(qk_tiles.QkTiles)
    of.panels = panels
    return of


def in_tiles(memory, x, which):
    """A chunk's 128 columns of keys or queries, to tiles of 16 x 64, or back from there."""
    found = torch.empty(CHUNK, K, dtype=torch.float64)
    for t, pair in itertools.product(range(CHUNK), range(K // 2)):
        (block, row), (panel, col) = divmod(t, EDGE), divmod(2 * pair, 64)
        at = of_columns(2).at(0, block, panel, which) * (EDGE * 32) + ((row * 128 + 2 * col) ^ (row % 8 << 4)) // 4
        if x is None:
            found[t, 2 * pair:2 * pair + 2] = torch.tensor(memory[at], dtype=torch.float64)
        else:
            memory[at] = tuple(x[t, 2 * pair:2 * pair + 2].tolist())
    return found


@pytest.mark.parametrize("tokens", [64 + 64, 64 + 37])
def test_rows_and_steps(now, tokens):
    """A chunk's second one, with and without tokens behind the end, whose gates are 0."""
    torch.manual_seed(0)
    q, k, x = (torch.randn(CHUNK, K, dtype=torch.float64) for _ in range(3))
    A_log, bias, head, bound = torch.randn(3), torch.randn(3 * K), 2, -5.0
    x[3] = 60.0  # lowest gates, and none
    x[50] = -60.0
    rows = Memory([None] * (2 * CHUNK * K // 2))
    in_tiles(rows, x, qk_tiles.KEYS)
    in_tiles(rows, q, qk_tiles.QUERIES)
    s = SimpleNamespace(qk_tiles=[rows], k=[tile(k)], firsts=Memory([None] * (4 * K)),
                        whole=SimpleNamespace(steps=Memory([None] * (5 * K))))
    g = SimpleNamespace(own=SimpleNamespace(A_log=A_log.tolist(), bias=bias.tolist(), bound=bound), tokens=tokens)
    of, t = Blocks(None, of_columns(2), 4), SimpleNamespace(head=head)
    for now.thread in range(128):
        mine = of.begin(g, t)
        of.put_rows(g, s, (1, 0), mine)
    for now.thread in range(128):
        of.join_steps(s, 0)
    gates = bound * (A_log[head].double().exp() * (x + bias.double().view(3, K)[head])).sigmoid()
    gates[tokens - 64:] = 0
    a = gates.exp()
    decay = torch.stack([torch.stack([a[j + 1:i + 1].prod(0) for j in range(CHUNK)]) for i in range(CHUNK)])
    queries, keys, started = in_tiles(rows, None, qk_tiles.QUERIES), back(s.k[0]), in_tiles(rows, None, qk_tiles.KEYS)
    steps = torch.tensor(list(s.whole.steps), dtype=torch.float64).view(5, K)
    close = dict(rtol=1e-5, atol=0)
    behind = torch.stack([a[i + 1:].prod(0) for i in range(CHUNK)])
    for first in range(0, CHUNK, EDGE):
        block, n = slice(first, first + EDGE), first // EDGE
        for rows, of_rows in ((queries, q), (started, k)):
            found = torch.einsum("ic,jc->ijc", rows[block], keys[block])
            want = torch.einsum("ic,jc,ijc->ijc", of_rows[block], k[block], decay[block, block])
            lower = torch.ones(EDGE, EDGE).tril().bool()
            torch.testing.assert_close(found[lower], want[lower], **close)
        torch.testing.assert_close(queries[block] * steps[:n + 1].prod(0), (q * a.cumprod(0))[block], **close)
        torch.testing.assert_close(keys[block] * steps[n + 1:].prod(0), (k * behind)[block], **close)


def held(now, x):
    """A lane's registers of a warp's product of 16 x 16, as tensor cores leave them."""
    row, col = now.thread % 32 // 4, 2 * (now.thread % 4)
    return {(2 * r + e, 0, n): x[row + 8 * r, col + 8 * n + e].item() for r, n, e in pairs.elements()}


def test_scores_and_their_places(now):
    torch.manual_seed(0)
    x, factors = torch.randn(4, EDGE, EDGE, dtype=torch.float64), torch.randn(4, EDGE, dtype=torch.float64)
    for diagonal, above in itertools.product((True, False), repeat=2):
        to = Memory([(0.0, 0.0)] * (CHUNK * CHUNK // 2))
        for now.thread in range(128):
            warp, row = now.thread // 32, now.thread % 32 // 4
            mine = held(now, x[warp])
            of_rows = factors[warp, [row, row + 8]].tolist()
            pairs.keep(mine, diagonal, lambda r, n, e, of_rows=of_rows: of_rows[r], above=above)
            pairs.put_block(pairs.block_words(to), mine, None)
        want = x * factors[:, :, None]
        want = torch.block_diag(*want.triu(1 - diagonal) if above else want.tril(diagonal - 1))
        assert torch.equal(back(to, CHUNK), want)


def test_two_parts_of_the_inverse(now, monkeypatch):
    """Side by side, the second one as `rest_of` has it; together they are the numbers within 2^-16."""
    torch.manual_seed(0)
    monkeypatch.setattr(pairs, "_cvt2", lambda x, y, dtype: tuple(torch.tensor([x, y]).bfloat16().tolist()))
    x, to = torch.randn(4, EDGE, EDGE, dtype=torch.float64), Memory([(0.0, 0.0)] * (CHUNK * CHUNK // 2))
    for now.thread in range(128):
        pairs.put_two(to, held(now, x[now.thread // 32]), None)
    found = back(to, CHUNK)
    for block in range(4):
        rows, (first, count) = slice(EDGE * block, EDGE * block + EDGE), pairs.rest_of(block)
        upper, rest = found[rows, rows], found[rows, first:first + count]
        assert torch.equal(upper, x[block].bfloat16().double())
        assert ((upper + rest - x[block]).abs() <= 2.0**-16 * x[block].abs()).all() and rest.any()


def test_places_of_the_inverse(now):
    """Each warp's L is a matrix of its own, and what comes back is the lane's part of the inverse."""
    torch.manual_seed(0)
    lower = torch.randn(4, EDGE, EDGE, dtype=torch.float64).tril(-1)
    memory = Memory([math.nan] * (EDGE * PITCH))
    of, seen = BlockInverse(), []
    of.inverse = SimpleNamespace(solve=lambda at, first, j: seen.append((first, j)), pair=lambda at, first: None)
    now.stop = True
    for now.thread in range(128):
        with pytest.raises(StopIteration):
            of.invert(memory, held(now, lower[now.thread // 32]))
    now.stop = False
    places = [[[(col * PITCH) + EDGE * warp + row for col in range(EDGE)] for row in range(EDGE)] for warp in range(4)]
    for warp in range(4):
        there = torch.tensor([[memory[at] for at in row] for row in places[warp]], dtype=torch.float64)
        assert torch.equal(there, lower[warp])
    inverse = torch.linalg.inv(torch.eye(EDGE, dtype=torch.float64) + lower)
    for now.thread in range(128):
        warp = now.thread // 32

        def pair(at, first, warp=warp):
            for row in range(EDGE):
                for col in range(EDGE):
                    memory[places[warp][row][col]] = inverse[warp, row, col].item()

        of.inverse.pair = pair
        for turned in (False, True):
            of.invert(memory, mine := held(now, lower[warp]), turned)
            assert mine == pytest.approx(held(now, inverse[warp].mT.triu() if turned else inverse[warp].tril()))
    assert set(seen) == {(8 * half, j) for half in range(2) for j in range(8)}


@pytest.mark.parametrize("more", [{}, dict(updates=True, blocks=True), dict(reverse=True, dot=True, blocks=True)])
def test_gates_of_blocks(now, monkeypatch, more):
    """Of each block the running sums, what two tokens have between them, and the state's factors; gates that forget."""
    torch.manual_seed(0)
    gates, beta = -3 * torch.rand(CHUNK, dtype=torch.float64), torch.rand(CHUNK, dtype=torch.float64)
    gates[21] = -1000.0
    logs = (gates / math.log(2)).clamp(min=scores.LOWEST)
    sums = logs.view(4, EDGE).cumsum(1).flatten()
    of = BlockScores(LinearSpec("bf16", K, K, "token", delta="fp32", **more), None)
    to = Factors(*(Memory([None] * 64) for _ in range(5)))
    for warp in range(4):
        with monkeypatch.context() as at_once:
            at_once.setattr(scores.tk, "lane_id", lambda: numpy.arange(32))
            at_once.setattr(scores, "cutlass", warp_emulation.NAMES["cutlass"])
            at_once.setattr(scores.cute.arch, "shuffle_sync_up", lambda x, offset, mask_and_clamp:
                            warp_emulation.shifted_up(x, offset), raising=False)
            lanes = of.running(logs[EDGE * warp + numpy.arange(32) % EDGE].numpy()).tolist()
        assert lanes == pytest.approx(sums[EDGE * warp:][:EDGE].tolist() * 2)
        monkeypatch.setattr(scores.cute.arch, "shuffle_sync", lambda x, lane, of=lanes: (
            x if isinstance(x, list) else of)[lane], raising=False)
        for now.thread in range(32 * warp, 32 * warp + 32):
            row, col = now.thread % 32 // 4, 2 * (now.thread % 4)
            decay, behind = (of.decays(lanes[now.thread % 32], above) for above in (False, True))
            betas = of.betas([beta[EDGE * warp + i % EDGE].item() for i in range(32)])
            for r, n, e in pairs.elements():
                i, j = EDGE * warp + row + 8 * r, EDGE * warp + col + 8 * n + e
                if j <= i:
                    assert decay(r, n, e) == pytest.approx(2.0**(sums[i] - sums[j]).item())
                else:
                    assert behind(r, n, e) == pytest.approx(2.0**(sums[j] - sums[i]).item())
                assert betas(r, n, e) == beta[j if more else i]
            here = EDGE * warp + now.thread % EDGE
            of.put_factors(SimpleNamespace(scale=0.5), to, (lanes[now.thread % 32], beta[here].item()), 0)
    begun, last = 2.0**sums, sums.view(4, EDGE)[:, -1]
    left = 2.0**(last.repeat_interleave(EDGE) - sums)
    erase = begun / 0.5 if of.reverse else begun if more else beta * begun
    begun, left = (left, begun) if of.reverse else (begun, left)
    for found, want in ((to.at_query, 0.5 * begun), (to.beta, beta), (to.erase, erase), (to.to_end, left),
                        (to.total[:4], 2.0**last)):
        assert list(found) == pytest.approx(want.tolist())


@pytest.mark.parametrize("panels", [1, 2])
def test_units_of_a_chunk(panels):
    """Each has a place of its own; a block's queries are behind its keys, and stages are apart."""
    of = of_columns(panels)
    places = [of.at(*at) for at in itertools.product(range(3), range(4), range(panels), range(2))]
    assert places == list(range(3 * 4 * panels * 2))
    assert of.at(1, 2, 0, qk_tiles.QUERIES) == of.at(1, 2, 0, qk_tiles.KEYS) + 1


def test_which_launches_go_by_blocks():
    forward = dict(dtype="bf16", head_dim=128, value_dim=128, gate="token", delta="fp32")
    assert by_blocks(LinearSpec(**forward)) and not by_blocks(LinearSpec(**forward), 1)
    for more in (dict(updates=True), dict(reverse=True, dot=True)):
        assert by_blocks(LinearSpec(**forward | more, blocks=True))
        for not_so in (dict(head_dim=96), dict(value_dim=64), dict(inverse="in"), dict(updates=False, dot=False)):
            with pytest.raises(ValueError, match="LinearSpec: (blocks|dot)"):
                LinearSpec(**forward | more | not_so, blocks=True)
    for more in (dict(delta=None), dict(updates=True, inverse="out"), dict(reverse=True, dot=True, inverse="in"),
                 dict(head_dim=96), dict(value_dim=64), dict(checkpoints="fp32"), dict(head_dim=256)):
        assert not by_blocks(LinearSpec(**forward | more))


def test_bounds_that_blocks_allow():
    """A half of a block is at most MOST."""
    assert 8 * -LOWEST * math.log2(math.e) == pytest.approx(MOST) and config.COLUMNS == K
    q, v, x = (torch.empty(1, 8, 2, K, dtype=torch.bfloat16) for _ in range(3))
    assert supported(q, v, x, -5) and supported(q, v, x, LOWEST)
    for bound in (LOWEST - 1e-3, 0.0, 1.0, None, True, math.nan, -math.inf):
        assert not supported(q, v, x, bound)
    for a, b, c in ((q, v, x.float()), (q, v, x[:, :4]), (q, v[..., :64], x), (q[..., :64], v, x[..., :64]),
                    (q, v, torch.empty(1, 8, 2, K + 1, dtype=torch.bfloat16)[..., 1:])):
        assert not supported(a, b, c, -5.0)


@pytest.mark.parametrize("given", [dict(l2norm=False), dict(pool="int32"), dict(head_dim=64), dict(value_dim=64)])
def test_what_a_spec_refuses(given):
    with pytest.raises(ValueError, match="ChannelSpec: (bounded|pool)"):
        ChannelSpec(**dict(dtype="bf16", head_dim=K, value_dim=128, delta="fp32", l2norm=True, bounded=True) | given)


