"""Where the producer warps of float8 rows put what they copy and widen: their code, run thread by thread over addresses."""
import inspect
import itertools
import textwrap
from types import SimpleNamespace

import pytest

from tkq.attention.mla import placed_producer as producer

SCALES, STAGE_BYTES, STAGE = 2_000_000, 64 * 256 * 2, 1
TILE = SimpleNamespace(staged=SimpleNamespace(iterator=SimpleNamespace(toint=lambda: 0)),
                       type=SimpleNamespace(bytes=STAGE_BYTES))
SMEM = SimpleNamespace(scales=SimpleNamespace(iterator=SimpleNamespace(toint=lambda: SCALES)))


def _traced(method, thread, **names):
    """A method of the producer with plain numbers, as the thread runs it."""
    source = textwrap.dedent(inspect.getsource(getattr(producer.PlacedProducer, method)))
    found = dict(vars(producer), Int32=int, Int64=int, lane_now=lambda: thread % 32,
                 tk=SimpleNamespace(warp_id=lambda: thread // 32, lane_id=lambda: thread % 32),
                 cutlass=SimpleNamespace(select_=lambda some, a, b: a if some else b),
                 cute=SimpleNamespace(arch=SimpleNamespace(cp_async_commit_group=lambda: None)), **names)
    exec(source, found)
    return found[method]


def _placed(thread):
    return SimpleNamespace(place=lambda tile, stage: _traced("place", thread)(None, tile, stage),
                           fetch_scales=lambda smem: None)


def _widened(half):
    """{shared address of 16 bytes: [(step, the words and scales that they are made of)]}, of all threads."""
    found = {}
    for thread in range(128):
        steps = itertools.count()

        def store(at, words, offset, steps=steps):
            found.setdefault(at + offset, []).append((next(steps) // 2, words))
        _traced("rows_in_place", thread, load16_shared=lambda at, offset: [at + offset + 4 * i for i in range(4)],
                load_f32=lambda at, offset: at + offset, store16=store,
                scaled4=lambda word, scale: [(word, scale, 0), (word, scale, 1)])(
                    _placed(thread), SMEM, half, TILE, STAGE)
    return found


def _raw(row, chunk):
    """Where 16 bytes of a row of half of the columns lie as they are."""
    return STAGE_BYTES + producer.WAITING + row // 16 * 2048 + producer.raw_chunk(row % 16, chunk)


@pytest.mark.parametrize("half", [0, 1])
def test_each_eight_columns_have_their_place(half):
    """As TMA would swizzle a tile of bf16, each written once, by its group's scale."""
    found = _widened(half)
    assert len(found) == 64 * 32
    for row, chunk in itertools.product(range(64), range(32)):
        raw = _raw(row, chunk // 2) + chunk % 2 * 8
        scale = SCALES + row * 16 + half * 8
        place = STAGE_BYTES + chunk // 8 * 8192 + row * 128 + (chunk % 8 ^ row % 8) * 16
        wanted = [(raw + 4 * word, scale + chunk // 16 * 4, i) for word in range(2) for i in range(2)]
        assert found[place] == [(row % 16 // 2, wanted)]


def test_rows_are_widened_over_themselves():
    """What a step writes no later step reads, and no other warp."""
    raw = {_raw(row, chunk): row for row in range(64) for chunk in range(16)}
    assert len(raw) == 64 * 16
    for place, [(step, words)] in _widened(0).items():
        if place in raw:
            assert raw[place] % 16 // 2 == step and raw[place] // 16 == (words[0][1] - SCALES) // 256


@pytest.mark.parametrize("half", [0, 1])
def test_copies_come_to_where_they_are_read(half):
    found = {}
    for thread in range(128):
        here = SimpleNamespace(lane_id=lambda: thread % 32)  # noqa: B023  (called at once)
        rows = [(4 * group + here.lane_id() // 8, 10_000 * (thread // 32 * 16 + 4 * group + here.lane_id() // 8) + 16)
                for group in range(4)]
        _traced("fetch", thread, copy16=lambda to, at, size: found.setdefault(to, []).append((at, size)))(
            _placed(thread), SMEM, TILE, STAGE, half, rows)
    assert found == {_raw(row, chunk): [(10_000 * row + 16 + half * 256 + chunk * 16, 16)]
                     for row in range(64) for chunk in range(16)}


def test_rows_beside_each_other_lie_in_other_banks():
    """Of the eight lanes that load at a time each has banks of its own."""
    for row, panel in itertools.product(range(0, 16, 2), range(4)):
        places = {producer.raw_chunk(row + upper, 4 * panel + part) % 128 for upper in range(2) for part in range(4)}
        assert len(places) == 8
