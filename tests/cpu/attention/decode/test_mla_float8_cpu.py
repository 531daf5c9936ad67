"""Where the producer warps of float8 rows put what they copy and widen: their code, run thread by thread over
addresses."""
import inspect
import itertools
import textwrap
from types import SimpleNamespace

import pytest

from tkq.attention.mla import float8, float8_producer

SCALES, STAGE_BYTES, STAGE = 2_000_000, 64 * 256 * 2, 1
TILE = SimpleNamespace(staged=SimpleNamespace(iterator=SimpleNamespace(toint=lambda: 0)),
                       type=SimpleNamespace(bytes=STAGE_BYTES))
SMEM = SimpleNamespace(scales=SimpleNamespace(iterator=SimpleNamespace(toint=lambda: SCALES)), rope=TILE)
ROW = 10_000  # from a row of the cache to the next


def _as_thread(thread, **names):
    """The functions of both modules, of plain numbers, as the thread runs them."""
    found = dict(vars(float8_producer), **vars(float8))
    found.update(Int32=int, Int64=int, lane_now=lambda: thread % 32, **names,
                 tk=SimpleNamespace(warp_id=lambda: thread // 32, lane_id=lambda: thread % 32),
                 cutlass=SimpleNamespace(select_=lambda some, a, b: a if some else b))
    of = float8_producer.Float8Producer
    for function in (float8.row_copied, float8.raw_chunk, float8.rows_in_stage, float8.scales_of, float8.widen_half,
                     float8_producer.size_of, of.fetch, of.rotated):
        exec(textwrap.dedent(inspect.getsource(function)), found)
    return SimpleNamespace(**found)


def _widened(half):
    """({shared address of 16 bytes: [(thread, order, the words and scale that they are made of)]}, {shared address of
    16 e4m3: [(thread, order)]}), of all threads. All of a warp do alike, so that orders are those of the warp."""
    written, read = {}, {}
    for thread in range(128):
        order = itertools.count()

        def store(at, words, offset, thread=thread, order=order):
            written.setdefault(at + offset, []).append((thread, next(order), words))

        def load(at, offset, thread=thread, order=order):
            read.setdefault(at + offset, []).append((thread, next(order)))
            return [at + offset + 4 * i for i in range(4)]
        here = _as_thread(thread, load16_shared=load, store16=store, load_f32=lambda at, offset: at + offset,
                          scaled4=lambda word, scale: [(word, scale, 0), (word, scale, 1)])
        here.widen_half(here.scales_of(SMEM, STAGE), half, TILE, STAGE)
    return written, read


def _raw(row, chunk):
    """Where 16 columns of half of a row lie as they are: in the row's last two panels."""
    return STAGE_BYTES + 2 * 8192 + row // 16 * 2048 + float8.raw_chunk(row % 16, chunk)


def _copied(name, *of):
    """({shared address: [(from where, bytes)]}, the banks of each time of eight lanes). Row 5 is not there."""
    found, banks = {}, {}
    for thread in range(128):
        count = itertools.count()

        def copy(to, at, size, place=(thread // 8, count)):
            found.setdefault(to, []).append((at if size else 0, size))
            banks.setdefault((place[0], next(place[1])), set()).add(to % 128)
        here = _as_thread(thread, copy16=copy)
        rows = [(row, ROW * (thread // 32 * 16 + row)) for row in (here.row_copied(thread % 32, i) for i in range(4))]
        getattr(here, name)(None, *of, (thread % 32, [(row, 0 if at == 5 * ROW else at + 16) for row, at in rows]))
    return found, banks.values()


@pytest.mark.parametrize("half", [0, 1])
def test_each_eight_columns_have_their_place(half):
    """As TMA would swizzle a tile of bf16, each written once, by its group's scale."""
    written, _ = _widened(half)
    assert len(written) == 64 * 32
    for row, chunk in itertools.product(range(64), range(32)):
        raw = _raw(row, chunk // 2) + chunk % 2 * 8
        scale = SCALES + STAGE * 1024 + row * 16 + half * 8 + chunk // 16 * 4
        place = STAGE_BYTES + chunk // 8 * 8192 + row * 128 + (chunk % 8 ^ row % 8) * 16
        [(_, _, words)] = written[place]
        assert words == [(raw + 4 * word, scale, i) for word in range(2) for i in range(2)]


def test_columns_are_widened_over_what_was_read():
    """What is written where columns lie as they are is written by the warp that has read them, behind that."""
    written, read = _widened(0)
    assert sorted(read) == sorted(_raw(row, chunk) for row in range(64) for chunk in range(16))
    for place, [(thread, order)] in read.items():
        [(writer, when, _)] = written[place]
        assert writer // 32 == thread // 32 and when > order


@pytest.mark.parametrize("half", [0, 1])
def test_copies_come_to_where_they_are_read(half):
    """Zeros for a row that is not there."""
    found, banks = _copied("fetch", TILE, STAGE, half)
    assert found == {_raw(row, chunk): [(0, 0) if row == 5 else (ROW * row + 16 + half * 256 + chunk * 16, 16)]
                     for row in range(64) for chunk in range(16)}
    assert all(len(places) == 8 for places in banks)


def test_rotated_columns_have_their_place():
    found, banks = _copied("rotated", SMEM, STAGE)
    assert found == {STAGE_BYTES + row * 128 + (chunk ^ row % 8) * 16:
                     [(0, 0) if row == 5 else (ROW * row + 16 + 528 + chunk * 16, 16)]
                     for row in range(64) for chunk in range(8)}
    assert all(len(places) == 8 for places in banks)


def test_eight_lanes_have_banks_of_their_own():
    """That read or write at a time."""
    written, read = _widened(0)
    times = {}
    for place, [(thread, order, *_)] in (*written.items(), *read.items()):
        times.setdefault((thread // 8, order), set()).add(place % 128)
    assert all(len(places) == 8 for places in times.values())
