"""dQ by "ordered": in which order blocks of keys add to a tile, whatever the timing, and that none waits for ever."""
import random
from collections import Counter, defaultdict
from dataclasses import dataclass, replace
from types import SimpleNamespace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.helpers.emulation.written import as_written
from tkq.attention.backward import catalog, tile_scheduler
from tkq.attention.backward.dq_ordered import OrderedDq
from tkq.attention.backward.dq_ordered_registers import OrderedDqFromRegisters
from tkq.attention.backward.helper_warps import ConvertHelperWarps, SendersAlone
from tkq.attention.backward.kernel import BackwardKernel
from tkq.attention.backward.plan import PACKED_LENGTHS, plan
from tkq.attention.backward.spec import WIDTHS, BackwardSpec
from tkq.attention.backward.tile_scheduler import TileScheduler
from tkq.attention.common.integers import ceil_div
from tkq.attention.common.query_mask import QueryExtent, blocks_that_add, query_tiles_of, tile_of_task
from tkq.attention.common.tile_order import blocks_before, serial_block, serial_heads

PARTS, GARBAGE = 2, [-1]  # of a tile: parts; what is there before


@dataclass(frozen=True)
class Problem:
    """Equal heads, as ``TileScheduler`` sees them. both_ways: the last heads have their first blocks first."""

    extent: QueryExtent
    heads: int
    l2_section: int
    tail_heads: int
    both_ways: bool

    @property
    def blocks(self):
        return ceil_div(self.extent.rows_k, self.extent.block)

    @property
    def descending(self):
        return serial_heads(self.heads, self.l2_section, self.tail_heads) if self.both_ways else self.heads

    def tasks(self):
        """(head, block) as they are claimed."""
        order = [tile_of_task(i, self.blocks, self.heads, self.l2_section, True, self.tail_heads)
                 for i in range(self.blocks * self.heads)]
        return [(head, serial_block(n, self.blocks, head < self.descending)) for head, n in order]

    def tiles(self, head, block):
        """As ``each_tile``."""
        seen = query_tiles_of(self.extent, block * self.extent.block)
        tiles = list(range(seen.first, seen.end))
        return tiles if head < self.descending else tiles[::-1]

    def that_add(self, m):
        return blocks_that_add(self.extent, m)

    def before(self, head, block, m):
        return blocks_before(block, self.that_add(m), head < self.descending)

    def wanted(self, head, m):
        """The blocks in the order in which they are to add to a tile."""
        blocks = list(range(self.that_add(m)))
        return blocks[::-1] if head < self.descending else blocks

    def every(self):
        return [(head, m) for head in range(self.heads) for m in range(ceil_div(self.extent.rows_q, self.extent.tile))]


@st.composite
def problems(draw, most=24):
    block = draw(st.sampled_from((2, 4)))
    extent = QueryExtent(draw(st.integers(1, most)), draw(st.integers(1, most)), draw(st.sampled_from((2, 4))), block,
                         None, draw(st.none() | st.integers(0, most)))
    heads = draw(st.integers(1, 5))
    return Problem(extent, heads, draw(st.integers(1, heads)), draw(st.integers(0, 4)),
                   draw(st.booleans()) and extent.right is not None)


@given(problems(60))
def test_each_block_that_sees_a_tile_has_one_place_in_its_order(problem):
    """And the blocks before it have been claimed before."""
    tasks = problem.tasks()
    assert sorted(tasks) == [(head, block) for head in range(problem.heads) for block in range(problem.blocks)]
    claimed = {task: i for i, task in enumerate(tasks)}
    visits = defaultdict(list)
    for head, block in tasks:
        tiles = problem.tiles(head, block)
        assert len(set(tiles)) == len(tiles)
        for m in tiles:
            visits[head, m].append(block)
    for head, m in problem.every():
        wanted = problem.wanted(head, m)
        assert visits[head, m] == wanted  # so those before are claimed before
        assert [problem.before(head, block, m) for block in wanted] == list(range(len(wanted)))
        assert sorted(wanted, key=lambda block: claimed[head, block]) == wanted
    assert problem.that_add(ceil_div(problem.extent.rows_q, problem.extent.tile)) == 0  # no row, no block


