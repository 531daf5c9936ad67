"""The tasks and tiles of attention's backward over packed sequences, as the kernels' own functions find them, against
counting one by one."""
import random
from collections import Counter
from functools import lru_cache
from types import SimpleNamespace

import numpy
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from tests.helpers.emulation.warp import Memory, instead_of_the_dsl
from tests.helpers.emulation.written import as_written
from tkq.attention.backward import helper_warps, tile_scheduler
from tkq.attention.backward.config import BackwardConfig
from tkq.attention.backward.helper_warps import HelperWarps
from tkq.attention.backward.spec import BackwardSpec
from tkq.attention.backward.tile_scheduler import TileScheduler
from tkq.attention.common import bounds, sequences
from tkq.attention.common.integers import ceil_div
from tkq.attention.common.operands import Sequences
from tkq.attention.common.sequences import VarlenBatch

SIZES = st.sampled_from((0, 0, 1, 5, 63, 64, 65, 127, 128, 129, 300, 1000))
LENGTHS = st.one_of(st.lists(st.tuples(SIZES, SIZES), min_size=1, max_size=6),
                    *[st.lists(st.tuples(SIZES, SIZES), min_size=n, max_size=n) for n in (30, 31, 32, 33)])
SLOWLY = settings(max_examples=15, deadline=None, suppress_health_check=list(HealthCheck))


class Simulated(VarlenBatch):
    """The functions that cute.jit decorates, as they are written. What is asked for again is not worked out again."""

    @lru_cache(None)  # noqa: B019  (as many as examples)
    def sequence_of(self, of_keys, size, slot):
        return as_written(VarlenBatch.sequence_of)(self, of_keys, size, slot)

    @lru_cache(None)  # noqa: B019
    def longest_first(self, of_keys, size, slot):
        return as_written(VarlenBatch.longest_first)(self, of_keys, size, slot)


@pytest.fixture(autouse=True)
def warp(monkeypatch):
    instead_of_the_dsl(monkeypatch, sequences, tile_scheduler, helper_warps, bounds)


