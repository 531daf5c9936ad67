"""dQ by first_store: which block stores a tile, which add, which finishes it, and that none waits for ever."""
import random
from collections import Counter, defaultdict
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tkq.attention.backward import catalog
from tkq.attention.backward.dq_first_store import STORED, THERE, FirstStoreDq, owner
from tkq.attention.backward.dq_warpgroup import DqByQueryHead
from tkq.attention.backward.helper_warps import ConvertHelperWarps
from tkq.attention.backward.kernel import BackwardKernel
from tkq.attention.backward.plan import plan
from tkq.attention.backward.spec import BackwardSpec

PARTS, GARBAGE = 2, [-1]  # of a tile: parts, of each of which each warp has its rows; what is there before


class Machine:
    """Thread blocks that each go through tasks: (query heads, tiles of each, block of keys). Of each, four dQ warps,
    which meet at each product, if ``meet``, and when they are through help one of the background to finish ``tiles``.
    Each warp is a generator that yields what it waits for.

    What a warp sends, stores as well as additions, is in flight until it waits for it: nothing lands sooner.

    alone: a warp claims its own rows, with a word of their own. wrong: what is not as in the kernel."""

    def __init__(self, orders, meet, alone=False, tiles=(), wrong=""):
        self.orders, self.meet, self.there, self.wrong = orders, meet, STORED if alone else THERE, wrong
        self.word = lambda tile, warp: (tile, warp if alone else 0)
        self.words, self.arrived, self.added, self.acc = Counter(), Counter(), Counter(), {}
        self.tiles, self.finished = iter(tiles), set()
        self.blocks, self.seen_by = defaultdict(list), defaultdict(list)  # of a head, and of a tile
        for heads, its_tiles, block in (task for order in orders for task in order):
            for head in heads:
                self.blocks[head].append(block)
                for m in its_tiles:
                    self.seen_by[head, m].append(block)

    def warp(self, i, warp):
        """``DqByQueryHead.run``, with ``FirstStoreDq``."""
        flight = []
        for heads, tiles, block in self.orders[i]:
            for h, head in enumerate(heads):
                for m in tiles:
                    yield from self.store_or_add_tile((head, m), block, warp, flight)
                    if h > 0 and m == tiles[0]:
                        yield from self.signal_head_added(flight, heads[h - 1], PARTS * (1 + (self.wrong == "but")))
                if h > 0 and not tiles and self.wrong != "empty":
                    yield from self.signal_head_added(flight, heads[h - 1])
            yield from self.signal_head_added(flight, heads[-1], PARTS * (self.wrong == "last"))
        yield from self.helper_warps()

    def store_or_add_tile(self, tile, block, warp, flight):
        at, mine = self.word(tile, warp), block + 1
        found = seen = self.words[at]
        yield lambda: True  # until dS is there
        if seen < self.there:
            found = self.words[at] = self.words[at] or mine
            if owner(found) != mine:
                yield lambda: self.words[at] >= self.there
        first = seen < self.there and owner(found) == mine
        for rows in ((tile, warp, part) for part in range(PARTS)):
            meeting = tile, block, rows[-1]
            self.arrived[meeting] += 1
            yield lambda meeting=meeting: not self.meet or self.arrived[meeting] == 4
            assert first or rows in self.acc, "added to what is not there"
            flight.append((rows, block, first))
        if first:
            yield from self.wait_and_tell(flight, 0, self.words, at, STORED, self.wrong == "store")

    def signal_head_added(self, flight, head, but=0):
        yield from self.wait_and_tell(flight, but, self.added, head, 1, self.wrong == "sign-off")

    def wait_and_tell(self, flight, but, counts, i, n, reverse):
        for step in ("signal", "wait") if reverse else ("wait", "signal"):
            yield lambda: True
            if step == "signal":
                counts[i] += n
            while step == "wait" and len(flight) > but:
                rows, block, first = flight.pop(0)
                assert first == (rows not in self.acc), "stored twice, or onto what has been added"
                self.acc.setdefault(rows, []).append(block)

    def helper_warps(self):
        """``ConvertHelperWarps.run``."""
        for tile in self.tiles:
            yield lambda head=tile[0]: self.added[head] >= 4 * len(self.blocks[head])
            there = self.words[self.word(tile, 0)] > 0 or self.wrong == "unseen"
            for rows in ((tile, warp, part) for warp in range(4) for part in range(PARTS)):
                dq = sorted(self.acc.get(rows, GARBAGE)) if there else []
                assert dq == sorted(self.seen_by[tile]), f"finished as {dq}"
            self.finished.add(tile)

    def run(self, choose):
        warps = [self.warp(i, warp) for i in range(len(self.orders)) for warp in range(4)]
        waits = {w: (lambda: True) for w in (*warps, *(self.helper_warps() for _ in self.orders))}
        while waits:
            can = [w for w in waits if waits[w]()]
            assert can, "all wait"
            w = choose(can)
            try:
                waits[w] = next(w)
            except StopIteration:
                del waits[w]