class Machine:
    """Thread blocks that claim one task after the other. Of each, the dQ warpgroup, senders, which take tiles in turns,
    and a warp that converts. Each is a generator that yields what it waits for; of a semaphore a parity, as in
    hardware. What a sender sends is in flight until it waits for it. wrong: what is not as in the kernel."""

    def __init__(self, problem, num_sms, senders, one_buffer, wrong=""):
        self.problem, self.senders, self.one_buffer, self.wrong = problem, senders, one_buffer, wrong
        tasks = problem.tasks()
        self.tasks = iter(tasks[::-1] if wrong == "claims" else tasks)
        self.taken, self.done = [[] for _ in range(num_sms)], [False] * num_sms
        self.full, self.empty, self.buffers = Counter(), Counter(), {}  # by thread block and sender
        self.words, self.acc, self.finished, self.to_convert = Counter(), {}, set(), iter(problem.every())

    def buffer(self, i, sender):
        return i, 0 if self.one_buffer else sender

    def dq_warpgroup(self, i):
        turn = 0
        for task in self.tasks:
            self.taken[i].append(task)
            for m in self.problem.tiles(*task):
                sender, turn = turn % self.senders, turn + 1
                for part in range(PARTS):
                    if part == 0 and self.one_buffer and self.wrong != "buffer":
                        for other in range(self.senders):
                            yield lambda other=other: self.empty[i, other] % 2 != 1
                    yield lambda part=part, sender=sender: self.empty[i, sender] % 2 != (part % 2) ^ 1
                    self.buffers[self.buffer(i, sender)] = *task, m, part
                    self.full[i, sender] += 1
        self.done[i] = True
        yield from self.convert()

    def sender(self, i, sender):
        turn = n = 0
        while True:
            yield lambda n=n: len(self.taken[i]) > n or self.done[i]
            if len(self.taken[i]) == n:
                break
            head, block = self.taken[i][n]
            n += 1
            for m in self.problem.tiles(head, block):
                if turn % self.senders == sender:
                    yield from self.send_tile(i, sender, head, block, m)
                turn += 1
        yield from self.convert()

    def send_tile(self, i, sender, head, block, m):
        before, tile = self.problem.before(head, block, m), (head, m)
        if self.wrong != "order":
            yield lambda: self.words[tile] >= before
        for part in range(PARTS):
            yield lambda part=part: self.full[i, sender] % 2 != part % 2
            if self.wrong == "free":
                self.empty[i, sender] += 1
                yield lambda: True
            assert self.buffers[self.buffer(i, sender)] == (head, block, m, part), "another part was sent"
            if self.wrong != "free":
                self.empty[i, sender] += 1
        if self.wrong == "count":
            self.words[tile] += 1
        yield lambda: True
        for part in range(PARTS):
            assert (before == 0) == ((tile, part) not in self.acc), "stored twice, or onto what has been added"
            self.acc.setdefault((tile, part), []).append(block)
        if self.wrong != "count":
            self.words[tile] += 1

    def convert(self):
        """Any warp, when it has no task."""
        for head, m in self.to_convert:
            tile, wanted = (head, m), self.problem.wanted(head, m)
            yield lambda tile=tile, wanted=wanted: self.words[tile] >= len(wanted) - (self.wrong == "complete")
            there = self.words[tile] > 0 or self.wrong == "unseen"
            for part in range(PARTS):
                dq = self.acc.get((tile, part), GARBAGE) if there else []
                assert dq == wanted, f"finished as {dq}"
            self.finished.add(tile)

    def run(self, choose):
        sms = range(len(self.taken))
        roles = [*(self.dq_warpgroup(i) for i in sms), *(self.convert() for _ in sms),
                 *(self.sender(i, n) for i in sms for n in range(self.senders))]
        waits = {w: (lambda: True) for w in roles}
        while waits:
            can = [w for w in waits if waits[w]()]
            assert can, "all wait"
            w = choose(can)
            try:
                waits[w] = next(w)
            except StopIteration:
                del waits[w]
        assert self.finished == set(self.problem.every())


