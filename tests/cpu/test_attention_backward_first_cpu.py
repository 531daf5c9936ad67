"""dQ without zeroes before: who stores a tile, who adds, who finishes it, and that nobody waits for ever."""
import random
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tkq.attention import backward_plan, backward_shipped
from tkq.attention.backward_first import STORED, THERE, owner
from tkq.attention.backward_first_config import FirstConfig
from tkq.attention.backward_plan import plan, recipe
from tkq.attention.backward_spec import BackwardSpec


class Machine:
    """Thread blocks that each go through (tile, block of keys), four warps each that meet at each product, if ``meet``.
    Each warp is a generator that yields what it waits for. alone: it claims its own rows, with a word of their own.

    tiles: of which dQ is made in the background, by a warp beside each block, when all blocks of keys are done with."""

    def __init__(self, orders, meet, alone=False, tiles=0):
        self.orders, self.meet, self.there, self.tiles = orders, meet, STORED if alone else THERE, tiles
        self.wanted, self.signed_off, self.next, self.finished = 4 * sum(map(len, orders)), 0, 0, {}
        self.word = lambda tile, warp: (tile, warp if alone else 0)
        self.words = {self.word(tile, warp): 0 for order in orders for tile, _ in order for warp in range(4)}
        self.arrived, self.stored, self.added = {}, {}, {}

    def warp(self, i, warp):
        for step, (tile, block) in enumerate(self.orders[i]):
            at = self.word(tile, warp)
            seen, mine = self.words[at], block + 1
            found = seen
            yield lambda: True  # until dS is there
            if seen < self.there:
                found = self.words[at] = self.words[at] or mine
                if owner(found) != mine:
                    yield lambda at=at: self.words[at] >= self.there
            first = seen < self.there and owner(found) == mine
            self.arrived[i, step] = self.arrived.get((i, step), 0) + 1
            yield lambda i=i, step=step: not self.meet or self.arrived[i, step] == 4
            (self.stored if first else self.added).setdefault(tile, []).append(block)
            assert first or self.there == STORED or len(self.stored[tile]) == 4, "added to what is not there"
            yield lambda: True
            if first:
                self.words[at] += STORED
            self.signed_off += 1

    def background(self):
        while self.next < self.tiles:
            tile = self.next
            self.next += 1
            yield lambda: self.signed_off == self.wanted
            there = self.words.get(self.word(tile, 0), 0) > 0
            self.finished[tile] = len(self.stored[tile]) + len(self.added.get(tile, [])) if there else 0

    def run(self, choose):
        warps = [self.warp(i, warp) for i in range(len(self.orders)) for warp in range(4)]
        waits = {w: (lambda: True) for w in (*warps, *(self.background() for _ in self.orders))}
        while waits:
            can = [w for w in waits if waits[w]()]
            assert can, "all wait"
            w = choose(can)
            try:
                waits[w] = next(w)
            except StopIteration:
                del waits[w]


@given(st.integers(1, 4), st.integers(1, 4), st.integers(1, 4), st.booleans(), st.randoms(use_true_random=False))
def test_a_tile_is_stored_once_and_nobody_waits_for_ever(processors, tiles, blocks, meet, rng):
    """Whatever order the tiles of a task have, and the tasks."""
    tasks = [[(tile, block) for tile in rng.sample(range(tiles), tiles)] for block in range(blocks)]
    orders = [[visit for task in tasks[i::processors] for visit in task] for i in range(processors)]
    machine = Machine(orders, meet, tiles=tiles + 1)
    machine.run(rng.choice)
    assert machine.finished == {**dict.fromkeys(range(tiles), 4 * blocks), tiles: 0}  # the last one is nobody's
    for tile in range(tiles):
        assert len(machine.stored[tile]) == 4 and len(set(machine.stored[tile])) == 1
        visits = machine.stored[tile] + machine.added.get(tile, [])
        assert sorted(visits) == sorted(4 * list(range(blocks)))
        assert machine.words[tile, 0] == THERE + machine.stored[tile][0] + 1


def test_a_model_that_hangs_is_found():
    """Each warp claims its own rows of a tile: two blocks that are first for some of them each wait for each other."""
    with pytest.raises(AssertionError, match="all wait"):
        for seed in range(200):
            Machine([[(0, 0)], [(0, 1)]], True, alone=True).run(random.Random(seed).choice)


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
        assert isinstance(found, FirstConfig) == wanted, (which, length, group)
        module = {"bf16": "backward_pairs", "fp16": "backward_first"}[dtype]
        assert not wanted or recipe(which, found.check(128)).module == f"tkq.attention.{module}"


def test_it_is_shipped():
    for kernels in (backward_plan.shipped(), backward_shipped.shipped()):
        found = [k for k in kernels if isinstance(k.recipe.args[1], FirstConfig)]
        assert {k.recipe.args[0].dtype for k in found} == {"bf16", "fp16"}