def run(rng, num_sms, kv_heads, group, tiles, blocks, meet=True, wrong=""):
    """Whatever order the tiles of a task have, and the tasks, and whichever tiles a block of keys is seen by."""
    tasks = [(range(group * kv, group * kv + group), rng.sample(range(tiles), rng.randint(0, tiles)), block)
             for kv in range(kv_heads) for block in range(blocks)]
    rng.shuffle(tasks)
    every = {(head, m) for head in range(kv_heads * group) for m in range(tiles)}
    machine = Machine([tasks[i::num_sms] for i in range(num_sms)], meet, tiles=sorted(every), wrong=wrong)
    machine.run(rng.choice)
    assert machine.finished == every
    for tile in every:
        first = {machine.acc[tile, warp, part][0] for warp in range(4) for part in range(PARTS)
                 if machine.seen_by[tile]}
        assert len(first) <= 1 and machine.words[tile, 0] == sum(THERE + block + 1 for block in first)


@given(st.integers(1, 4), st.integers(1, 2), st.integers(1, 3), st.integers(1, 3), st.integers(1, 4), st.booleans(),
       st.randoms(use_true_random=True))  # with the other kind hypothesis drops the longer runs
def test_tiles_are_stored_once_and_finished_when_all_is_there(num_sms, kv_heads, group, tiles, blocks, meet, rng):
    """And none waits for ever."""
    run(rng, num_sms, kv_heads, group, tiles, blocks, meet)


@pytest.mark.parametrize("wrong, why", (
    ("but", "finished as"), ("last", "finished as"), ("sign-off", "finished as"), ("store", "not there"),
    ("empty", "all wait"), ("unseen", r"finished as \[-1\]")))
def test_a_model_that_is_wrong_is_found(wrong, why):
    """but: a head's last tile may be in flight when it is signed off, as well as the next head's first. last: of a
    task's last head likewise. sign-off, store: signalled before the wait. empty: no sign-off where a task has no
    tile. unseen: a tile that no block of keys has is read."""
    with pytest.raises(AssertionError, match=why):
        for seed in range(200):
            run(random.Random(seed), 3, 2, 2, 2, 3, wrong=wrong)


def test_a_model_that_hangs_is_found():
    """Each warp claims its own rows of a tile: two blocks that are first for some of them each wait for each other."""
    with pytest.raises(AssertionError, match="all wait"):
        for seed in range(200):
            Machine([[((0,), (0,), 0)], [((0,), (0,), 1)]], True, alone=True).run(random.Random(seed).choice)


@pytest.mark.parametrize("dtype", ("bf16", "fp16"))
def test_where_it_is_planned(dtype):
    """Causal, head_dim up to 128, short sequences of one length, an even number of query heads, four or more, on each
    K/V head; where dQ is added up."""
    spec = BackwardSpec(dtype, 128, right=True)
    for wanted, which, length, group in (
            (True, spec, "short", 4), (True, spec, "short", 8), (True, replace(spec, dlse=True), "short", 6),
            (False, spec, "short", 1), (False, spec, "short", 2), (False, spec, "short", 5), (False, spec, "medium", 4),
            (False, spec, "long", 4), (False, replace(spec, right=False), "short", 4),
            (False, replace(spec, left=True), "short", 4), (False, replace(spec, softcap=True), "short", 4),
            (False, replace(spec, deterministic=True), "short", 4), (False, replace(spec, dq=False), "short", 4),
            (False, replace(spec, width=64), "short", 4), (False, replace(spec, varlen=True), "short", 4),
            (False, replace(spec, varlen=True), "brief", 4)):
        found = plan(which, length, group)
        assert (found.dq_reduce == "first_store") == wanted, (which, length, group)
        if wanted:
            kernel = BackwardKernel(which, found)
            parts = DqByQueryHead, FirstStoreDq, ConvertHelperWarps
            assert tuple(map(type, (kernel.dq, kernel.dq.store, kernel.helper_warps))) == parts


def test_it_is_shipped():
    found = [k for k in catalog.shipped() if k.recipe.args[1].dq_reduce == "first_store"]
    assert {k.recipe.args[0].dtype for k in found} == {"bf16", "fp16"}