@given(problems(), st.integers(1, 4), st.integers(1, 3), st.booleans(), st.randoms(use_true_random=True))
def test_a_tile_is_added_up_in_one_order_whatever_the_timing(problem, num_sms, senders, one_buffer, rng):
    """Also where few of the grid's blocks are resident. And none waits for ever. With hypothesis' own random numbers
    the longer runs would be dropped."""
    Machine(problem, num_sms, senders, one_buffer).run(rng.choice)


class MachineOfRegisters(Machine):
    """The dQ warpgroup sends from its registers, when a sender gives a tile its turn; what it has sent is in flight
    until the sender waits for it."""

    def __init__(self, problem, num_sms, senders, wrong=""):
        super().__init__(problem, num_sms, senders, False, wrong)

    def dq_warpgroup(self, i):
        turn = 0
        for task in self.tasks:
            self.taken[i].append(task)
            for m in self.problem.tiles(*task):
                sender, phase = turn % self.senders, turn // self.senders % 2
                if self.wrong != "turn":
                    yield lambda sender=sender, phase=phase: self.full[i, sender] % 2 != phase
                self.buffers[i, sender] = *task, m
                self.empty[i, sender] += 1
                turn += 1
                yield lambda: True
        self.done[i] = True
        yield from self.convert()

    def send_tile(self, i, sender, head, block, m):
        before, tile = self.problem.before(head, block, m), (head, m)
        phase = self.full[i, sender] % 2
        if self.wrong != "order":
            yield lambda: self.words[tile] >= before
        self.full[i, sender] += 1
        if self.wrong != "left":
            yield lambda: self.empty[i, sender] % 2 != phase
        if self.wrong == "count":
            self.words[tile] += 1
            yield lambda: True
        assert self.buffers.get((i, sender)) == (head, block, m), "another tile was sent"
        for part in range(PARTS):
            assert (before == 0) == ((tile, part) not in self.acc), "stored twice, or onto what has been added"
            self.acc.setdefault((tile, part), []).append(block)
        if self.wrong != "count":
            self.words[tile] += 1


@given(problems(), st.integers(1, 4), st.integers(1, 3), st.randoms(use_true_random=True))
def test_so_it_is_from_registers(problem, num_sms, senders, rng):
    MachineOfRegisters(problem, num_sms, senders).run(rng.choice)


CAUSAL = Problem(QueryExtent(12, 16, 2, 4, None, 0), 3, 2, 1, True)


@pytest.mark.parametrize("wrong, why", (
    ("order", "finished as|stored twice"), ("count", "finished as|stored twice"), ("complete", "finished as"),
    ("claims", "all wait"), ("buffer", "another part"), ("free", "another part")))
def test_a_model_that_is_wrong_is_found(wrong, why):
    """order: no block waits for those before. count: a block counts itself in before its part has arrived. complete: a
    tile is read one block too early. claims: a block is claimed before those that it waits for. buffer: the
    one buffer is written while another sender's part is in it. free: it is free before the part has been read."""
    with pytest.raises(AssertionError, match=why):
        for seed in range(100):
            Machine(CAUSAL, 3, 2, True, wrong).run(random.Random(seed).choice)


@pytest.mark.parametrize("wrong, why", (
    ("order", "finished as|stored twice"), ("count", "finished as|stored twice"), ("complete", "finished as"),
    ("claims", "all wait"), ("turn", "another tile|all wait"), ("left", "another tile")))
def test_a_model_of_registers_that_is_wrong_is_found(wrong, why):
    """turn: a tile leaves without having been given its turn. left: it is counted in before it has left."""
    with pytest.raises(AssertionError, match=why):
        for seed in range(100):
            MachineOfRegisters(CAUSAL, 3, 2, wrong).run(random.Random(seed).choice)


def test_a_tile_that_no_block_sees_is_not_read():
    few = Problem(QueryExtent(12, 4, 2, 4, None, 0), 1, 1, 0, False)
    assert few.that_add(0) == 0
    with pytest.raises(AssertionError, match=r"finished as \[-1\]"):
        Machine(few, 1, 1, True, "unseen").run(random.Random(0).choice)


