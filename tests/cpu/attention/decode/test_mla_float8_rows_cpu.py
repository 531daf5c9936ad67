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
    source = textwrap.dedent(inspect.getsource(getattr(producer.PlacedProducer, method, None) or getattr(producer, method)))
    found = dict(vars(producer), Int32=int, Int64=int, lane_now=lambda: thread % 32,
                 tk=SimpleNamespace(warp_id=lambda: thread // 32, lane_id=lambda: thread % 32),
                 cutlass=SimpleNamespace(select_=lambda some, a, b: a if some else b),
                 cute=SimpleNamespace(arch=SimpleNamespace(cp_async_commit_group=lambda: None)), **names)
    exec(source, found)
    return found[method]


def _placed(thread):
    found = SimpleNamespace(place=lambda tile, stage: _traced("place", thread)(None, tile, stage),
                            fetch_scales=lambda smem, half: None, config=SimpleNamespace(rows_ahead=2))
    found.own = lambda *of: _traced("own", thread)(found, *of)
    return found


def _widened(half):
    """({shared address of 16 bytes: [(thread, order, the words and scale that they are made of)]}, {shared address of 16
    e4m3: [(thread, order)]}), of all threads."""
    written, read = {}, {}
    for thread in range(128):
        order = itertools.count()

        def store(at, words, thread=thread, order=order):
            written.setdefault(at, []).append((thread, next(order), words))

        def load(at, offset, thread=thread, order=order):
            read.setdefault(at + offset, []).append((thread, next(order)))
            return [at + offset + 4 * i for i in range(4)]
        _traced("rows_in_place", thread, load16_shared=load, store16=store, load_f32=lambda at, offset: at + offset,
                scaled4=lambda word, scale: [(word, scale, 0), (word, scale, 1)])(
                    _placed(thread), SMEM, half, TILE, STAGE)
    return written, read


def _raw(row, chunk):
    """Where 16 columns of half of a row lie as they are."""
    return STAGE_BYTES + row // 16 * 2048 + chunk // 8 * 2 * 8192 + producer.vector(row % 16, chunk % 8)


@pytest.mark.parametrize("half", [0, 1])
def test_each_eight_columns_have_their_place(half):
    """As TMA would swizzle a tile of bf16, each written once, by its group's scale."""
    written, _ = _widened(half)
    assert len(written) == 64 * 32
    for row, chunk in itertools.product(range(64), range(32)):
        raw = _raw(row, chunk // 2) + chunk % 2 * 8
        scale = SCALES + half * 1024 + row * 16 + half * 8 + chunk // 16 * 4
        place = STAGE_BYTES + chunk // 8 * 8192 + row * 128 + (chunk % 8 ^ row % 8) * 16
        wanted = [(raw + 4 * word, scale, i) for word in range(2) for i in range(2)]
        [(_, _, words)] = written[place]
        assert words == wanted


def test_columns_are_widened_over_themselves():
    """What is written where columns are as they are is written by the thread that read them, later."""
    written, read = _widened(0)
    assert sorted(read) == sorted(_raw(row, chunk) for row in range(64) for chunk in range(16))
    for place, [(thread, order)] in read.items():
        [(writer, when, _)] = written[place]
        assert writer == thread and when > order


@pytest.mark.parametrize("half", [0, 1])
def test_copies_come_to_where_they_are_read(half):
    found, banks = {}, {}
    for thread in range(128):
        count = itertools.count()
        own = [_traced("row_copied", thread)(thread % 32, group) for group in range(4)]
        rows = [(row, 10_000 * (thread // 32 * 16 + row) + 16) for row in own]

        def copy(to, at, size, place=(thread // 8, count)):
            found.setdefault(to, []).append((at, size))
            banks.setdefault((place[0], next(place[1])), set()).add(to % 128)
        _traced("fetch", thread, copy16=copy)(_placed(thread), SMEM, TILE, STAGE, half, rows)
    assert found == {_raw(row, chunk): [(10_000 * row + 16 + half * 256 + chunk * 16, 16)]
                     for row in range(64) for chunk in range(16)}
    assert all(len(places) == 8 for places in banks.values())


def test_rotated_columns_have_their_place():
    found, banks = {}, {}
    for thread in range(128):
        count = itertools.count()
        rows = [(row, 10_000 * (thread // 32 * 16 + row)) for row in (
            _traced("row_copied", thread)(thread % 32, group) for group in range(4))]

        def copy(to, at, size, place=(thread // 8, count)):
            found.setdefault(to, []).append(at)
            banks.setdefault((place[0], next(place[1])), set()).add(to % 128)
        _traced("rotated", thread, copy16=copy)(_placed(thread), SimpleNamespace(rope=TILE), STAGE, rows)
    assert found == {STAGE_BYTES + row * 128 + (chunk ^ row % 8) * 16: [10_000 * row + 528 + chunk * 16]
                     for row in range(64) for chunk in range(8)}
    assert all(len(places) == 8 for places in banks.values())


def test_eight_lanes_have_banks_of_their_own():
    """What eight lanes read or write at a time."""
    written, read = _widened(0)
    times = {}
    for place, [(thread, order, *_)] in (*written.items(), *read.items()):
        times.setdefault((thread // 8, order), set()).add(place % 128)
    assert all(len(places) == 8 for places in times.values())