def disturb(cu, total, seed):
    """cu_seqlens that mean the same: with falling, negative and huge numbers in them."""
    draw, found = random.Random(seed), list(cu)
    for i, n in enumerate(cu):
        if i == 0 or n == cu[i - 1]:  # an empty sequence ends where it begins, or before
            found[i] = draw.choice((n, n - 1, n // 2, 0, -1, -(1 << 31))) if i else draw.choice((0, -5, -(1 << 31)))
        elif n == total:
            found[i] = draw.choice((n, n + 1, (1 << 31) - 1))
    return found


class Problem:
    """lengths: (queries, keys) of each sequence. spare: rows behind the last one. in_use: of each, or None. disturbed:
    the seed of ``disturb``, or None."""

    def __init__(self, lengths, spare=(0, 0), in_use=None, heads=2, kv_heads=1, causal=True, tile=64, disturbed=None):
        self.lengths, self.in_use = lengths, in_use or lengths
        cu = [numpy.cumsum([0, *n]) for n in zip(*lengths)]
        self.starts, totals = cu, [int(c[-1]) + n for c, n in zip(cu, spare)]
        used = [Memory(n) for n in zip(*in_use)] if in_use else (None, None)
        self.rows = [(*rows,) for rows in self.in_use] + [tuple(spare)]  # the last: of no sequence
        self.config = BackwardConfig(tile=tile)
        self.spec = BackwardSpec(varlen=True, right=causal)
        given = cu if disturbed is None else [disturb(c, n, disturbed) for c, n in zip(cu, totals)]
        self.layout = Simulated(Sequences(*map(Memory, given), *used), *totals)
        self.g = SimpleNamespace(
            layout=self.layout, heads=heads, kv_heads=kv_heads, heads_per_kv=heads // kv_heads, left=None, right=0,
            tail_heads=0, l2_section=128 * 8 * min(heads // kv_heads, 16), tiles=self.layout.slots(False, tile),
            helper_warps=SimpleNamespace(zero_ahead=2 * ceil_div(self.config.block, tile)))

    def tasks(self):
        """In their order."""
        kernel = TileScheduler(self.spec, self.config)
        blocks = self.layout.slots(True, self.config.block)
        return [as_written(kernel.find_task)(kernel, self.g, i) for i in range(blocks * self.g.kv_heads)]

    def tiles(self):
        """Likewise, of all query heads."""
        kernel = HelperWarps(self.spec, self.config, TileScheduler(self.spec, self.config))
        return [kernel.tile(self.g, n) for n in range(self.g.tiles * self.g.heads)]


@st.composite
def problems(draw):
    lengths = draw(LENGTHS)
    in_use = draw(st.none() | st.just([(q // 2, k - k // 3) for q, k in lengths])
                  | st.just([(q * (s % 2), k * (s % 3 > 0)) for s, (q, k) in enumerate(lengths)]))
    heads, kv_heads = draw(st.sampled_from(((1, 1), (2, 1), (4, 2), (3, 3))))
    return Problem(lengths, draw(st.sampled_from(((0, 0), (1, 0), (0, 200), (300, 77)))), in_use, heads, kv_heads,
                   draw(st.booleans()), draw(st.sampled_from((64, 128))), draw(st.none() | st.integers(0, 99)))


@SLOWLY
@given(problems())
def test_each_block_of_each_sequence_is_one_task(problem):
    block, count = problem.config.block, len(problem.lengths)
    found = Counter((t.sequence, t.head, t.block) for t in problem.tasks() if t.block * block < t.rows_k)
    wanted = {(s, head, i) for s, (_, keys) in enumerate(problem.rows) for head in range(problem.g.kv_heads)
              for i in range(ceil_div(keys, block))}
    assert set(found) == wanted and set(found.values()) <= {1}
    for t in problem.tasks():
        rows_q, rows_k = problem.rows[t.sequence]
        starts = [start[min(t.sequence, count)] for start in problem.starts]
        assert (t.rows_q, t.rows_k) == (rows_q if t.sequence < count else 0, rows_k)
        assert t.batch_k == starts[1] + rows_k and t.batch_q == starts[0] + t.rows_q


@SLOWLY
@given(problems())
def test_each_tile_of_each_sequence_comes_once_and_has_a_place_of_its_own(problem):
    tile, count = problem.config.tile, len(problem.lengths)
    tiles = problem.tiles()
    found = Counter((at.sequence, at.head, at.number) for at in tiles if at.number * tile < at.rows_q)
    wanted = {(s, head, i) for s, (rows, _) in enumerate(problem.rows) for head in range(problem.g.heads)
              for i in range(ceil_div(rows, tile))}
    assert set(found) == wanted and set(found.values()) <= {1}
    assert all(at.start_q == problem.starts[0][min(at.sequence, count)] for at in tiles)
    places = [problem.layout.first_tile(at, tile, problem.g.heads, problem.g.tiles) + at.head * problem.g.tiles
              + at.number for at in tiles]
    assert sorted(places) == list(range(problem.g.tiles * problem.g.heads))


@SLOWLY
@given(problems())
def test_sequences_of_more_queries_come_first(problem):
    """Up to 31; what is behind the last one comes last. More of them come in their own order."""
    count = len(problem.lengths)
    for found in ([t.sequence for t in problem.tasks()], [at.sequence for at in problem.tiles()]):
        order = list(dict.fromkeys(found))
        assert found == sorted(found, key=order.index), "a sequence's are together"
        if count >= 32:
            assert order == sorted(order)
        else:
            assert order == sorted(order, key=lambda s: (s == count, -problem.rows[s][0], s))


@SLOWLY
@given(problems())
def test_no_task_waits_for_what_waits_for_it(problem):
    """dQ of a tile is written when all tasks of its head are done. Tasks are begun in their order, each when all of its
    head's tiles are zero; so tiles are zeroed ahead at least up to what the tasks before the head's last one need."""
    g, config = problem.g, problem.config
    kernel, tiles = HelperWarps(problem.spec, config, TileScheduler(problem.spec, config)), problem.tiles()
    of_head = lambda at: (at.sequence, at.head // g.heads_per_kv)
    last_tile = {of_head(at): n for n, at in enumerate(tiles) if at.number * config.tile < at.rows_q}
    needed, most = {}, -1
    for t in problem.tasks():
        if t.block * config.block < t.rows_k:
            most = max(most, last_tile.get((t.sequence, t.head), -1))
            needed[t.sequence, t.head] = most
    for n, at in enumerate(tiles):
        if at.number * config.tile < at.rows_q and of_head(at) in needed:
            assert n + kernel.zero_ahead(g, at) > needed[of_head(at)]