@given(problems(60), st.integers(1, 3))
def test_all_roles_go_through_the_same_tiles(problem, group):
    """What the producer, the dQ warpgroup and senders visit, and what the dK/dV warpgroups do."""
    spec = BackwardSpec(right=problem.extent.right is not None, deterministic=True)
    scheduler = TileScheduler(spec, replace(plan(spec), longest_first=problem.both_ways))
    assert scheduler.both_ways == problem.both_ways
    host = SimpleNamespace(range=lambda *bounds, unroll: range(*bounds), select_=lambda c, a, b: a if c else b)
    g = SimpleNamespace(kv_heads=problem.heads, heads_per_kv=group, descending=problem.descending)
    with pytest.MonkeyPatch.context() as patch:
        for name, value in (("cutlass", host), ("const_expr", bool), ("Int32", int)):
            patch.setattr(tile_scheduler, name, value)
        visit = TileScheduler.visit_both_ways if scheduler.both_ways else TileScheduler.visit_forward
        for head, block in problem.tasks():
            seen = query_tiles_of(problem.extent, block * problem.extent.block)
            t = SimpleNamespace(sequence=0, head=head, block=block, **vars(seen))
            tiles, steps = [], []
            as_written(TileScheduler.each_tile)(scheduler, g, t, lambda i, h, m, tiles=tiles: tiles.append((i, h, m)))
            as_written(visit)(scheduler, g, None, t, None,
                              lambda g, s, t, c, m, masked, steps=steps: steps.append((m, masked)))
            wanted = problem.tiles(head, block)
            assert [(h, m) for _, h, m in tiles] == [(h, m) for h in range(group) for m in wanted]
            assert [i for i, (number, _, _) in enumerate(tiles) if number == 0] == [0] * bool(tiles)
            assert steps == [(m, m < seen.first_unmasked) for m in wanted] * group


@pytest.mark.parametrize("width", WIDTHS)
def test_where_it_is_planned(width):
    """Deterministic, without a softcap and a limit on the left, and only there; in sequences of equal lengths and in
    packed ones; at head_dim 256 without shared heads; at head_dim 64 also where nobody asks for it, of equal lengths
    without shared heads."""
    spec = BackwardSpec(width=width, deterministic=True)
    for length in PACKED_LENGTHS:
        for wanted, which in (
                (True, spec), (True, replace(spec, right=True)), (True, replace(spec, dlse=True)),
                (True, replace(spec, varlen=True, right=True)), (True, replace(spec, deterministic=False)),
                (False, replace(spec, softcap=True)), (False, replace(spec, left=True)),
                (False, replace(spec, dq=False))):
            if length == "brief" and not which.varlen:
                continue
            for group in (1, 4):
                found, faster = plan(which, length, group), width == 64 and group == 1 and not which.varlen
                asked = which.deterministic or faster
                assert found.ordered == (asked and wanted and (width < 256 or group == 1)), (which, length, group)
                if found.ordered:
                    kernel = BackwardKernel(which, found)
                    parts = (OrderedDqFromRegisters, SendersAlone) if width == 256 else (OrderedDq, ConvertHelperWarps)
                    assert (type(kernel.dq), type(kernel.helper_warps)) == parts
                    assert kernel.scheduler.both_ways == (which.right and not which.varlen)


@pytest.mark.parametrize("change, words", (
    (dict(helper_warps=False), "ordered needs helper_warps"), (dict(by_query_head=True), "without fuse_preprocess"),
    (dict(fuse_preprocess=True), "without fuse_preprocess"), (dict(dq_stages=3), "dq_stages is 0, 1 or 2"),
    (dict(dq_cols=128, registers=(32, 96, 192)), "an even number of parts")))
def test_what_cannot_run_is_refused(change, words):
    with pytest.raises(ValueError, match=words):
        replace(plan(BackwardSpec(deterministic=True)), **change).check(128)


def test_a_limit_on_the_left_is_refused():
    with pytest.raises(NotImplementedError, match="ordered with a limit on the left"):
        BackwardKernel(BackwardSpec(left=True), plan(BackwardSpec(deterministic=True)))


def test_it_is_shipped():
    found = [k for k in catalog.shipped() if k.recipe.args[1].ordered]
    assert {(k.recipe.args[0].dtype, k.recipe.args[0].width) for k in found} == {
        (dtype, width) for dtype in ("bf16", "fp16") for width in WIDTHS}
