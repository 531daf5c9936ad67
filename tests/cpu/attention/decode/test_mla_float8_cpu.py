"""Where the producer warps of float8 rows put what they widen: their code, run thread by thread over addresses."""
import inspect
import itertools
from types import SimpleNamespace

import pytest

from tkq.attention.mla import float8

RAW, SCALES, STAGE_BYTES = 1_000_000, 2_000_000, 64 * 256 * 2


def _at(address):
    return SimpleNamespace(iterator=SimpleNamespace(toint=lambda: address))


def _widened(half):
    """{shared address of 16 bytes: the words and scales that they are made of}, of all lanes."""
    source, found = inspect.getsource(float8.widen_half), {}
    source = source[source.index("def widen_half"):].replace(": cutlass.Constexpr[int]", "")
    smem, tile = SimpleNamespace(raw=_at(RAW), scales=_at(SCALES)), SimpleNamespace(
        staged=_at(0), type=SimpleNamespace(bytes=STAGE_BYTES))
    for thread in range(128):
        names = dict(
            vars(float8), Int32=int, cutlass=SimpleNamespace(range_constexpr=range),
            lane_now=lambda: thread % 32, tk=SimpleNamespace(warp_id=lambda: thread // 32),  # noqa: B023  (called at once)
            load16_shared=lambda at, offset: [at + offset + 4 * i for i in range(4)],
            load_f32=lambda at, offset: at + offset,
            scaled4=lambda word, scale: [(word, scale, 0), (word, scale, 1)],
            store16=lambda at, words, offset: found.setdefault(at + offset, []).append(words))
        exec(source, names)
        names["widen_half"](smem, half, tile, 1)
    return found


@pytest.mark.parametrize("half", [0, 1])
def test_each_eight_columns_have_their_place(half):
    """As TMA would swizzle a tile of bf16, each written once, by its group's scale."""
    found = _widened(half)
    assert len(found) == 64 * 32
    for row, chunk in itertools.product(range(64), range(32)):
        raw = RAW + half * 64 * 256 + float8.raw_chunk(row, chunk // 2) + chunk % 2 * 8
        scale = SCALES + half * 1024 + row * 16 + half * 8
        place = STAGE_BYTES + chunk // 8 * 8192 + row * 128 + (chunk % 8 ^ row % 8) * 16
        wanted = [(raw + 4 * word, scale + chunk // 16 * 4, i) for word in range(2) for i in range(2)]
        assert found[place] == [wanted]


def test_rows_beside_each_other_lie_in_other_banks():
    """Each row's sixteen times 16 bytes once; of the eight lanes that load at a time each has banks of its own."""
    assert sorted(float8.raw_chunk(r, c) for r in range(16) for c in range(16)) == list(range(0, 4096, 16))
    for row, panel in itertools.product(range(0, 16, 2), range(4)):
        places = {float8.raw_chunk(row + upper, 4 * panel + part) % 128 for upper in range(2) for part in range(4)}
        assert len(places) == 8
