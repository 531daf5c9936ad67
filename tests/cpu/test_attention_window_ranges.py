"""Strips of windows: each row is in one task, which visits what it sees; and the kernel's roles, that wait for each
other, come to an end."""
from collections import deque

from hypothesis import example, given, settings
from hypothesis import strategies as st

from tkq.attention.ranges import Extent, keys_of_row
from tkq.attention.window_ranges import (
    LOWER,
    ROWS,
    TILE,
    UPPER,
    bands_of,
    ends_of,
    first_row,
    place,
    segments_of,
    span_of,
    told,
)

# As the plan takes them: no more queries than keys, and a left limit of 512 or more.
EXTENTS = st.builds(
    lambda rows, more, left, right: Extent(rows, rows + more, ROWS, TILE, left, right), st.integers(1, 6000),
    st.sampled_from((0, 0, 1, 63, 64, 128)) | st.integers(0, 4000),
    st.sampled_from((512, 575, 576, 577, 1023, 1024)) | st.integers(512, 3000),
    st.sampled_from((0, 0, 1, 63, 64, 511)) | st.integers(0, 6000))
SHIFTS = st.sampled_from((1, 2))


def strips_of(e, heads, shift):
    """(span, the strips with tasks in them, in order)"""
    span = span_of(e)
    segments = segments_of(e.rows_q, span)
    number = bands_of(segments) * span * heads
    strips = [place(i, span, segments, heads, max(heads // 2, 1), shift, e.rows_q) for i in range(number)]
    return span, [strip for strip in strips if strip.low < strip.high]


@settings(max_examples=60)
@example(Extent(6000, 6000, ROWS, TILE, 576, 511), 1, 1)  # the last rows see as much as others, but not as many tiles
@example(Extent(5888, 6016, ROWS, TILE, 1023, 64), 1, 1)
@given(EXTENTS, st.integers(1, 3), SHIFTS)
def test_each_row_has_one_task_which_visits_what_it_sees(e, heads, shift):
    span, strips = strips_of(e, heads, shift)
    found = []
    for strip in strips:
        ends = ends_of(e, strip, span)
        for wg in (0, 1):
            at, before = ends[1], None
            for s in range(strip.high - 1, strip.low - 1, -1):
                t = told(e, strip, span, ends, s, wg)
                assert t["before"] >= 0 and t["after"] >= 0
                at -= t["before"]
                if t["blocks"]:
                    assert at == t["first"] + t["blocks"], "the warpgroup is elsewhere in the strip"
                    found.append((strip.head, first_row(t["tile"], wg)))
                    visits(e, t, first_row(t["tile"], wg))
                    at = t["first"]
                assert not t["chained"] or (t["after"] == 0 and s > strip.low)
                if before and before["chained"]:  # over the last product of these rows: one of the two is whole
                    assert t["blocks"] and not (before["cut"] == UPPER and t["cut"] == LOWER)
                before = t
                at -= t["after"]
            assert at == ends[0]
    assert sorted(found) == [(head, row) for head in range(heads) for row in range(0, e.rows_q, ROWS)]


def visits(e, t, row):
    """Nothing that rows row .. row + 63 see is left out, and what they do not see is masked."""
    assert not t["cut"] or t["masked"] + t["masked_left"] < t["blocks"]
    assert t["cut"] != LOWER or t["masked"] == 1
    last = t["first"] + t["blocks"] - 1
    start = t["first"] * TILE + (t["cut"] == UPPER) * (TILE // 2)
    end = (last + 1) * TILE - (t["cut"] == LOWER) * (TILE // 2)
    for r in {row, min(row + ROWS, e.rows_q) - 1}:
        first_key, end_key = keys_of_row(e, r)
        assert start <= first_key and end_key <= end
        assert end_key >= (last + 1 - t["masked"]) * TILE or t["masked"] == t["blocks"]
        assert first_key <= (t["first"] + t["masked_left"]) * TILE or t["masked"] + t["masked_left"] == t["blocks"]


def test_a_window_of_1024_keys_is_eight_tiles_and_a_half():
    for left, right in ((1023, 0), (512, 511), (1024, 0)):
        e = Extent(16384, 16384, ROWS, TILE, left, right)
        span, strips = strips_of(e, 1, 1)
        tasks = [told(e, strip, span, ends_of(e, strip, span), s, wg)
                 for strip in strips for s in range(strip.low, strip.high) for wg in (0, 1)]
        inside = [t["blocks"] - 0.5 * (t["cut"] > 0) for t in tasks if 16 <= t["tile"] < 112]
        assert span == 9 and set(inside) == {8.5}


# ---- who waits for whom ------------------------------------------------------------------------------------------


def producer(e, strips, span):
    """What it waits for and loads, in order, as ``WindowProducer`` does."""
    for strip in strips:
        ends = ends_of(e, strip, span)
        bottom, top = ends
        segment = strip.high - 1
        yield "k", top - 1
        yield from (("q", wg, told(e, strip, span, ends, segment, wg)) for wg in (0, 1))
        hindmost = min(first_row(tile, wg) for wg, tile in enumerate(strip.tiles)) + segment * span * TILE
        begun = (hindmost + e.rows_k - e.rows_q + ROWS - 1 + e.right) // TILE - 1
        for tile in range(top - 2, bottom, -1):
            yield "k", tile
            yield "v", tile + 1
            if tile <= begun and segment > strip.low:
                segment, begun = segment - 1, begun - span
                yield from (("q", wg, told(e, strip, span, ends, segment, wg)) for wg in (0, 1))
        assert segment == strip.low, "rows are left out"
        if top - bottom > 1:
            yield from (("k", bottom), ("v", bottom + 1))
        yield "v", bottom
    for wg in (0, 1):
        yield "q", wg, None


def consumer(bridge):
    """What it waits for ("wait", ring, tile it expects) and releases, as ``WindowConsumer`` does. Is sent each task."""
    def passing(n):
        for _ in range(n):
            for ring in "kv":
                yield "wait", ring, None
                yield "release", ring

    chained = False
    while True:
        if not chained:
            t = yield "wait", "q", None
            if t is None:
                return
            yield from passing(t["before"])
            if not t["blocks"]:
                yield "release", "q"
                yield from passing(t["after"])
                continue
            yield "wait", "k", t["first"] + t["blocks"] - 1
            yield "release", "k"
        for tile in range(t["first"] + t["blocks"] - 2, t["first"] - 1, -1):
            yield from (("wait", "k", tile), ("wait", "v", tile + 1), ("release", "k"), ("release", "v"))
        yield "release", "q"
        last, chained = t, bridge and t["chained"]
        if chained:
            t = yield "wait", "q", None
            yield from (("wait", "k", t["first"] + t["blocks"] - 1), ("wait", "v", last["first"]))
            yield from (("release", "k"), ("release", "v"))
        else:
            yield "wait", "v", last["first"]
            yield "release", "v"
        yield from passing(last["after"])


def play(e, strips, span, bridge, stages):
    """Each goes on as far as it can: in which order they do makes no difference."""
    loads = deque(producer(e, strips, span))
    rings = [dict(k=deque(), v=deque(), q=deque()) for _ in (0, 1)]  # what is loaded, and not yet waited for
    free = [dict(stages, q=2) for _ in (0, 1)]  # places, as each warpgroup has left them
    roles = [consumer(bridge) for _ in (0, 1)]
    asks = [next(role) for role in roles]
    while True:
        moved = False
        while loads:
            ring, *what = loads[0]
            mine = (what[0],) if ring == "q" else (0, 1)
            if not all(free[wg][ring] for wg in mine):
                break
            for wg in mine:
                free[wg][ring] -= 1
                rings[wg][ring].append(what[-1])
            moved = bool(loads.popleft())
        for wg in (0, 1):
            while asks[wg]:
                what, ring, *expected = asks[wg]
                if what == "wait" and not rings[wg][ring]:
                    break
                got = rings[wg][ring].popleft() if what == "wait" else None
                assert not expected or expected[0] in (None, got), "another tile than the rows see"
                free[wg][ring] += what == "release"
                moved, asks[wg] = True, advance(roles[wg], got if ring == "q" else None)
        if not moved:
            return not loads and asks == [None, None]


def advance(role, got):
    try:
        return role.send(got)
    except StopIteration:
        return None


@settings(max_examples=60)
@given(EXTENTS, st.integers(1, 2), SHIFTS, st.sampled_from((1, 2, 5)), st.booleans(), st.integers(2, 3))
def test_the_roles_do_not_wait_for_each_other_in_a_circle(e, heads, shift, blocks, bridge, v_stages):
    span, strips = strips_of(e, heads, shift)
    for b in range(blocks):
        assert play(e, strips[b::blocks], span, bridge, dict(k=2, v=v_stages)), "they wait for ever"
